"""aten.embedding(W, ids [+ offset]) [* scale]  ->  llmc.embed(ids, W, scale, offset)."""

from __future__ import annotations

from torch import fx

from llmc.kernels.ops import Embed
from llmc.passes.match import aten, calls, is_call, only_user, replace_with, scalar
from llmc.passes.result import PassContext, PassResult


def run(graph: fx.Graph, ctx: PassContext) -> PassResult:
    count, skipped = 0, []
    for node in calls(graph, aten.embedding.default):
        weight, ids = node.args
        offset = 0
        if is_call(ids, aten.add.Tensor) and isinstance(ids.args[1], int):
            ids, offset = ids.args
        if not (isinstance(ids, fx.Node) and ids.op == "placeholder"):
            skipped.append((node.name, "indices are neither tokens nor positions plus a constant"))
            continue
        scale, last, user = 1.0, node, only_user(node)
        if user is not None and is_call(user, aten.mul.Tensor) and user.args[0] is node:
            value = scalar(user.args[1])
            if value is not None:
                scale, last = value, user
        replace_with(last, Embed(ids, weight, scale, offset))
        count += 1
    return PassResult(count, skipped)
