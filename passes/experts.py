"""Mixtures of experts.

down(act(up(x, i, U)), i, w, D)                          ->  llmc.moe(x, logits, U', D', router, act)
down(gated_act(y[:, :, :N], y[:, :, N:]), i, w, D), y = up(x, i, GU)
                                                         ->  llmc.moe(x, logits, GU', D', router, act, gated)

where the experts i and weights w come from logits by a router that `Router` (kernels/routing.py) can say:

i = argsort(s [+ correction] [-inf outside of the best groups])[:, :k],  s = softmax(logits) or sigmoid(logits)
w = s[i] [/ (max(sum, floor) + eps)] [* scale],  or softmax(logits[i]) [* scale]

A stack of matrices [E, N, K] becomes one matrix, expert by expert, gates before ups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torch import fx

from llmc.errors import UserError
from llmc.kernels.experts import DOWN, UP
from llmc.kernels.ops import Act, GatedAct, Moe
from llmc.kernels.routing import Router
from llmc.kernels.weights import Transposed, WeightRef, concat, item, rows
from llmc.passes.match import (
    WeightNodes,
    arguments,
    aten,
    calls,
    commuted,
    is_call,
    is_vector,
    last_dim_slice,
    replace_with,
    scalar,
    shape,
    weight,
)
from llmc.passes.result import PassContext, PassResult

_SCORES = {aten.softmax.int: "softmax", aten.sigmoid.default: "sigmoid"}


def run(graph: fx.Graph, ctx: PassContext) -> PassResult:
    weights, count = WeightNodes(graph), 0
    for node in calls(graph, DOWN):
        count += 1
        replace_with(node, _mixture(weights, node))
    return PassResult(count)


def _mixture(weights: WeightNodes, node: fx.Node) -> Moe:
    """The mixture that ends with `node`. Raises UserError for a router or an activation that is not known."""
    down = arguments(node)
    inner = _inner(down["h"])
    if inner is None or inner.first["index"] is not down["index"]:
        _refuse(node, "the activation of its experts is not known", down["h"], UP)
    found = _routing(down["index"], down["weights"])
    if found is None:
        _refuse(node, "its router is not known", down["weights"], None)
    router, logits, correction = found
    ups, downs = (_matrices(node, a, shape(logits)[1]) for a in (inner.first, down))
    tall = [inner.rows(ref, side) for side in inner.sides for ref in ups]
    up_bias = _biases(weights, inner.first["bias"], inner)
    down_bias = _biases(weights, down["bias"], None)
    return Moe(
        inner.first["x"], logits, correction, weights.add(concat(tuple(tall))), up_bias,
        weights.add(concat(tuple(downs))), down_bias, router.scores, router.top_k, router.groups, router.top_groups,
        router.group_best, router.normalise, router.floor, router.eps, router.scale, inner.act, inner.gated,
    )  # fmt: skip


def _refuse(node: fx.Node, reason: str, last: Any, stop: Any) -> NoReturn:
    raise UserError(
        f"llmc cannot build this architecture: it has a mixture of experts of its own kind: experts at "
        f"{node.meta.get('path', '?')}: {reason}: {', '.join(_ops(last, stop))}"
    )


# ---- what stands between the two products


@dataclass(frozen=True)
class _Inner:
    """What an expert does with its first product. first: the arguments of that. sides: which rows of the stacks are
    gates, and which ups."""

    first: dict[str, Any]
    act: str
    gated: bool = False
    sides: tuple[str, ...] = ("all",)

    def rows(self, ref: WeightRef, side: str) -> WeightRef:
        """The rows of one expert's matrix, or entries of its bias, that are one side."""
        n = ref.shape[0]
        if side == "all":
            return ref
        return rows(ref, 0, n // 2) if side == "first" else rows(ref, n // 2, n)


def _inner(h: Any) -> _Inner | None:
    act, gated = Act.match(h), GatedAct.match(h)
    if act is not None and is_call(act.x, UP):
        return _Inner(arguments(act.x), act.kind)
    gate, up = (last_dim_slice(gated.gate), last_dim_slice(gated.up)) if gated is not None else (None, None)
    if gated is None or gate is None or up is None or gate[0] is not up[0] or not is_call(gate[0], UP):
        return None
    n = shape(gate[0])[-1]
    if (gate[1:], up[1:]) == ((0, n // 2), (n // 2, n)):
        return _Inner(arguments(gate[0]), gated.kind, True, ("first", "second"))
    return None


def _matrices(node: fx.Node, product: dict[str, Any], experts: int) -> list[WeightRef]:
    """The matrices [N, K] of a stack."""
    stack = weight(product["weight"])
    if stack is None or stack.shape[0] != experts:
        raise UserError(
            f"experts at {node.meta.get('path', '?')}: the router makes {experts} logits, and its weights are "
            f"{'computed' if stack is None else f'those of {stack.shape[0]} experts'}; this is not supported"
        )
    items = [item(stack, e) for e in range(experts)]
    return [Transposed(ref.shape[::-1], ref) for ref in items] if product["transposed"] else items


def _biases(weights: WeightNodes, node: Any, inner: _Inner | None) -> fx.Node | None:
    """The biases of all experts as one vector, expert by expert, gates before ups."""
    ref = weight(node)
    if ref is None:
        return None
    items = [item(ref, e) for e in range(ref.shape[0])]
    if inner is not None:
        items = [inner.rows(bias, side) for bias in items for side in inner.sides]
    return weights.add(concat(tuple(items)))


# ---- the router


def _routing(index: Any, weights: Any) -> tuple[Router, fx.Node, fx.Node | None] | None:
    """(router, logits, correction) of chosen experts and their weights."""
    scale, weights = _scaled(weights)
    normalised = _normalised(weights)
    base = weights if normalised is None else normalised[0]
    if not is_call(base, aten.gather.default) or base.args[2] is not index:
        return None
    scores, masked = _grouped(base.args[0])
    top = last_dim_slice(index)
    if top is None or top[1] != 0 or not is_call(top[0], aten.argsort.stable) or not top[0].kwargs["descending"]:
        return None
    kind = _SCORES.get(scores.target) if scores.op == "call_function" else None
    logits = scores.args[0] if kind is not None else scores
    ranked, groups = _grouped(top[0].args[0])
    if masked is not None and base.args[0] is not top[0].args[0]:
        return None
    ranked, correction = _corrected(ranked, scores)
    raw = ranked is logits and correction is None and groups is None  # the same order as of the scores
    if normalised is not None and normalised[1] == "softmax":
        if kind is not None or not raw:
            return None
        router = Router("softmax", top[2], normalise=True)
    else:
        if kind is None or not (ranked is scores or raw) or (kind == "softmax" and scores.args[1] not in (-1, 1)):
            return None
        router = Router(kind, top[2], normalise=normalised is not None)
    if normalised is not None and normalised[1] != "softmax":
        router = replace(router, floor=normalised[2], eps=normalised[3])
    if groups is not None and groups.chosen < groups.count:
        if not groups.strict and correction is not None:
            return None
        router = replace(router, groups=groups.count, top_groups=groups.chosen, group_best=groups.best)
    return replace(router, scale=scale), logits, correction


def _scaled(node: Any) -> tuple[float, Any]:
    """(c, x) of x * c."""
    if is_call(node, aten.mul.Tensor):
        for x, c in commuted(node):
            value = scalar(c)
            if value is not None:
                return value, x
    return 1.0, node


def _normalised(node: Any) -> tuple[Any, str, float, float] | None:
    """(w, "sum", floor, eps) of w / (max(sum(w), floor) + eps); (w, "softmax", 0, 0) of softmax(w)."""
    if is_call(node, aten.softmax.int) and node.args[1] in (-1, 1):
        return node.args[0], "softmax", 0.0, 0.0
    if not is_call(node, aten.div.Tensor):
        return None
    w, total = node.args[:2]
    floor = eps = 0.0
    if is_call(total, aten.add.Tensor) and scalar(total.args[1]) is not None:
        total, eps = total.args[0], float(total.args[1])
    if is_call(total, aten.clamp.default) and len(total.args) == 2 and scalar(total.args[1]) is not None:
        total, floor = total.args[0], float(total.args[1])
    whole = is_call(total, aten.sum.dim_IntList) and total.args[0] is w and list(total.args[1]) in ([-1], [1])
    return (w, "sum", floor, eps) if whole and len(total.args) > 2 and total.args[2] else None


def _corrected(node: Any, scores: fx.Node) -> tuple[Any, fx.Node | None]:
    """(scores, c) of scores + c, a vector."""
    if is_call(node, aten.add.Tensor):
        for a, b in commuted(node):
            if a is scores and isinstance(b, fx.Node) and is_vector(b):
                return a, b
    return node, None


@dataclass(frozen=True)
class _Groups:
    """strict: experts outside are -inf, not 0."""

    count: int
    chosen: int
    best: int
    strict: bool


def _grouped(node: Any) -> tuple[Any, _Groups | None]:
    """(ranked, groups) of masked_fill(ranked, not chosen, -inf), chosen by the best of ranked in every group."""
    if not is_call(node, aten.masked_fill.Scalar):
        return node, None
    ranked, outside, fill = node.args
    chain = (aten.bitwise_not.default, aten.ne.Scalar, aten.view.default, aten.expand_copy.default, aten.view.default)
    for target in chain:
        if not is_call(outside, target):
            return node, None
        outside = outside.args[0]
    if not is_call(outside, aten.scatter.value) or not is_call(outside.args[0], aten.zeros_like.default):
        return node, None
    zeros, dim, index, value = outside.args
    top = last_dim_slice(index)
    if top is None or top[1] != 0 or not is_call(top[0], aten.argsort.stable) or (dim, value) not in ((1, 1), (-1, 1)):
        return node, None
    best, marks = top[0].args[0], zeros.args[0]
    size = _best_of(best, ranked)
    if size is None or shape(marks) != shape(best) or fill not in (0, float("-inf")):
        return node, None
    return ranked, _Groups(shape(best)[1], top[2], size, fill != 0)


def _best_of(node: Any, ranked: Any) -> int | None:
    """n of the sum of the n highest of view(ranked, [T, groups, size]) in each group."""
    if is_call(node, aten.amax.default) and list(node.args[1]) in ([-1], [2]):
        grouped, count = node.args[0], 1
    elif is_call(node, aten.sum.dim_IntList) and list(node.args[1]) in ([-1], [2]):
        gathered = node.args[0]
        if not is_call(gathered, aten.gather.default):
            return None
        top, grouped = last_dim_slice(gathered.args[2]), gathered.args[0]
        if top is None or top[1] != 0 or not is_call(top[0], aten.argsort.stable) or top[0].args[0] is not grouped:
            return None
        count = top[2]
    else:
        return None
    return count if is_call(grouped, aten.view.default) and grouped.args[0] is ranked else None


def _ops(last: Any, stop: Any) -> list[str]:
    """The names of the ops that a value is made of, back to what has a weight matrix, in their order."""
    found: list[fx.Node] = []
    todo = [last]
    while todo:
        node = todo.pop()
        if not isinstance(node, fx.Node) or node.op != "call_function" or node in found or node.target is stop:
            continue
        if any(len(shape(a)) > 1 for a in node.all_input_nodes if a.op == "placeholder"):
            continue
        found.append(node)
        todo += node.all_input_nodes
    order = {node: at for at, node in enumerate(last.graph.nodes)}
    return [str(n.target).removesuffix(".default") for n in sorted(found, key=order.__getitem__)]
