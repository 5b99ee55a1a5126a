"""Linears that read the same value become one (QKV; also gate and up).

linear(x, A), linear(x, B), …                       ->  slices of linear(x, concat(A, B, …))
gated_act(linear(x, G), linear(x, U), kind)         ->  linear(x, concat(G, U), act=kind, gated)
gated_act(y[:, :F], y[:, F:], kind), y = linear(…)  ->  linear(…, act=kind, gated)        (stored merged: Phi-3)
"""

from __future__ import annotations

from typing import Any

from torch import fx

from llmc.kernels.dialect import OPS
from llmc.kernels.weights import WeightRef, Zeros, concat
from llmc.passes.match import (
    add_weight,
    aten,
    calls,
    is_call,
    last_dim_slice,
    only_user,
    replace,
    shape,
    weight,
)
from llmc.passes.result import PassContext, PassResult


def run(graph: fx.Graph, ctx: PassContext) -> PassResult:
    skipped: list[tuple[str, str]] = []
    count = sum(_merge_gated(graph, node, skipped) for node in calls(graph, OPS["gated_act"]))
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in calls(graph, OPS["linear"]):
        if _is_plain(node) and node.users:
            groups.setdefault(node.args[0], []).append(node)
    for nodes in groups.values():
        if len(nodes) > 1:
            _merge(graph, nodes)
            count += 1
    return PassResult(count, skipped)


def _is_plain(node: Any) -> bool:
    return is_call(node, OPS["linear"]) and node.args[3:] == (None, "none", False, "f32")


def _merged_weight(graph: fx.Graph, nodes: list[fx.Node]) -> tuple[fx.Node, fx.Node | None]:
    refs: list[WeightRef] = [weight(n.args[1]) for n in nodes]  # type: ignore[misc]
    merged = add_weight(graph, concat(tuple(refs)))
    if all(n.args[2] is None for n in nodes):
        return merged, None
    biases = [weight(n.args[2]) or Zeros((ref.shape[0],)) for n, ref in zip(nodes, refs, strict=True)]
    return merged, add_weight(graph, concat(tuple(biases)))


def _merge(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    w, bias = _merged_weight(graph, nodes)
    with graph.inserting_before(nodes[0]):
        merged = graph.call_function(OPS["linear"], (nodes[0].args[0], w, bias, None, "none", False, "f32"))
    merged.meta["path"] = nodes[0].meta.get("path", "?")
    merged.meta["shape"] = (shape(nodes[0])[0], shape(w)[0])
    base = 0
    for node in nodes:
        size = shape(node)[1]
        replace(node, aten.slice.Tensor, (merged, 1, base, base + size))
        base += size


def _merge_gated(graph: fx.Graph, node: fx.Node, skipped: list[tuple[str, str]]) -> int:
    gate, up, kind = node.args
    first, second = last_dim_slice(gate), last_dim_slice(up)
    if first is not None and second is not None and first[0] is second[0]:
        (linear, lo, mid), (_, mid2, hi) = first, second
        if _is_plain(linear) and (lo, mid, hi) == (0, mid2, shape(linear)[1]) and hi == 2 * mid:
            replace(node, OPS["linear"], (*linear.args[:4], kind, True, "f32"))
            return 1
    if not (_is_plain(gate) and _is_plain(up) and gate.args[0] is up.args[0]):
        skipped.append((node.name, "gate and up are not plain linears of one value"))
        return 0
    if only_user(gate) is not node or only_user(up) is not node:
        skipped.append((node.name, "gate or up has other users"))
        return 0
    w, bias = _merged_weight(graph, [gate, up])
    replace(node, OPS["linear"], (gate.args[0], w, bias, None, kind, True, "f32"))
    return 1
