"""Rotary embedding.

The tables  cos(cat(p f, p f)) [* s],  sin(…) [* s]                 ->  llmc.rope_table(positions, f, s)
x * cos + cat(-x[half:], x[:half]) * sin                            ->  llmc.rope(x, table)
cat(rope(x[:rot]), x[rot:])  (partial rotary)                       ->  llmc.rope(x, table)
"""

from __future__ import annotations

from typing import Any

from torch import fx

from llmc.kernels.ops import Rope, RopeTable
from llmc.passes.match import aten, calls, commuted, constant, is_call, last_dim_slice, replace_with, scalar, shape
from llmc.passes.result import PassContext, PassResult


def run(graph: fx.Graph, ctx: PassContext) -> PassResult:
    count, skipped = 0, []
    tables: dict[tuple[fx.Node, float], fx.Node] = {}
    for node in calls(graph, aten.add.Tensor):
        found = _rotation(node)
        if isinstance(found, str):
            skipped.append((node.name, found))
        if not isinstance(found, tuple):
            continue
        x, inv_freq, scale = found
        if (inv_freq, scale) not in tables:
            first = next(n for n in graph.nodes if n.op == "call_function")
            positions = next(n for n in graph.nodes if n.name == "positions")
            view = RopeTable(positions, inv_freq, scale)
            with graph.inserting_before(first):
                table = graph.call_function(view.target, view.args)
            table.meta["path"] = "rotary embedding"
            tables[inv_freq, scale] = table
        new = replace_with(node, Rope(x, tables[inv_freq, scale]))
        _absorb_pass_through(new)
        count += 1
    return PassResult(count, skipped)


def _rotation(node: fx.Node) -> tuple[fx.Node, fx.Node, float] | str | None:
    """(x, inv_freq, scale); a reason when it looks like a rotation but is of another kind; None otherwise."""
    for left, right in commuted(node):
        if not (is_call(left, aten.mul.Tensor) and is_call(right, aten.mul.Tensor)):
            return None
        for x, cos in commuted(left):
            for rotated, sin in commuted(right):
                c, s = _table_side(cos, aten.cos.default), _table_side(sin, aten.sin.default)
                if c is None or s is None or not isinstance(x, fx.Node):
                    continue
                if c != s:
                    return "cosine and sine have different frequencies or scales"
                if not _is_half_rotation(rotated, x):
                    return "the rotation is not by halves"
                return x, c[0], c[1]
    return None


def _is_half_rotation(node: Any, x: fx.Node) -> bool:
    """Whether node is cat(-x[half:], x[:half])."""
    if not is_call(node, aten.cat.default) or len(node.args[0]) != 2:
        return False
    negated, first = node.args[0]
    size = shape(x)[-1]
    return (
        is_call(negated, aten.neg.default)
        and last_dim_slice(negated.args[0]) == (x, size // 2, size)
        and last_dim_slice(first) == (x, 0, size // 2)
    )


def _table_side(node: Any, function: Any) -> tuple[fx.Node, float] | None:
    """(inv_freq, scale) of view(cos(cat(f, f)) [* scale]) with f = float(positions) * inv_freq."""
    if is_call(node, aten.view.default):
        node = node.args[0]
    scale = 1.0
    if is_call(node, aten.mul.Tensor) and scalar(node.args[1]) is not None:
        node, scale = node.args[0], float(node.args[1])
    if not is_call(node, function) or not is_call(node.args[0], aten.cat.default):
        return None
    halves = node.args[0].args[0]
    if len(halves) != 2 or halves[0] is not halves[1] or not is_call(halves[0], aten.mul.Tensor):
        return None
    for positions, inv_freq in commuted(halves[0]):
        if constant(inv_freq) is not None and is_call(positions, aten._to_copy.default):
            return inv_freq, scale
    return None


def _absorb_pass_through(node: fx.Node) -> None:
    """cat(rope(x[:rot]), x[rot:]) is rope of the whole x."""
    rope = Rope.of(node)
    sliced = last_dim_slice(rope.x)
    for user in list(node.users):
        if sliced is None or not is_call(user, aten.cat.default) or len(user.args[0]) != 2:
            continue
        x, lo, rot = sliced
        if lo == 0 and last_dim_slice(user.args[0][1]) == (x, rot, shape(x)[-1]):
            user.replace_all_uses_with(node)
            node.args = rope.evolve(x=x).args
            node.meta["shape"] = shape(x)
            user.graph.erase_node(user)
