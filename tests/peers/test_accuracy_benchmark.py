"""The comparison of accuracy: figures, windows, our worker, and peers that are not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import accuracy
import accuracy_worker
import numpy as np
import pytest
from families import save_checkpoint, tiny_model
from gpu_engines import Skipped
from tokenizers import Tokenizer, models

from llmc.build import build
from llmc.build_options import BuildOptions
from llmc.errors import UserError
from llmc.progress import TerminalProgress


def test_divergence_is_that_of_the_definition() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    reference = np.log(np.stack([p, p])).astype(np.float32)[None]
    logits = (np.log(np.stack([p, q])) + 7).astype(np.float32)[None]  # a constant changes nothing
    kl, same = accuracy.divergence(reference, logits)
    assert kl == pytest.approx((p * np.log(p / q)).sum() / 2, abs=1e-6) and same == 0.5


def test_our_logits_and_those_of_the_checkpoint(tmp_path: Path) -> None:
    checkpoint, plan = save_checkpoint(tiny_model("llama"), tmp_path / "tiny"), tmp_path / "tiny.plan"
    build(str(checkpoint), plan, BuildOptions("fp32", targets=("native",), evaluate=False), TerminalProgress())
    windows = np.random.default_rng(0).integers(0, 90, (2, 21)).tolist()
    ours, theirs = accuracy_worker.llmc(str(plan), windows), accuracy_worker.transformers(str(checkpoint), windows)
    assert np.abs(np.stack(ours) - np.stack(theirs)).max() < 1e-4


def test_a_peer_that_is_missing_or_fails_is_skipped(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps([[1, 2]]))
    with pytest.raises(Skipped, match="not given"):
        accuracy.logits_of("openvino", None, tmp_path, tokens, tmp_path)
    with pytest.raises(Skipped, match="no such file"):
        accuracy.logits_of("llmc", sys.executable, tmp_path / "none.plan", tokens, tmp_path)
    text = accuracy.section(
        {"formats": {"int8": {"llmc": (0.00413, 0.95)}, "int4": {"llmc": (0.003, 0.96), "peer": (0.4, 0.5)}},
         "skipped": {"peer int8": "not given"}}, "tiny",
    )  # fmt: skip
    assert "| llmc | 0.0041 (95.0%) | 0.0030 (96.0%) |" in text and "| peer |  | 0.4000 (50.0%) |" in text
    assert "- peer int8: skipped: not given." in text


def test_a_text_that_is_too_short(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="the text has 1 tokens; 2048 are needed"):
        accuracy.windows_of(tmp_path, "a")
