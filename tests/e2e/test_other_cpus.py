"""`llmc build` for CPUs that this machine is not: the plan holds their code, and its report was measured here."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_build_process import run_build
from e2e_harness import assert_refused, llmc
from families import VOCAB, save_checkpoint, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers

from llmc.runtime.cpu.targets import runnable_targets
from llmc.runtime.plan import Plan

pytestmark = pytest.mark.cross

OTHERS = ("cpu:x86-64-v3+avxvnni", "cpu:aarch64+dotprod")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer of words."""
    path = save_checkpoint(tiny_model("llama"), tmp_path_factory.mktemp("checkpoints") / "tiny")
    vocabulary = {f"w{i}": i for i in range(VOCAB - 1)} | {"?": VOCAB - 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_a_plan_for_other_cpus_is_measured_on_this_one(checkpoint: Path, tmp_path: Path) -> None:
    if {t.name for t in runnable_targets()} & set(OTHERS):
        pytest.skip("this machine is one of the others")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i * 37 % VOCAB}" for i in range(60)))
    plans = {}
    for name, targets in (("own", ("native",)), ("others", OTHERS)):
        path = tmp_path / name / "engine.plan"
        path.parent.mkdir()
        flags = [f for t in targets for f in ("--target", t)]
        done = run_build(checkpoint, path, "--int8", "--eval-text", str(text), *flags)
        assert done.code == 0, done.stderr
        plans[name] = Plan.open(path)
    manifest = plans["others"].manifest
    assert manifest["targets"] == list(OTHERS)
    assert manifest["accuracy"]["mean_kl"] > 0 and manifest["accuracy"] == plans["own"].manifest["accuracy"]
    code = [name for name in plans["others"].segments if name.startswith("code/")]
    assert code == [f"code/{t}" for t in OTHERS]
    run = llmc("run", str(tmp_path / "others" / "engine.plan"), "w1 w2")
    assert_refused(run.returncode, run.stderr, f"code for {', '.join(OTHERS)}, this machine runs cpu:x86-64")
