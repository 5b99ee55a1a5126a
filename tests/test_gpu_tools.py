"""`llmc tune` and the roofline of `llmc inspect`, over the interpreted GPU and a launch list made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from interpreted_models import gpu_executor, interpreted_model

from llmc import tune as tuning
from llmc.codegen.plan_writer import PlanWriter
from llmc.inspect import gpu_kernels
from llmc.roofline import CONTEXT, PROMPT, kernel_estimates, step_seconds
from llmc.runtime.config import LoadOptions
from llmc.runtime.cuda import tune
from llmc.runtime.cuda.targets import find_cuda_target
from llmc.runtime.plan import Plan

SM_80 = "cuda:sm_80"


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    model = interpreted_model("llama", "int8")
    with PlanWriter(tmp_path / "tiny.plan") as writer:
        writer.add("weights", bytes(model.weights))
        writer.add(f"code/{SM_80}", model.archive)
        writer.finish({"format": "llmc.plan", "targets": [SM_80], "model": {"max_model_len": 128}})
    return Plan.open(tmp_path / "tiny.plan")


@pytest.fixture
def on_the_interpreted_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "ROUNDS", 1)
    monkeypatch.setattr(tune, "LAUNCHES", 1)
    monkeypatch.setattr(tune, "_LARGE", 17)
    everything = tune.alternatives

    def few(executor: tune.CudaExecutor) -> dict[str, tune.Alternatives]:
        found = everything(executor)
        limits = {key.split("@")[1] for key in found}
        assert len(found) >= 8 and {"16", "64"} <= limits, found
        small = [key for key in found if key.endswith("@16")]
        return {key: found[key] for key in (small[0], small[-1])}

    monkeypatch.setattr(tune, "alternatives", few)
    executor = gpu_executor("llama", "int8")
    monkeypatch.setattr(tuning, "open_cuda_executor", lambda plan, options: (executor, find_cuda_target(SM_80)))


def test_tuning_times_every_alternative_and_writes_the_choice(
    plan: Plan, tmp_path: Path, on_the_interpreted_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[dict[str, list[float]]] = []

    def choose(seconds: Any) -> dict[str, int]:
        timed.append(dict(seconds))
        return {key: len(times) - 1 for key, times in seconds.items()}

    monkeypatch.setattr(tune, "choose", choose)
    said: list[str] = []
    engine_id = tuning.tune_plan(plan, tmp_path / "tuned.plan", LoadOptions(), said.append)
    tuned = Plan.open(tmp_path / "tuned.plan")
    assert tuned.engine_id == engine_id != plan.engine_id
    choices = tuned.manifest["tuning"][SM_80]
    assert choices.keys() == timed[0].keys() and all(len(t) >= 2 and min(t) > 0 for t in timed[0].values())
    assert len(choices) == 2 and all(key.startswith("linear w8") for key in choices)
    assert len(said) == len(choices) and all("*" in line for line in said)
    assert tuned.segments == plan.segments and tuned.manifest["targets"] == plan.manifest["targets"]
    gpu_executor("llama", "int8", choices=choices).close()  # every choice is one that the archive has


def test_an_alternative_must_be_clearly_faster() -> None:
    seconds = {"a@16": [1.0, 0.99], "b@16": [1.0, 0.5], "c@None": [0.5, 1.0, 0.6], "d@64": [1.0, 0.9, 0.8]}
    assert tune.choose(seconds) == {"b@16": 1, "d@64": 2}


def test_the_plan_may_be_replaced_by_its_tuned_self(
    plan: Plan, on_the_interpreted_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "time_alternatives", lambda executor, found: {key: [2.0, 1.0] for key in found})
    engine_id = tuning.tune_plan(plan, plan.path, LoadOptions(), lambda line: None)
    assert Plan.open(plan.path).engine_id == engine_id
    assert [p.name for p in plan.path.parent.iterdir()] == [plan.path.name]


def test_inspect_lists_the_kernels_of_a_plan(plan: Plan) -> None:
    text = gpu_kernels(plan)
    assert "cuda:sm_80: " in text and "A100" in text
    for op in ("linear w8 96x64 gated", "attention decode 4/2x16", "rope + KV write", "sample 211"):
        assert op in text, op
    head = next(line for line in text.splitlines() if "regs spill blocks" in line)
    line = next(line for line in text.splitlines() if "rope + KV write" in line)
    assert line[: head.index("blocks") + 6].split()[-6:] == ["any", "1", "0", "1", "0", "32"]


_GPU = replace(find_cuda_target(SM_80), bandwidth=1e9, half_flops=1e12, int8_ops=2e12, float_flops=1e10)


def _call(when: str, rows: str, variants: list[Any], **cost: Any) -> dict[str, Any]:
    cost |= {"arithmetic": "float16"}
    return {"op": "x", "when": when, "rows": rows, "variants": variants, "cost": cost}


def test_estimates_are_bytes_over_bandwidth_or_operations_over_rate() -> None:
    both = [{"max": 16, "kernels": [0]}, {"max": None, "kernels": [1, 2]}]
    header = {
        "kernels": [{"op": "small"}, {"op": "large"}, {"op": "other"}, {"op": "decode"}, {"op": "prefill"}],
        "calls": [
            _call("always", "T", both, weight_bytes=1000, activation_bytes=10, macs=50_000),
            _call("always", "T", both, weight_bytes=1000, activation_bytes=10, macs=50_000),
            _call("decode", "T", [{"max": None, "kernels": [3]}], kv_bytes=8, attention_macs=1),
            _call("prefill", "T", [{"max": None, "kernels": [4]}], attention_macs=500_000),
        ],
    }
    small, large, decode, prefill = kernel_estimates(header, _GPU)
    assert (small.launches, small.rows, small.bound) == (2, 16, "compute")
    assert small.seconds == pytest.approx(16 * 100_000 / 1e12)
    assert (large.rows, large.bound) == (PROMPT, "compute")
    assert (decode.rows, decode.bound, decode.seconds) == (1, "memory", pytest.approx(CONTEXT * 8 / 1e9))
    assert prefill.seconds == pytest.approx(PROMPT * (PROMPT + 1) / 2 * 1e6 / 1e12)
    one = step_seconds(header, _GPU, 1, 1, prompt=False)
    assert one == pytest.approx(2 * (1010 / 1e9) + CONTEXT * 8 / 1e9)
    assert step_seconds(header, _GPU, PROMPT, 1, prompt=True) == pytest.approx(2 * large.seconds + prefill.seconds)
