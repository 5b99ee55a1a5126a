"""aten.linear(x, W, b)  ->  llmc.linear(x, W, b) with no residual, no activation, float32 weights."""

from __future__ import annotations

from torch import fx

from llmc.kernels.ops import Linear
from llmc.passes.match import arguments, aten, calls, replace_with, weight
from llmc.passes.result import PassContext, PassResult


def run(graph: fx.Graph, ctx: PassContext) -> PassResult:
    count, skipped = 0, []
    for node in calls(graph, aten.linear.default):
        x, w, bias = arguments(node).values()
        if weight(w) is None or (bias is not None and weight(bias) is None):
            skipped.append((node.name, "its matrix is not a weight"))
            continue
        replace_with(node, Linear(x, w, bias))
        count += 1
    return PassResult(count, skipped)
