"""codegen/cpu/program.py and emit.py: barriers where data crosses threads, lifetimes, stable text, refusals."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny_engines import check_schedule, lowered
from torch import fx

from llmc.codegen.cpu.emit import call_text, emit_unit
from llmc.codegen.cpu.program import Program, select_kernels
from llmc.codegen.weights import WeightTable
from llmc.errors import UserError
from llmc.kernels.dialect import OPS
from llmc.kernels.weights import Stored
from llmc.kv_page import PAGE_SIZE
from llmc.passes.shapes import annotate_shapes

aten = torch.ops.aten
BY_COLUMNS = {"linear"}
ACROSS_ROWS = {"attention", "select_rows", "sample"}  # read rows that other threads wrote
C = 32


class _Graph:
    """A dialect graph by hand: x = embed(tokens), with a head at the end."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.inputs = {n: self.graph.placeholder(n) for n in ("tokens", "positions", "query_start", "rows")}
        self.x = self.op("embed", self.inputs["tokens"], self.weight("table", 50, C), 1.0, 0, "f32")

    def weight(self, name: str, *shape: int) -> fx.Node:
        with self.graph.inserting_before():
            node = self.graph.placeholder(name)
        node.meta["weight"] = Stored(shape, name)
        return node

    def op(self, name: str, *args: Any) -> fx.Node:
        return self.call(OPS[name], *args)

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["path"] = "model.layers.1.mlp"
        return node

    def linear(self, x: fx.Node, name: str, n: int, k: int, residual: Any = None, format: str = "f32") -> fx.Node:
        return self.op("linear", x, self.weight(name, n, k), None, residual, "none", False, format)

    def program(self, x: fx.Node) -> Program:
        selected = self.op("select_rows", x, self.inputs["rows"])
        self.graph.output(self.linear(selected, "head", 50, C))
        annotate_shapes(self.graph)
        return select_kernels(self.graph, WeightTable())


def _body(source: str, few: bool) -> list[str]:
    """Kernel names and "barrier", in the order of a step of few or many rows."""
    text = source[source.index("static void step") : source.index('#include "exports.h"')]
    calls = re.findall(r"^  (if \(.*\) )?(?:(next_phase)\(|(\w+)(?:<[^(]*>)?\((?:par|own_\w+),)", text, re.MULTILINE)
    other = "if (!few_" if few else "if (few_"
    return [kernel or "barrier" for condition, _, kernel in calls if not condition.startswith(other)]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_schedule_of_a_model_is_safe(family: str, precision: str) -> None:
    check_schedule(lowered(family, precision).program)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_barrier_stands_exactly_where_rows_cross_threads(precision: str, few: bool) -> None:
    body = _body(lowered("llama", precision).source, few)
    kernels = [k for k in body if k != "barrier"]
    assert kernels.count("attention") == kernels.count("kv_write") == 2 and kernels.count("linear") == 2 * 4 + 1
    assert kernels[-1] == "sample" and (precision == "fp32") == ("quantize" not in kernels)
    private = {"rms_norm", "quantize", "select_rows"} if few else set()
    for a, b in pairwise(body):
        if "barrier" in (a, b):
            assert a != b, "two barriers in a row"
            continue
        if a in private:  # every thread has made all of it for itself
            assert b in private | BY_COLUMNS
            continue
        # without a barrier, both keep to the rows of their own thread
        assert not {a, b} & BY_COLUMNS and b not in ACROSS_ROWS and a not in ("attention", "sample"), (a, b)
    edges = set()
    for i, kernel in enumerate(kernels):
        if kernel in BY_COLUMNS | ACROSS_ROWS:
            edges |= {i} - ({i} if kernels[i - 1] in private else set())
            edges |= {i + 1} - ({i + 1} if kernel == "select_rows" else set())
        elif kernel in private and kernels[i - 1] not in private:
            edges.add(i)
    assert body.count("barrier") == len(edges - {0, len(kernels)})


