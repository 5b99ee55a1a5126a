"""Rotary embedding.

The tables  cos(cat(p f, p f)) [* s],  sin(…) [* s]                 ->  llmc.rope_table(positions, f, s)
x * cos + cat(-x[half:], x[:half]) * sin                            ->  llmc.rope(x, table)
x * cos + cat(x[half:], -x[:half]) * sin  (the other way round)     ->  llmc.rope(x, the table of -f)
x * each twice(cos) + stack(-x[1::2], x[::2]) * each twice(sin)     ->  llmc.rope(x, table, interleaved)
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
    negated: dict[fx.Node, fx.Node] = {}
    for node in calls(graph, aten.add.Tensor):
        found = _rotation(node)
        if isinstance(found, str):
            skipped.append((node.name, found))
        if not isinstance(found, tuple):
            continue
        x, (inv_freq, scale, interleaved), backwards = found
        if backwards:  # by -f: cosine is even and sine is odd
            if inv_freq not in negated:
                negated[inv_freq] = _negated(inv_freq)
            inv_freq = negated[inv_freq]
        if (inv_freq, scale) not in tables:
            first = next(n for n in graph.nodes if n.op == "call_function")
            positions = next(n for n in graph.nodes if n.name == "positions")
            view = RopeTable(positions, inv_freq, scale)
            with graph.inserting_before(first):
                table = graph.call_function(view.target, view.args)
            table.meta["path"] = "rotary embedding"
            tables[inv_freq, scale] = table
        new = replace_with(node, Rope(x, tables[inv_freq, scale], interleaved))
        _absorb_pass_through(new)
        count += 1
    return PassResult(count, skipped)


_Table = tuple[fx.Node, float, bool]
"""(inv_freq, scale, whether each value stands twice, for neighbours)"""


def _negated(inv_freq: fx.Node) -> fx.Node:
    """The constant -inv_freq."""
    value = constant(inv_freq)
    assert value is not None
    with inv_freq.graph.inserting_after(inv_freq):
        node = inv_freq.graph.placeholder(f"{inv_freq.name}_negated")
    node.meta |= {"constant": -value, "shape": shape(inv_freq)}
    return node


def _rotation(node: fx.Node) -> tuple[fx.Node, _Table, bool] | str | None:
    """(x, table, whether it turns the other way); a reason when it looks like a rotation but is of another kind; None
    otherwise."""
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
                backwards = not c[2] and _is_half_rotation(rotated, x, backwards=True)
                if not (backwards or (_is_neighbour_rotation(rotated, x) if c[2] else _is_half_rotation(rotated, x))):
                    return "the rotation is neither by halves nor of neighbours"
                return x, c, backwards
    return None


def _is_half_rotation(node: Any, x: fx.Node, backwards: bool = False) -> bool:
    """Whether node is cat(-x[half:], x[:half]), or backwards cat(x[half:], -x[:half])."""
    if not is_call(node, aten.cat.default) or len(node.args[0]) != 2:
        return False
    second, first = node.args[0]
    negated = first if backwards else second
    if not is_call(negated, aten.neg.default):
        return False
    second, first = (second, negated.args[0]) if backwards else (negated.args[0], first)
    size = shape(x)[-1]
    return last_dim_slice(second) == (x, size // 2, size) and last_dim_slice(first) == (x, 0, size // 2)


def _is_neighbour_rotation(node: Any, x: fx.Node) -> bool:
    """Whether node is stack([-x[1::2], x[::2]], -1), flattened."""
    if not is_call(node, aten.view.default) or shape(node) != shape(x):
        return False
    pairs = node.args[0]
    if not is_call(pairs, aten.stack.default) or len(pairs.args[0]) != 2 or pairs.args[1] != len(shape(x)):
        return False
    negated, first = pairs.args[0]
    last, size = len(shape(x)) - 1, shape(x)[-1]
    return (
        is_call(negated, aten.neg.default)
        and is_call(negated.args[0], aten.slice.Tensor)
        and is_call(first, aten.slice.Tensor)
        and negated.args[0].args == (x, last, 1, size, 2)
        and first.args == (x, last, 0, size, 2)
    )


def _table_side(node: Any, function: Any) -> _Table | None:
    """The table behind one of its sides: cos(cat(f, f)) [* scale] with f = float(positions) * inv_freq, its first half
    with each value twice, or cos of f with each value twice; views may lie between."""
    scale, twice, is_half = 1.0, False, False
    while not is_call(node, function):
        if is_call(node, aten.view.default):
            node = node.args[0]
        elif is_call(node, aten.mul.Tensor) and scalar(node.args[1]) is not None:
            node, scale = node.args[0], scale * float(node.args[1])
        elif not twice and (inner := _each_twice(node)) is not None:
            node, twice = inner, True
        elif twice and not is_half and (cut := last_dim_slice(node)) is not None:
            node, is_half = cut[0], True
            if cut[1:] != (0, shape(node)[-1] // 2):
                return None
        else:
            return None
    angles = node.args[0]
    if (inner := _each_twice(angles)) is not None and not twice:
        return _frequencies(inner, scale, True)
    if twice and not is_half:
        return _frequencies(angles, scale, True)
    if not is_call(angles, aten.cat.default):
        return None
    halves = angles.args[0]
    if len(halves) != 2 or halves[0] is not halves[1]:
        return None
    return _frequencies(halves[0], scale, twice)


def _each_twice(node: Any) -> Any:
    """x of an x whose every last value stands twice, or None."""
    if is_call(node, aten.repeat_interleave.self_int) and node.args[1:3] == (2, len(shape(node)) - 1):
        return node.args[0]
    return None


def _frequencies(angles: Any, scale: float, interleaved: bool) -> _Table | None:
    """The table of angles float(positions) * inv_freq."""
    if not is_call(angles, aten.mul.Tensor):
        return None
    for positions, inv_freq in commuted(angles):
        if constant(inv_freq) is not None and is_call(positions, aten._to_copy.default):
            return inv_freq, scale, interleaved
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
