"""From lowered graphs to launch lists: forms, fusion, placement, refusals."""

from __future__ import annotations

import copy

import gpu_models
import pytest
from families import FAMILIES
from interpreted_models import interpreted_model
from tiny_engines import imported, lowered

from llmc.codegen.triton.launch import GpuProgram, Launch
from llmc.codegen.triton.select import select_launches
from llmc.codegen.triton.signature import parameters
from llmc.codegen.weights import WeightTable
from llmc.errors import UserError
from llmc.kernels.dialect import OPS
from llmc.kernels.formats import W8
from llmc.passes.match import calls
from llmc.passes.pipeline import run_pipeline
from llmc.passes.result import PassContext

_OUTPUTS = ("y", "ys", "ysum", "table", "q_out")
"""Parameters that kernels write (`table` only of rope_table)."""


def _buffers(launch: Launch, written: bool) -> set[str]:
    outputs = set(_OUTPUTS) - ({"table"} if launch.function != "rope.rope_table" else set())
    return {str(arg[1]) for name, _, arg in launch.args if arg[0] == "buffer" and (name in outputs) == written}


def check_placement(program: GpuProgram) -> None:
    """Worked out from the arguments alone: what is read was written and lives; what lives together does not overlap."""
    buffers = {b.name: b for b in program.buffers}
    assert len(buffers) == len(program.buffers), "two buffers share a name"
    written: set[str] = set()
    for at, launch in enumerate(program.launches):
        for name in _buffers(launch, written=False):
            assert name in written, f"{launch.op} reads {name} before it is written"
            assert buffers[name].first <= at <= buffers[name].last, (launch.op, name)
        for name in _buffers(launch, written=True):
            assert buffers[name].first <= at <= buffers[name].last, (launch.op, name)
            written.add(name)
    for domain in ("tokens", "rows"):
        placed = [b for b in program.buffers if b.domain == domain]
        for i, a in enumerate(placed):
            assert program.offsets[a.name] + a.size <= program.arena[domain]
            for b in placed[:i]:
                together = a.first <= b.last and b.first <= a.last
                start_a, start_b = program.offsets[a.name], program.offsets[b.name]
                assert not together or start_a + a.size <= start_b or start_b + b.size <= start_a, (a, b)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_is_placed_without_overlap(family: str) -> None:
    check_placement(interpreted_model(family, "int8").program)


def test_arguments_and_constants_are_the_kernel_s_own() -> None:
    for precision in ("fp32", "bf16", "int8", "int4", "int8 weight-only", "int4 weight-only", "int8, int8 KV"):
        for launch in interpreted_model("llama", precision).program.launches:
            names = parameters(launch.function)
            assert {n for n, _, _ in launch.args} <= set(names)
            assert set(launch.constants) <= set(names)
            order = [names.index(n) for n, _, _ in launch.args]
            assert order == sorted(order)


def test_a_quantised_layer_is_ten_launches_in_a_mixed_step() -> None:
    """Norms, attention and the gated product write int8 themselves; rotation and the page write are one kernel."""
    launches = gpu_models.program("SmolLM2-135M", "int8").launches
    layer = [x for x in launches if ".0." in x.path or x.path.endswith(".0")]
    assert [x.function for x in layer] == [
        "rows.norm", "linear.linear", "rope.rope_kv_write", "attention.attention_prefill",
        "attention.attention_decode", "attention.attention_combine", "linear.linear", "rows.norm", "linear.linear",
        "linear.linear",
    ]  # fmt: skip


def test_a_tied_head_and_embedding_are_one_device_weight() -> None:
    program = interpreted_model("gemma2", "int8").program
    embed = next(x for x in program.launches if x.function == "rows.embed")
    head = [x for x in program.launches if x.function == "linear.linear"][-1]
    assert next(a for n, _, a in embed.args if n == "w") == next(a for n, _, a in head.args if n == "w")


def test_weights_are_stored_once_for_both_backends() -> None:
    from llmc.codegen.cpu.program import select_kernels

    graph = copy.deepcopy(imported("llama")[0])
    run_pipeline(graph, PassContext(W8, W8, "bf16"))
    table = select_kernels(graph, WeightTable()).weights
    before = (len(table.entries), table.size)
    select_launches(graph, table, "bf16")
    assert (len(table.entries), table.size) == before


def _lowered_llama() -> object:
    graph = copy.deepcopy(imported("llama")[0])
    run_pipeline(graph, PassContext(W8, W8, "bf16"))
    return graph


def test_heads_that_are_too_large_are_refused_with_the_limit() -> None:
    graph = _lowered_llama()
    for node in calls(graph, OPS["attention"]):  # type: ignore[arg-type]
        slot = node.meta["kv"]
        node.meta["kv"] = type(slot)(slot.layer, slot.heads, 264, slot.dtype)
    with pytest.raises(UserError, match=r"attention at .*: heads of 264; the GPU kernels do at most 256"):
        select_launches(graph, WeightTable(), "bf16")  # type: ignore[arg-type]


def test_groups_that_are_too_large_are_refused() -> None:
    graph = _lowered_llama()
    for node in calls(graph, OPS["attention"]):  # type: ignore[arg-type]
        tokens, _, dim = node.meta["shape"]
        node.meta["shape"] = (tokens, 130, dim)
    with pytest.raises(UserError, match=r"65 query heads per KV head; at most 64 on a GPU"):
        select_launches(graph, WeightTable(), "bf16")  # type: ignore[arg-type]


def test_a_mixture_of_experts_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"op llmc\.moe.* at model\.layers\.0\.mlp\.experts: .*name CPU targets only"):
        select_launches(lowered("qwen2_moe").graph, WeightTable(), "bf16")