def test_a_value_quantised_once_serves_every_product() -> None:
    g = _Graph()
    a, b = (g.linear(g.x, name, C, C, format="w8") for name in ("wa", "wb"))
    program = g.program(g.op("add", a, b))
    assert sum(c.kernel == "quantize" for c in program.calls) == 1
    check_schedule(program)


def test_a_product_added_to_its_own_operand_keeps_it_alive() -> None:
    g = _Graph()
    y = g.linear(g.x, "w", C, C, residual=g.x, format="w8")
    check_schedule(g.program(y))


def test_columns_of_different_width_are_quantised_apart() -> None:
    g = _Graph()
    wide = g.linear(g.x, "wide", 2 * C, C)
    left = g.call(aten.slice.Tensor, wide, 1, 0, C)
    both = g.linear(wide, "both", C, 2 * C, format="w8")
    half = g.linear(left, "half", C, C, format="w8")
    program = g.program(g.op("add", both, half))
    quantized = [call_text(c) for c in program.calls if c.kernel == "quantize"]
    assert [t.split("(")[0] for t in quantized] == ["quantize<64, Fmt::w8>", "quantize<32, Fmt::w8>"]
    check_schedule(program)


def test_a_slice_is_an_offset_and_a_view_is_nothing() -> None:
    g = _Graph()
    wide = g.linear(g.x, "wide", 3 * C, C)
    part = g.call(aten.slice.Tensor, wide, 1, C, 2 * C)
    heads = g.call(aten.view.default, part, [7, 4, C // 4])
    flat = g.call(aten.view.default, g.op("rms_norm", heads, None, 1e-6), [7, C])
    program = g.program(flat)
    (norm,) = [call_text(c) for c in program.calls if c.kernel == "rms_norm"]
    assert norm.startswith("rms_norm<4, 8>(par, T, columns(linear_default, 32), ")
    check_schedule(program)


def test_the_source_is_stable_and_free_of_places() -> None:
    first = lowered("llama", "int8")
    assert emit_unit(first.program) == first.source
    lowered.cache_clear()
    again = lowered("llama", "int8")
    assert again.source == first.source
    assert "/" not in re.sub(r"//.*| / ", "", again.source), "a path in the generated code"
    assert "\n  // model.layers.1.self_attn" in again.source


def test_the_manifest_s_numbers_stand_in_the_source() -> None:
    model = lowered("llama")
    page = sum(slot.page_bytes for slot in model.program.kv_slots)
    assert page == 2 * 2 * PAGE_SIZE * 2 * 16 * 4  # layers, K and V, positions, heads, head size, float32
    assert f"kPageBytes = {page};" in model.source and "kVocab = 211;" in model.source
    assert f"kTokenBytes = {model.program.peaks['tokens']};" in model.source


def _across_heads(g: _Graph) -> fx.Node:
    heads = g.call(aten.view.default, g.linear(g.x, "wide", 2 * C, C), [7, 4, C // 2])
    half = g.call(aten.slice.Tensor, heads, 2, 0, C // 4)
    return g.call(aten.view.default, g.op("act", half, "relu"), [7, C])


def _unknown(g: _Graph) -> fx.Node:
    return g.call(aten.cumsum.default, g.x, 1)


def _infinite(g: _Graph) -> fx.Node:
    return g.op("scale", g.x, float("inf"))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (_across_heads, r"slice across heads at model\.layers\.1\.mlp"),
        (_unknown, r"aten\.cumsum.* at model\.layers\.1\.mlp.*no kernel"),
        (_infinite, "constant of inf"),
    ],
)
def test_what_no_kernel_does_is_a_user_error(build: Any, words: str) -> None:
    g = _Graph()
    with pytest.raises(UserError, match=words):
        g.program(build(g))


def test_the_output_must_be_logits_of_the_sampled_rows() -> None:
    g = _Graph()
    g.graph.output(g.linear(g.x, "head", 50, C))
    annotate_shapes(g.graph)
    with pytest.raises(UserError, match="one row of logits per sampled token"):
        select_kernels(g.graph, WeightTable())
