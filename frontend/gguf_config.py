"""The model's configuration out of a GGUF header, by transformers' own tables.

transformers reads the file itself and slowly, so it is handed a small copy of the (already validated) header:
the metadata without the vocabulary, and the tensors' names without their data.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.errors import UserError
from llmc.frontend.config import quiet_transformers
from llmc.frontend.gguf_header import GgufHeader
from llmc.scratch import scratch_directory

_LONG_ARRAY = 4096  # metadata arrays beyond this are vocabulary; no configuration reads them
# Where "llama3" rope scaling changes over, the only values ever published; checked against the stored
# factors.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def gguf_config(header: GgufHeader, path: Path) -> dict[str, Any]:
    """The contents of a config.json for this file, as transformers' tables give it.

    Raises UserError for an architecture that transformers cannot load from GGUF and for a split file.
    """
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise UserError(f"{path} names no architecture (general.architecture): it holds no language model")
    if metadata.get("split.count", 1) > 1:
        raise UserError(
            f"{path} is one of {metadata['split.count']} parts of a split GGUF: merge them first "
            "(llama-gguf-split --merge FIRST-PART OUT.gguf)"
        )
    raw = _by_transformers(header, path, architecture)
    if "token_embd.weight" in header.tensors:  # the table misses it for some, and padding makes metadata differ
        raw["vocab_size"] = header.tensors["token_embd.weight"].shape[0]
    return raw


def _by_transformers(header: GgufHeader, path: Path, architecture: str) -> dict[str, Any]:
    """What transformers' loader makes of the header copy."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with scratch_directory() as folder, quiet_transformers():
        copy = folder / "header.gguf"
        copy.write_bytes(_header_copy(header))
        try:
            return dict(load_gguf_checkpoint(str(copy), return_tensors=False)["config"])
        except Exception as error:  # the loader trusts its input, and fails in as many ways as there are mistakes
            reason = " ".join(str(error).split()).replace(str(copy), path.name)
            raise UserError(
                f"{path}: transformers cannot read a GGUF of architecture {architecture!r} ({reason[:200]}): "
                "use the model's safetensors checkpoint instead"
            ) from error


def _header_copy(header: GgufHeader) -> bytes:
    """A valid GGUF with the short metadata and, under each tensor's name, one zero."""
    pairs = [raw for key, raw in header.pairs.items() if not _is_long(header.metadata[key])]
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(header.tensors), len(pairs)) + b"".join(pairs)
    names = [name.encode() for name in header.tensors]
    entry = struct.pack("<IQIQ", 1, 1, 0, 0)  # one dimension of one F32, all at offset 0
    table = b"".join(struct.pack("<Q", len(name)) + name + entry for name in names)
    alignment = header.metadata.get("general.alignment", 32)
    padding = -(len(head) + len(table)) % alignment
    return head + table + bytes(padding + alignment)


def _is_long(value: Any) -> bool:
    return isinstance(value, list) and len(value) > _LONG_ARRAY


def apply_positions(config: Any, header: GgufHeader, path: Path) -> None:
    """Adds what transformers' tables leave out: the context length under any name, and rope scaling.

    Raises UserError for a scaling that has no counterpart, rather than computing other positions than the
    model's.
    """
    architecture = header.metadata["general.architecture"]
    context = header.metadata.get(f"{architecture}.context_length")
    if context is not None and getattr(config, "max_position_embeddings", context) != context:
        config.max_position_embeddings = context
    prefix = f"{architecture}.rope.scaling."
    kind = header.metadata.get(prefix + "type", "none")
    if kind == "none":
        return
    scaling: dict[str, Any] = {"rope_type": kind, "factor": header.metadata.get(prefix + "factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = header.metadata.get(prefix + "original_context_length")
    if kind not in ("linear", "yarn") or None in scaling.values():
        raise UserError(f"{path} scales its rope by {kind!r}, which cannot be read from GGUF: use the safetensors")
    _rope_parameters(config, path).update(scaling)


def apply_rope_factors(config: Any, factors: npt.NDArray[np.float32], path: Path) -> None:
    """Sets "llama3" rope scaling when the file's per-frequency divisors (rope_freqs.weight) are exactly that.

    All ones mean no scaling. Raises UserError for divisors that no known scaling gives.
    """
    if np.all(factors == 1.0):
        return
    parameters = _rope_parameters(config, path)
    frequencies = parameters["rope_theta"] ** (-np.arange(factors.size, dtype=np.float64) / factors.size)
    factor = float(factors.max())
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    wavelengths = 2 * np.pi / frequencies
    smooth = (_LLAMA3_ROPE["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if not np.allclose(expected, factors, rtol=1e-3):
        raise UserError(f"{path} scales its rope in a way that is not known (rope_freqs.weight): use the safetensors")
    parameters.update({"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE})


def _rope_parameters(config: Any, path: Path) -> dict[str, Any]:
    """The rope settings that scaling applies to: the only ones, or those of the full-attention layers."""
    parameters = getattr(config, "rope_parameters", None)
    if isinstance(parameters, dict) and "full_attention" in parameters:
        parameters = parameters["full_attention"]
    if not isinstance(parameters, dict) or "rope_theta" not in parameters:
        raise UserError(f"{path} scales a rope, but its architecture has none: the file is damaged")
    return parameters
