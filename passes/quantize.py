"""Chooses how every weight is stored and multiplied.

linear(…, format=f32)  ->  linear(…, format=body_format); the head (it makes the logits) gets head_format
moe(…, format=f32)     ->  body_format; the linear that makes a router's logits stays float32: it is small, and a
                           rounding that moves a choice moves all that an expert adds
embed(tokens, …)       ->  head_format, so that a tied table is stored once; position tables stay float32
`PassContext.choose` may give single linears another format (llmc/budget.py).
Where a weight keeps the grid that its checkpoint stores it on, that grid's format comes instead (`format_of`).
"""

from __future__ import annotations

from torch import fx

from llmc.kernels.dialect import OPS
from llmc.kernels.formats import F32, Format
from llmc.kernels.ops import Embed, Linear, Moe
from llmc.kernels.weights import WeightRef
from llmc.passes.match import aten, calls, is_call, weight
from llmc.passes.result import PassContext, PassResult


def run(graph: fx.Graph, ctx: PassContext) -> PassResult:
    count, skipped = 0, []
    chosen = ctx.choose(graph) if ctx.choose is not None else {}
    for node in calls(graph, OPS["linear"]):
        linear = Linear.of(node)
        if any(_makes_router_logits(node, user) for user in node.users):
            skipped.append((node.name, "a router stays float32"))
            continue
        ref, asked = weight(linear.weight), ctx.head_format if _reads_rows(linear.x) else ctx.body_format
        format = format_of(ref, asked if ref is None else chosen.get(ref, asked), ctx)
        node.args = linear.evolve(format=format).args
        count += format is not F32
    for node in calls(graph, OPS["moe"]):
        moe = Moe.of(node)
        formats = [format_of(weight(stack), ctx.body_format, ctx) for stack in (moe.up, moe.down)]
        format = max(formats, key=lambda f: f.bits)
        node.args = moe.evolve(format=format).args
        count += format is not F32
    for node in calls(graph, OPS["embed"]):
        embed = Embed.of(node)
        if embed.ids.name != "tokens":
            skipped.append((node.name, "a position table stays float32"))
            continue
        format = format_of(weight(embed.weight), ctx.head_format, ctx)
        node.args = embed.evolve(format=format.stored).args
        count += format is not F32
    return PassResult(count, skipped)


def format_of(ref: WeightRef | None, asked: Format, ctx: PassContext) -> Format:
    """The format that a weight takes: the one of its own grid (`ctx.grids`), else the one asked for. A matrix of parts
    with different formats takes the widest. Activations stay what the format asked for makes of them."""
    own = {ctx.grids.get(name) for name in ref.tensors()} if ref is not None else set()
    weight_only = bool(asked.group) and not asked.integer_products
    formats = [asked if f is None else (f.weight_only or f) if weight_only else f for f in own]
    return max(formats, key=lambda f: f.bits, default=asked)


def _makes_router_logits(node: fx.Node, user: fx.Node) -> bool:
    moe = Moe.match(user)
    if moe is not None:
        return moe.logits is node
    return is_call(user, aten.slice.Tensor) and any(_makes_router_logits(user, reader) for reader in user.users)


def _reads_rows(node: object) -> bool:
    """Whether a value is computed after `select_rows`."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target is OPS["select_rows"]:
            return True
        node = node.args[0]
    return False
