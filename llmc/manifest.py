"""What a plan says of itself: the manifest, put together from what the stages of a build found."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import llmc
from llmc.accuracy import Accuracy
from llmc.codegen.weights import Entry
from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.tokenizer import TokenizerAssets
from llmc.kv_page import PAGE_SIZE
from llmc.passes.pipeline import PipelineReport
from llmc.stored import StoredWeights

DATA = Path(__file__).parent / "data"
_TOOLS = ("torch", "transformers", "ziglang", "numpy", "tokenizers")


def model_section(config: Any, vocab_size: int, layers: int, max_model_len: int, page_bytes: int) -> dict[str, Any]:
    """page_bytes: of one KV page of all layers."""
    return {
        "architecture": type(config).__name__.removesuffix("Config"),
        "vocab_size": vocab_size,
        "num_layers": layers,
        "max_model_len": max_model_len,
        "page_size": PAGE_SIZE,
        "kv_bytes_per_token": page_bytes // PAGE_SIZE,
    }


def weight_section(entry: Entry) -> dict[str, Any]:
    """One stored weight."""
    if entry.ref is not None:
        shape, name = entry.ref.shape, entry.ref.describe()
    else:
        assert entry.constant is not None
        shape, name = tuple(entry.constant.shape), "constant"
    short = name if len(name) <= 400 else f"{name[:380]}… #{hashlib.sha256(name.encode()).hexdigest()[:12]}"
    return {"name": short, "shape": list(shape), "format": entry.format.name, "gated": entry.gated,
            "offset": entry.offset, "size": entry.size}  # fmt: skip


def accuracy_section(result: Accuracy | None, eval_text: Path | None) -> dict[str, Any] | None:
    if result is None:
        return None
    digest = hashlib.sha256((eval_text or DATA / "eval.txt").read_bytes()).hexdigest()
    text = "llmc/data/eval.txt" if eval_text is None else eval_text.name
    return result.manifest() | {"text": text, "text_sha256": digest, "against": "float32 graph", "measured_on": "cpu"}


def provenance_section(
    checkpoint: Checkpoint,
    report: PipelineReport,
    cxx: str | None,
    backend_tools: Sequence[str],
    stored: Sequence[StoredWeights],
) -> dict[str, Any]:
    """backend_tools: packages that the plan's code depends on besides those of every build. stored: what became of
    the weights of a quantised checkpoint."""
    grids = {"quantised_weights": [asdict(weights) for weights in stored]} if stored else {}
    return grids | {
        "checkpoint": {"name": checkpoint.source_label, "sha256": checkpoint.digest},
        "llmc": llmc.__version__,
        "tools": {name: metadata.version(name).partition("+")[0] for name in (*_TOOLS, *backend_tools)},
        "compiler": Path(cxx).name if cxx else "zig c++",
        "passes": [{"name": name, "count": count} for name, count in report.counts.items()],
    }


def tokenizer_section(assets: TokenizerAssets | None) -> dict[str, Any] | None:
    if assets is None:
        return None
    return {"eos_token_ids": list(assets.eos_token_ids), "special_tokens": dict(assets.special_tokens),
            "add_bos": assets.add_bos}  # fmt: skip


def generation_section(config: dict[str, Any]) -> dict[str, Any]:
    """The scalar fields of generation_config.json that mean something to sampling."""
    kept = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "do_sample")
    return {k: v for k, v in config.items() if k in kept and isinstance(v, bool | int | float)}
