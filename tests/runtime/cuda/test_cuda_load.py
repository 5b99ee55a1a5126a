"""From a plan to an engine on a GPU: the limits of a step that nobody gave, and what is done before it is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cuda_fakes import VOCAB, WEIGHTS, archive
from interpreted_gpu import InterpretedGpu

from llmc.codegen.plan_writer import PlanWriter
from llmc.runtime import load
from llmc.runtime.config import LoadOptions
from llmc.runtime.cuda.executor import CudaExecutor
from llmc.runtime.cuda.load import default_seqs
from llmc.runtime.cuda.targets import find_cuda_target
from llmc.runtime.plan import Plan

SM_90 = find_cuda_target("cuda:sm_90")
ROW = 48 + 8 * VOCAB + 512 + 8
MEMORY = {"weight_bytes": 512, "arena_bytes_per_token": 96, "arena_bytes_per_row": 48}


class _Gpu(InterpretedGpu):
    """Counts graphs; its kernels do nothing."""

    def __init__(self, memory: int = 1 << 30) -> None:
        super().__init__(memory)
        self.captured = 0

    def load(self, code: memoryview, name: str, shared: int) -> Any:
        return name

    def launch(self, *call: Any) -> None:
        return

    def capture(self, record: Any) -> Any:
        self.captured += 1
        return super().capture(record)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    with PlanWriter(tmp_path / "tiny.plan") as writer:
        writer.add("weights", WEIGHTS)
        writer.add(f"code/{SM_90.name}", bytes(archive()))
        model = {"max_model_len": 128, "vocab_size": VOCAB, "kv_bytes_per_token": 48}
        manifest = {"model": model, "memory": {"gpu": MEMORY}, "tokenizer": None}
        writer.finish({"format": "llmc.plan", "targets": [SM_90.name], **manifest})
    return Plan.open(tmp_path / "tiny.plan")


@pytest.mark.parametrize(
    ("options", "rows", "graphs"),
    [(LoadOptions(), 256, 16), (LoadOptions(max_num_seqs=6), 6, 4), (LoadOptions(max_num_batched_tokens=40), 40, 9)],
)
def test_an_engine_on_a_gpu_has_its_graphs_before_it_starts(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, options: LoadOptions, rows: int, graphs: int
) -> None:
    """Each with and without penalties. The default of 256 sequences, what was asked for, what a small step leaves."""
    device = _Gpu()
    monkeypatch.setattr(load.cuda, "choose_gpu", lambda plan, device_name: (device, SM_90))
    engine = load.load_engine(plan, None, options)
    executor = engine._executor
    assert isinstance(executor, CudaExecutor) and executor.max_num_rows == rows
    assert device.captured == 2 * graphs
    engine.close()


@pytest.mark.parametrize("count", [256, 128, 32, 16])
def test_the_default_of_sequences_leaves_most_memory_to_the_pool(plan: Plan, count: int) -> None:
    """A tenth of what 0.9 of the memory leaves beside weights and the activations of 40 tokens is for rows."""
    enough = -(-(512 + 96 * 40 + 10 * count * ROW) * 10 // 9)
    seqs = [default_seqs(plan, LoadOptions(), 40, (_Gpu(enough + n), SM_90)) for n in (-20, 20)]  # type: ignore[arg-type]
    assert seqs == [max(count // 2, 16), count]
