"""What follows a linear or a norm, elementwise, is done while its result is in registers.

act(linear(x, W))       ->  linear(x, W, act)
linear(x, W) + residual ->  linear(x, W, residual)
rms_norm(x) + residual  ->  rms_norm_add(x, residual)
"""

from __future__ import annotations

from typing import Any

from torch import fx

from llmc.kernels.dialect import OPS
from llmc.passes.match import calls, commuted, is_call, only_user, replace, shape
from llmc.passes.result import PassContext, PassResult


def run(graph: fx.Graph, ctx: PassContext) -> PassResult:
    count = 0
    for node in calls(graph, OPS["act"]):
        linear = node.args[0]
        if _single_use_linear(linear) and linear.args[3:6] == (None, "none", False):
            x, w, bias, *_, format = linear.args
            replace(node, OPS["linear"], (x, w, bias, None, node.args[1], False, format))
            count += 1
    for node in calls(graph, OPS["add"]):
        for term, residual in commuted(node):
            if _single_use_linear(term) and term.args[3] is None and residual is not term:
                x, w, bias, _, *rest = term.args
                replace(node, OPS["linear"], (x, w, bias, residual, *rest))
                count += 1
                break
            if is_call(term, OPS["rms_norm"]) and only_user(term) is not None and len(shape(term)) == 2:
                x, weight, eps = term.args
                replace(node, OPS["rms_norm_add"], (x, residual, weight, eps))
                count += 1
                break
    return PassResult(count)


def _single_use_linear(node: Any) -> bool:
    return is_call(node, OPS["linear"]) and only_user(node) is not None
