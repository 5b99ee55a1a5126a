"""How far llmc and its peers on the CPU are from the float32 model, int8 and int4, on the same tokens.

Each engine gives the logits of windows of text in a process of its own. Their Kullback-Leibler divergence from the
logits of transformers in float32, and how often the likeliest token is the same, go to stdout and, as a section of its
own, to docs/benchmarks.md. llama.cpp is not measured: its tools give no logits. Models are those of cpu.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # llmc, from a checkout that is not installed

import numpy as np
from cpu_models import FORMATS, REPOSITORY, Models, Peers
from cpu_report import publish
from gpu_engines import Skipped

from llmc.errors import UserError

TEXT = REPOSITORY / "llmc" / "data" / "eval.txt"
WINDOWS, LENGTH = 8, 256
Logits = np.ndarray[Any, np.dtype[np.float32]]


def windows_of(checkpoint: Path, text: str) -> list[list[int]]:
    """Token ids [WINDOWS][LENGTH] of the beginning of a text. Raises UserError for one that is too short."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    if len(ids) < WINDOWS * LENGTH:
        raise UserError(f"the text has {len(ids)} tokens; {WINDOWS * LENGTH} are needed")
    return [ids[i * LENGTH : (i + 1) * LENGTH] for i in range(WINDOWS)]


def divergence(reference: Logits, logits: Logits) -> tuple[float, float]:
    """Mean KL(reference || other) in nats, and the share of positions with the same likeliest token, of logits
    [windows, length, vocabulary], in float64."""
    kl, same = [], []
    for p, q in zip(reference, logits, strict=True):
        log_p, log_q = _log_softmax(p), _log_softmax(q)
        kl.append((np.exp(log_p) * (log_p - log_q)).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
    return float(np.mean(kl)), float(np.mean(same))


def _log_softmax(x: Logits) -> Any:
    wide = x.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def logits_of(engine: str, python: str | None, model: Path, tokens: Path, folder: Path) -> Logits:
    """What accuracy_worker.py finds. Raises Skipped when the engine is not given or fails."""
    if python is None:
        raise Skipped("not given")
    out, worker = folder / f"{engine}.npy", Path(__file__).with_name("accuracy_worker.py")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [python, str(worker), engine, str(model), str(tokens), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Skipped((done.stderr.strip().splitlines() or ["without a word"])[-1])
    found: Logits = np.load(out)
    out.unlink()
    return found


def run(models: Models, peers: Peers, formats: list[str]) -> dict[str, Any]:
    """{"formats": {format: {engine: (KL, share)}}, "skipped": {engine and format: why}}."""
    makers: dict[str, tuple[str, str | None, Callable[[str], Path]]] = {
        "llmc": ("llmc", sys.executable, models.plan),
        "OpenVINO": ("openvino", peers.openvino, models.openvino),
        "ONNX Runtime GenAI": ("onnxruntime", peers.onnxruntime, models.onnxruntime),
    }
    found: dict[str, Any] = {"formats": {}, "skipped": {}}
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.json"
        tokens.write_text(json.dumps(windows_of(models.checkpoint(), TEXT.read_text())))
        reference = logits_of("transformers", peers.transformers, models.checkpoint(), tokens, Path(folder))
        for precision in formats:
            results = found["formats"].setdefault(precision, {})
            for name, (engine, python, make) in makers.items():
                try:
                    logits = logits_of(engine, python, make(precision), tokens, Path(folder))
                    results[name] = divergence(reference, logits)
                except Skipped as reason:
                    found["skipped"][f"{name} {precision}"] = str(reason)
    return found


def section(found: Mapping[str, Any], model: str) -> str:
    """Markdown of what `run` returned."""
    formats = found["formats"]
    names = list(dict.fromkeys(name for results in formats.values() for name in results))
    lines = [
        f"## Accuracy of {model}", "",
        f"{datetime.date.today().isoformat()}. Mean KL divergence from float32 and agreement of the likeliest token, "
        f"{WINDOWS * LENGTH} tokens in windows of {LENGTH}.", "",
        f"    tests/peers/accuracy.py --shape {model}", "",
        "| KL (top-1) | " + " | ".join(formats) + " |", "| --- |" + " ---: |" * len(formats),
    ]  # fmt: skip
    for name in names:
        cells = ["{:.4f} ({:.1%})".format(*results[name]) if name in results else "" for results in formats.values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, *(f"\n- {name}: skipped: {why}." for name, why in found["skipped"].items())]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("checkpoint", nargs="?", type=Path, metavar="DIR", help="a Hugging Face directory")
    what.add_argument("--shape", choices=["smollm2"], help="the real model")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="converted models, as cpu.py has them")
    parser.add_argument("--format", action="append", choices=FORMATS, help="may be repeated (default: both)")
    parser.add_argument("--no-docs", action="store_true", help="leave docs/benchmarks.md as it is")
    given = parser.parse_args(arguments)
    python = {name: os.environ.get(f"PEER_{name.upper()}_PYTHON") for name in ("openvino", "onnxruntime")}
    peers = Peers(transformers=os.environ.get("PEER_TRANSFORMERS_PYTHON", sys.executable), **python)
    name = given.shape or given.checkpoint.absolute().name
    models = Models(name, given.checkpoint and given.checkpoint.absolute(), given.work.absolute(), peers)
    formats = given.format or list(FORMATS)
    return publish(
        "accuracy.py", f"accuracy {name}", lambda: section(run(models, peers, formats), name), not given.no_docs
    )


if __name__ == "__main__":
    sys.exit(main())
