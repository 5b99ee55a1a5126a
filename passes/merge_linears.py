"""Linears that read the same value become one (QKV; also gate and up).

linear(x, A), linear(x, B), …                       ->  slices of linear(x, concat(A, B, …))
gated_act(linear(x, G), linear(x, U), kind)         ->  linear(x, concat(G, U), act=kind, gated)
gated_act(y[:, :F], y[:, F:], kind), y = linear(…)  ->  linear(…, act=kind, gated)        (stored merged: Phi-3)
Weights that keep grids of different formats stay apart: one matrix has one format.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from llmc.kernels.dialect import OPS
from llmc.kernels.formats import Format
from llmc.kernels.ops import GatedAct, Linear
from llmc.kernels.weights import WeightRef, Zeros, concat
from llmc.passes.match import (
    WeightNodes,
    aten,
    calls,
    last_dim_slice,
    only_user,
    replace,
    replace_with,
    shape,
    weight,
)
from llmc.passes.quantize import format_of
from llmc.passes.result import PassContext, PassResult


def run(graph: fx.Graph, ctx: PassContext) -> PassResult:
    skipped: list[tuple[str, str]] = []
    weights = WeightNodes(graph)
    count = sum(_merge_gated(weights, node, ctx, skipped) for node in calls(graph, OPS["gated_act"]))
    groups: dict[tuple[fx.Node, Format], list[fx.Node]] = {}
    for node in calls(graph, OPS["linear"]):
        linear = Linear.of(node)
        if linear.plain and node.users:
            groups.setdefault((linear.x, _format(linear, ctx)), []).append(node)
    for nodes in groups.values():
        if len(nodes) > 1:
            _merge(weights, nodes)
            count += 1
    return PassResult(count, skipped)


def _format(linear: Linear, ctx: PassContext) -> Format:
    return format_of(weight(linear.weight), ctx.body_format, ctx)


def _plain_linear(node: Any) -> Linear | None:
    linear = Linear.match(node)
    return linear if linear is not None and linear.plain else None


def _merged(weights: WeightNodes, linears: list[Linear]) -> Linear:
    """The plain linear of the concatenated weights and biases."""
    refs: list[WeightRef] = [weight(n.weight) for n in linears]  # type: ignore[misc]
    merged = Linear(linears[0].x, weights.add(concat(tuple(refs))))
    if all(n.bias is None for n in linears):
        return merged
    biases = [weight(n.bias) or Zeros((ref.shape[0],)) for n, ref in zip(linears, refs, strict=True)]
    return merged.evolve(bias=weights.add(concat(tuple(biases))))


def _merge(weights: WeightNodes, nodes: list[fx.Node]) -> None:
    linear = _merged(weights, [Linear.of(n) for n in nodes])
    graph = nodes[0].graph
    with graph.inserting_before(nodes[0]):
        merged = graph.call_function(linear.target, linear.args)
    merged.meta["path"] = nodes[0].meta.get("path", "?")
    merged.meta["shape"] = (shape(nodes[0])[0], shape(linear.weight)[0])
    base = 0
    for node in nodes:
        size = shape(node)[1]
        replace(node, aten.slice.Tensor, (merged, 1, base, base + size))
        base += size


def _merge_gated(weights: WeightNodes, node: fx.Node, ctx: PassContext, skipped: list[tuple[str, str]]) -> int:
    gated = GatedAct.of(node)
    first, second = last_dim_slice(gated.gate), last_dim_slice(gated.up)
    if first is not None and second is not None and first[0] is second[0]:
        (source, lo, mid), (_, mid2, hi) = first, second
        linear = _plain_linear(source)
        if linear is not None and (lo, mid, hi) == (0, mid2, shape(source)[1]) and hi == 2 * mid:
            replace_with(node, linear.evolve(act=gated.kind, gated=True))
            return 1
    gate, up = _plain_linear(gated.gate), _plain_linear(gated.up)
    if gate is None or up is None or gate.x is not up.x:
        skipped.append((node.name, "gate and up are not plain linears of one value"))
        return 0
    if _format(gate, ctx) is not _format(up, ctx):
        skipped.append((node.name, "gate and up are stored on grids of different formats"))
        return 0
    if only_user(gated.gate) is not node or only_user(gated.up) is not node:
        skipped.append((node.name, "gate or up has other users"))
        return 0
    replace_with(node, _merged(weights, [gate, up]).evolve(act=gated.kind, gated=True))
    return 1
