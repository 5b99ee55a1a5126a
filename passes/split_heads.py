"""Undoes head-by-head interleaving of merged projections, by reordering the rows of the weight (GPT-NeoX).

view(linear(x, W), [T, H, P])[..., a:b]  ->  view(linear(x, W')[:, …], [T, H, b - a])

where W' holds the rows a:b of all heads one after the other.
"""

from __future__ import annotations

from torch import fx

from llmc.kernels.dialect import OPS
from llmc.kernels.weights import unzip_heads
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
    count, skipped = 0, []
    for view in calls(graph, aten.view.default):
        linear = view.args[0]
        if len(shape(view)) != 3 or not is_call(linear, OPS["linear"]):
            continue
        slices = [last_dim_slice(user) for user in view.users]
        if not slices or any(s is None for s in slices):
            continue
        pieces = sorted({(s[1], s[2]) for s in slices if s is not None})
        if [lo for lo, _ in pieces] != [0, *(hi for _, hi in pieces[:-1])] or pieces[-1][1] != shape(view)[2]:
            skipped.append((view.name, "the slices do not tile the heads"))
            continue
        if only_user(linear) is not view or linear.args[5]:
            skipped.append((view.name, "the projection has other users"))
            continue
        _unzip(graph, view, linear, tuple(pieces))
        count += 1
    return PassResult(count, skipped)


def _unzip(graph: fx.Graph, view: fx.Node, linear: fx.Node, pieces: tuple[tuple[int, int], ...]) -> None:
    heads = shape(view)[1]
    x, w, bias, *rest = linear.args
    new_weight = add_weight(graph, unzip_heads(weight(w), heads, pieces))  # type: ignore[arg-type]
    new_bias = add_weight(graph, unzip_heads(weight(bias), heads, pieces)) if bias is not None else None  # type: ignore[arg-type]
    linear.args = (x, new_weight, new_bias, *rest)
    for user in list(view.users):
        _, lo, hi = last_dim_slice(user)  # type: ignore[misc]
        with graph.inserting_before(user):
            block = graph.call_function(aten.slice.Tensor, (linear, 1, lo * heads, hi * heads))
        block.meta["shape"] = (shape(linear)[0], heads * (hi - lo))
        replace(user, aten.view.default, (block, [-1, heads, hi - lo]))
