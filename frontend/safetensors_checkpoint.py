"""A Hugging Face directory: config.json, safetensors (one file or shards with an index),
generation_config.json.

Opening validates every header and reads no tensor; pickle files are never read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.errors import UserError
from llmc.frontend.checkpoint import TensorInfo
from llmc.frontend.config import build_config, normalise_config, read_json
from llmc.frontend.prequantized import find_quantised, take_settings
from llmc.frontend.quantised import Quantised
from llmc.frontend.raw_tensor import RawTensor
from llmc.frontend.rawfile import RawFile, check_finite, row_range, sha256_of
from llmc.frontend.safetensors_header import read_header
from llmc.frontend.text_part import text_config
from llmc.kernels.codes import Codes

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Files beside the weights that can change the plan.
TOKENIZER_FILES = (
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "merges.txt", "sentencepiece.bpe.model",
    "special_tokens_map.json", "spiece.model", "tekken.json", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip
TEMPLATE_DIRECTORY = "additional_chat_templates"


class SafetensorsCheckpoint:
    """`Checkpoint` over a directory. Weights stay on disk until `read`."""

    def __init__(self, path: Path, label: str, tell: Callable[[str], None] = lambda line: None) -> None:
        """`tell` gets a line about what is there and not used. Raises UserError for anything missing, malformed,
        truncated, pickled or quantised in an unsupported way."""
        self.path = path
        self.source_label = label
        _check_adapter(path, tell)
        if not (path / "config.json").is_file():
            raise UserError(f"{path} has no config.json: give the directory of a Hugging Face model, or a .gguf file")
        raw = read_json(path / "config.json")
        settings = take_settings(raw, str(path / "config.json"))
        whole = build_config(raw, str(path / "config.json"))
        self._hf_config = text_config(whole, str(path / "config.json"))
        self.is_multimodal = self._hf_config is not whole
        self._files: list[RawFile] = []
        self._quantised: dict[str, Quantised] = {}
        used: set[str] = set()
        try:
            self._stored = self._read_headers(find_weights(path))
            if settings is not None:
                self._quantised, used = find_quantised(settings, self._stored, str(path / "config.json"))
        except BaseException:
            self.close()
            raise
        plain = {name: TensorInfo(name, t.shape, t.dtype) for name, t in self._stored.items() if name not in used}
        quantised = {name: TensorInfo(name, q.full_shape, q.kind, q.grid, True) for name, q in self._quantised.items()}
        self.tensors: Mapping[str, TensorInfo] = dict(sorted((plain | quantised).items()))

    def _read_headers(self, weights: dict[str, set[str] | None]) -> dict[str, RawTensor]:
        """Every tensor of every shard; a shard must hold exactly what the index says of it."""
        found: dict[str, RawTensor] = {}
        for shard, listed in weights.items():
            file = RawFile(self.path / shard)
            self._files.append(file)
            tensors = read_header(file)
            if listed is not None and (missing := sorted(listed - tensors.keys())):
                raise UserError(f"{file.path} lacks {missing[0]}, which the index places there: fetch the shard again")
            for name, stored in tensors.items():
                if name in found:
                    raise UserError(
                        f"tensor {name} is stored twice, in {found[name].file.path.name} and {shard} "
                        f"of {self.path}: remove one"
                    )
                found[name] = RawTensor(name, file, stored)
        return found

    @cached_property
    def config(self) -> dict[str, Any]:
        return normalise_config(self._hf_config)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        path = self.path / "generation_config.json"
        return read_json(path) if path.is_file() else {}

    def hf_config(self) -> Any:
        import copy

        return copy.deepcopy(self._hf_config)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> npt.NDArray[np.float32]:
        if (quantised := self._quantised.get(name)) is not None:
            first, rows, _ = row_range(name, quantised.full_shape, start, stop)
            values = quantised.values(first, first + rows)
            check_finite(values, name, quantised.scales.file.path)
            return values
        tensor = self._stored[name]
        values = tensor.floats(start, stop)
        check_finite(values, name, tensor.file.path)
        return values

    def codes(self, name: str, start: int, stop: int) -> Codes | None:
        quantised = self._quantised.get(name)
        return None if quantised is None else quantised.codes(start, stop)

    @cached_property
    def digest(self) -> str:
        """sha256 over the names and contents of the weights, configuration, tokenizer and template files."""
        names = {file.path.name for file in self._files} | {
            "config.json",
            "generation_config.json",
            *TOKENIZER_FILES,
            *(f"{TEMPLATE_DIRECTORY}/{file.name}" for file in (self.path / TEMPLATE_DIRECTORY).glob("*.jinja")),
        }
        total = hashlib.sha256()
        for name in sorted(names):
            if (self.path / name).is_file():
                total.update(f"{name}\0{sha256_of(self.path / name)}\n".encode())
        return total.hexdigest()

    def close(self) -> None:
        for file in self._files:
            file.close()


def _check_adapter(path: Path, tell: Callable[[str], None]) -> None:
    """Raises UserError for a directory that holds an adapter and no model."""
    if not (path / "adapter_config.json").is_file():
        return
    if (path / "config.json").is_file() and any(not f.name.startswith("adapter_") for f in path.glob("*.safetensors")):
        tell("adapter_config.json and its adapter are left out: the base model is built")
        return
    base = str(read_json(path / "adapter_config.json").get("base_model_name_or_path") or "its base model")[:100]
    raise UserError(
        f"{path} holds an adapter (adapter_config.json) and not the model that it changes: merge it into {base} with "
        "peft (merge_and_unload, then save_pretrained) and build the result"
    )


def find_weights(path: Path) -> dict[str, set[str] | None]:
    """The weight files of a directory: {file name: tensors that an index places there, None without an
    index}.

    A single model.safetensors comes before an index, as in transformers. Raises UserError when there is none.
    """
    if (path / "model.safetensors").is_file():
        return {"model.safetensors": None}
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return _read_index(index)
    others = sorted(item.name for item in path.glob("*.safetensors") if not item.name.startswith("adapter_"))
    if len(others) == 1:
        return {others[0]: None}
    if others:
        raise UserError(f"{path} has {len(others)} safetensors files but no model.safetensors.index.json: fetch it too")
    pickles = sorted(item.name for item in path.iterdir() if item.suffix in _PICKLES)
    if pickles:
        raise UserError(
            f"{path} holds its weights as pickle ({pickles[0]}), which can run code and is refused: convert "
            "it where you trust it, with transformers: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)"
        )
    raise UserError(f"{path} has no weights: model.safetensors (or shards with an index) is missing")


def _read_index(index: Path) -> dict[str, set[str] | None]:
    """Shards by name from model.safetensors.index.json; a shard is a file beside the index, nowhere else."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no weight_map: fetch it again")
    shards: dict[str, set[str] | None] = {}
    for name, shard in sorted(weight_map.items()):
        if not isinstance(shard, str) or shard != Path(shard).name or not shard.endswith(".safetensors"):
            raise UserError(f"{index} places {name} in {str(shard)[:100]!r}, which is no safetensors file beside it")
        listed = shards.setdefault(shard, set())
        assert listed is not None
        listed.add(name)
    for shard in shards:
        if not (index.parent / shard).is_file():
            raise UserError(f"{index.parent / shard} is missing: the index lists {len(shards)} shards; fetch them all")
    return dict(sorted(shards.items()))
