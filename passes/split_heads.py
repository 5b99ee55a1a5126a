"""Undoes head-by-head interleaving of merged projections, by reordering the rows of the weight (GPT-NeoX).

view(linear(x, W), [T, H, P])[..., a:b]  ->  view(linear(x, W')[:, …], [T, H, b - a])

where W' holds the rows a:b of all heads one after the other.
"""

from __future__ import annotations

from torch import fx

from llmc.kernels.ops import Linear
from llmc.kernels.weights import unzip_heads
from llmc.passes.match import WeightNodes, aten, calls, last_dim_slice, only_user, replace, shape, weight
from llmc.passes.result import PassContext, PassResult


def run(graph: fx.Graph, ctx: PassContext) -> PassResult:
    count, skipped = 0, []
    weights = WeightNodes(graph)
    for view in calls(graph, aten.view.default):
        linear = Linear.match(view.args[0])
        if len(shape(view)) != 3 or linear is None:
            continue
        slices = [last_dim_slice(user) for user in view.users]
        if not slices or any(s is None for s in slices):
            continue
        pieces = sorted({(s[1], s[2]) for s in slices if s is not None})
        if [lo for lo, _ in pieces] != [0, *(hi for _, hi in pieces[:-1])] or pieces[-1][1] != shape(view)[2]:
            skipped.append((view.name, "the slices do not tile the heads"))
            continue
        if only_user(view.args[0]) is not view or linear.gated:
            skipped.append((view.name, "the projection has other users"))
            continue
        _unzip(weights, view, linear, tuple(pieces))
        count += 1
    return PassResult(count, skipped)


def _unzip(weights: WeightNodes, view: fx.Node, linear: Linear, pieces: tuple[tuple[int, int], ...]) -> None:
    heads, node = shape(view)[1], view.args[0]

    def unzipped(source: fx.Node | None) -> fx.Node | None:
        ref = weight(source)
        return weights.add(unzip_heads(ref, heads, pieces)) if ref is not None else None

    node.args = linear.evolve(weight=unzipped(linear.weight), bias=unzipped(linear.bias)).args
    for user in list(view.users):
        _, lo, hi = last_dim_slice(user)  # type: ignore[misc]
        with user.graph.inserting_before(user):
            block = user.graph.call_function(aten.slice.Tensor, (node, 1, lo * heads, hi * heads))
        block.meta["shape"] = (shape(node)[0], heads * (hi - lo))
        replace(user, aten.view.default, (block, [-1, heads, hi - lo]))
