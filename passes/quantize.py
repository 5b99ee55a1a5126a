"""Chooses how every weight is stored and multiplied.

linear(…, format=f32)  ->  linear(…, format=body_format); the head (it makes the logits) gets head_format
embed(tokens, …)       ->  head_format, so that a tied table is stored once; position tables stay float32
"""

from __future__ import annotations

from torch import fx

from llmc.kernels.dialect import OPS
from llmc.kernels.formats import F32
from llmc.kernels.ops import Embed, Linear
from llmc.passes.match import calls
from llmc.passes.result import PassContext, PassResult


def run(graph: fx.Graph, ctx: PassContext) -> PassResult:
    count, skipped = 0, []
    for node in calls(graph, OPS["linear"]):
        linear = Linear.of(node)
        format = ctx.head_format if _reads_rows(linear.x) else ctx.body_format
        node.args = linear.evolve(format=format).args
        count += format is not F32
    for node in calls(graph, OPS["embed"]):
        embed = Embed.of(node)
        if embed.ids.name != "tokens":
            skipped.append((node.name, "a position table stays float32"))
            continue
        node.args = embed.evolve(format=ctx.head_format.stored).args
        count += ctx.head_format is not F32
    return PassResult(count, skipped)


def _reads_rows(node: object) -> bool:
    """Whether a value is computed after `select_rows`."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target is OPS["select_rows"]:
            return True
        node = node.args[0]
    return False
