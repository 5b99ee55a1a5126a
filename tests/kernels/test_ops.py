"""kernels/ops.py: views of nodes by the names of an op's schema."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch import fx

from llmc.kernels import ops
from llmc.kernels.dialect import OPS
from llmc.kernels.formats import F32, W8


def _linear() -> tuple[fx.Node, fx.Node, fx.Node]:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    return graph.call_function(OPS["linear"], (x, w, None, x, "silu", True, "w8")), x, w


def test_every_op_has_one_view() -> None:
    assert sorted(view.op for view in ops.OpView.__subclasses__()) == sorted(OPS)


def test_arguments_are_read_by_name_and_written_back() -> None:
    node, x, w = _linear()
    view = ops.Linear.match(node)
    assert view == ops.Linear(x, w, None, x, "silu", True, W8) and view.args == node.args
    changed = view.evolve(residual=None, gated=False)
    assert changed.args == (x, w, None, None, "silu", False, "w8") and changed.target is OPS["linear"]
    assert not view.plain and ops.Linear(x, w).plain and ops.Linear(x, w).args[6] == F32.name


def test_another_node_is_no_match() -> None:
    node, x, _ = _linear()
    assert ops.Embed.match(node) is None and ops.Linear.match(x) is None and ops.Linear.match(3) is None
    assert ops.op_name(node) == "linear" and ops.op_name(x) is None
    with pytest.raises(AssertionError, match="is not embed"):
        ops.Embed.of(node)


def test_whole_numbers_are_read_as_the_floats_of_the_schema() -> None:
    graph = fx.Graph()
    node = graph.call_function(OPS["scale"], (graph.placeholder("x"), 2))
    assert isinstance(ops.Scale.of(node).value, float)


def test_a_view_that_disagrees_with_the_schema_is_refused() -> None:
    with pytest.raises(TypeError, match=r"the view of add lists \['b', 'a'\], its schema has \['a', 'b'\]"):

        @dataclass(frozen=True)
        class Wrong(ops.OpView):
            op = "add"
            b: fx.Node
            a: fx.Node
