"""Activations and products.

silu, gelu (erf and tanh forms, also spelled out as in GPT-2), relu, relu squared  ->  llmc.act(x, kind)
act(gate) * up                                                             ->  llmc.gated_act(gate, up, kind)
sigmoid(g) * x, g [T, 1]                                                   ->  llmc.row_gate(x, g, sigmoid)
"""

from __future__ import annotations

import math
from typing import Any

from torch import fx

from llmc.kernels.ops import Act, GatedAct, RowGate
from llmc.passes.match import aten, calls, commuted, is_call, only_user, replace_with, scalar, shape
from llmc.passes.result import PassContext, PassResult


def run(graph: fx.Graph, ctx: PassContext) -> PassResult:
    count = 0
    for node in calls(graph, aten.tanh.default):
        found = _spelled_out_gelu(node)
        if found is not None:
            x, last = found
            replace_with(last, Act(x, "gelu_tanh"))
            count += 1
    for node in calls(graph, aten.silu.default, aten.relu.default, aten.gelu.default):
        replace_with(node, Act(node.args[0], _kind(node)))
        count += 1
    for node in calls(graph, aten.pow.Tensor_Scalar):
        relu = Act.match(node.args[0])
        if relu is not None and relu.kind == "relu" and node.args[1] == 2 and only_user(node.args[0]) is node:
            replace_with(node, Act(relu.x, "relu2"))  # one activation, counted above
    for node in calls(graph, aten.mul.Tensor):
        for gate, up in commuted(node):
            act = Act.match(gate)
            if act is not None and only_user(gate) is node and isinstance(up, fx.Node):
                replace_with(node, GatedAct(act.x, up, act.kind))
                count += 1
                break
            if is_call(gate, aten.sigmoid.default) and shape(gate)[1:] == (1,) and isinstance(up, fx.Node):
                replace_with(node, RowGate(up, gate.args[0], "sigmoid"))
                count += 1
                break
    return PassResult(count)


def _kind(node: fx.Node) -> str:
    if node.target is aten.gelu.default:
        return "gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu"
    return "silu" if node.target is aten.silu.default else "relu"


def _times(node: Any, value: float) -> Any:
    """x of x * value."""
    if is_call(node, aten.mul.Tensor):
        for x, c in commuted(node):
            if scalar(c) is not None and math.isclose(c, value, rel_tol=1e-6):
                return x
    return None


def _spelled_out_gelu(tanh: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(x, last node) of 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    inner = _times(tanh.args[0], math.sqrt(2 / math.pi))
    if not is_call(inner, aten.add.Tensor):
        return None
    for x, cubic in commuted(inner):
        cube = _times(cubic, 0.044715)
        if not (is_call(cube, aten.pow.Tensor_Scalar) and cube.args[0] is x and cube.args[1] == 3):
            continue
        plus_one = only_user(tanh)
        last = only_user(plus_one) if plus_one is not None else None
        if last is None or not is_call(plus_one, aten.add.Tensor) or not is_call(last, aten.mul.Tensor):
            return None
        if any(a is plus_one and _times(b, 0.5) is x for a, b in commuted(last)):
            return x, last
    return None
