"""The same value, written in another way, becomes the same op with the same result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx

from llmc.kernels.ops import RmsNorm, Rope
from llmc.passes import norms, rope
from llmc.passes.match import constant
from llmc.passes.result import PassContext, PassResult
from llmc.passes.shapes import PROBE_T, annotate_shapes

aten = torch.ops.aten
_FREQUENCIES = torch.tensor([1.0, 0.1, 0.01])


def _constant(graph: fx.Graph, name: str, value: Tensor) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["constant"] = value
    return node


def _value(graph: fx.Graph) -> Tensor:
    """The output of a graph of positions and constants."""
    positions = torch.arange(PROBE_T) * 1000
    inputs = [value if (value := constant(n)) is not None else positions for n in graph.find_nodes(op="placeholder")]
    result: Tensor = fx.Interpreter(fx.GraphModule({}, graph)).run(*inputs)
    return result


def _rewritten(module: Any, graph: fx.Graph) -> PassResult:
    """What a pass did to a graph, whose value stays."""
    annotate_shapes(graph)
    before = _value(graph)
    result: PassResult = module.run(graph, PassContext())
    torch.testing.assert_close(_value(graph), before, rtol=0, atol=1e-5)
    return result


def _rotation(second: int, first: int) -> fx.Graph:
    """x cos + cat(second * x[half:], first * x[:half]) sin; second and first are 1 or -1."""
    graph = fx.Graph()
    call, positions = graph.call_function, graph.placeholder("positions")
    inv_freq = _constant(graph, "inv_freq", _FREQUENCIES)
    x = _constant(graph, "x", torch.randn(PROBE_T, 2, 6, generator=torch.Generator().manual_seed(1)))
    floats = call(aten._to_copy.default, (call(aten.view.default, (positions, [-1, 1, 1])),), {"dtype": torch.float32})
    angles = call(aten.mul.Tensor, (floats, inv_freq))
    angles = call(aten.cat.default, ([angles, angles], -1))
    halves = []
    for sign, start in ((second, 3), (first, 0)):
        half = call(aten.slice.Tensor, (x, 2, start, start + 3))
        halves.append(half if sign == 1 else call(aten.neg.default, (half,)))
    left = call(aten.mul.Tensor, (x, call(aten.cos.default, (angles,))))
    turned = call(aten.cat.default, (halves, -1))
    graph.output(call(aten.add.Tensor, (left, call(aten.mul.Tensor, (turned, call(aten.sin.default, (angles,)))))))
    return graph


@pytest.mark.parametrize(("second", "first"), [(-1, 1), (1, -1)])
def test_a_rotation_either_way_round_is_a_rope(second: int, first: int) -> None:
    graph = _rotation(second, first)
    assert _rewritten(rope, graph).count == 1
    assert Rope.match(graph.output_node().args[0]) is not None


@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_no_rotation_is_no_rope(sign: int) -> None:
    result = _rewritten(rope, _rotation(sign, sign))
    assert result.count == 0 and "neither by halves nor of neighbours" in result.skipped[0][1]


def _norm(root: Any, *args: Any) -> fx.Graph:
    """x * root(mean(x^2) + eps)."""
    graph = fx.Graph()
    call = graph.call_function
    x = _constant(graph, "x", torch.randn(PROBE_T, 8, generator=torch.Generator().manual_seed(2)))
    mean = call(aten.mean.dim, (call(aten.pow.Tensor_Scalar, (x, 2)), [1], True))
    graph.output(call(aten.mul.Tensor, (x, call(root, (call(aten.add.Tensor, (mean, 1e-5)), *args)))))
    return graph


@pytest.mark.parametrize(("root", "args"), [(aten.rsqrt.default, ()), (aten.pow.Tensor_Scalar, (-0.5,))])
def test_a_reciprocal_root_and_a_power_of_minus_a_half_are_one_norm(root: Any, args: tuple[float, ...]) -> None:
    graph = _norm(root, *args)
    assert _rewritten(norms, graph).count == 1
    norm = RmsNorm.match(graph.output_node().args[0])
    assert norm is not None and norm.eps == 1e-5


def test_another_power_is_no_norm() -> None:
    assert _rewritten(norms, _norm(aten.pow.Tensor_Scalar, -1)).count == 0
