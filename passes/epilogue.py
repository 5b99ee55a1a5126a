"""What follows a linear or a norm, elementwise, is done while its result is in registers.

act(linear(x, W))       ->  linear(x, W, act)
linear(x, W) + residual ->  linear(x, W, residual)
rms_norm(x) + residual  ->  rms_norm_add(x, residual)
"""

from __future__ import annotations

from typing import Any

from torch import fx

from llmc.kernels.dialect import OPS
from llmc.kernels.ops import Act, Linear, RmsNorm, RmsNormAdd
from llmc.passes.match import calls, commuted, only_user, replace_with, shape
from llmc.passes.result import PassContext, PassResult


def run(graph: fx.Graph, ctx: PassContext) -> PassResult:
    count = 0
    for node in calls(graph, OPS["act"]):
        act = Act.of(node)
        linear = _single_use_linear(act.x)
        if linear is not None and linear.residual is None and linear.act == "none" and not linear.gated:
            replace_with(node, linear.evolve(act=act.kind))
            count += 1
    for node in calls(graph, OPS["add"]):
        for term, residual in commuted(node):
            linear = _single_use_linear(term)
            if linear is not None and linear.residual is None and residual is not term:
                replace_with(node, linear.evolve(residual=residual))
                count += 1
                break
            norm = RmsNorm.match(term)
            if norm is not None and only_user(term) is not None and len(shape(term)) == 2:
                replace_with(node, RmsNormAdd(norm.x, residual, norm.weight, norm.eps))
                count += 1
                break
    return PassResult(count)


def _single_use_linear(node: Any) -> Linear | None:
    linear = Linear.match(node)
    return linear if linear is not None and only_user(node) is not None else None
