"""Small matchers over FX nodes that the rewrites share. A matcher returns what it found, or None."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from llmc.kernels.ops import OpView
from llmc.kernels.weights import WeightRef, weight_name

aten = torch.ops.aten


def calls(graph: fx.Graph, *targets: Any) -> Iterator[fx.Node]:
    """The nodes that call one of the targets, in order; safe while the loop rewrites the graph."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in targets and not node._erased:
            yield node


def is_call(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def weight(node: Any) -> WeightRef | None:
    """The recipe behind a weight placeholder."""
    return node.meta.get("weight") if isinstance(node, fx.Node) and node.op == "placeholder" else None


def constant(node: Any) -> Tensor | None:
    """The value behind a constant placeholder."""
    return node.meta.get("constant") if isinstance(node, fx.Node) and node.op == "placeholder" else None


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an aten op by the names of its schema, with the schema's defaults."""
    found = {}
    for index, argument in enumerate(node.target._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        found[argument.name] = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name, default)
    return found


def is_vector(node: Any) -> bool:
    """Whether a node is a one-dimensional weight or constant."""
    ref, value = weight(node), constant(node)
    return (ref is not None and len(ref.shape) == 1) or (value is not None and value.ndim == 1)


def only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def commuted(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Both operand orders of a two-operand node."""
    a, b = node.args[:2]
    yield a, b
    yield b, a


def scalar(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def last_dim_slice(node: Any) -> tuple[fx.Node, int, int] | None:
    """(x, start, end) of a slice along the last dimension."""
    if not is_call(node, aten.slice.Tensor):
        return None
    x, dim, lo, hi, *step = node.args
    return (x, lo, hi) if dim == len(shape(x)) - 1 and not step else None


def shape(node: fx.Node) -> tuple[int, ...]:
    """Shape of a tokens-major value with the probe sizes of `annotate_shapes` in the first dimension."""
    found: tuple[int, ...] = node.meta["shape"]
    return found


def replace(node: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    """Puts a call in the place of `node`; dead producers go at the end of the pass."""
    graph = node.graph
    with graph.inserting_before(node):
        new = graph.call_function(target, args)
    new.meta = {k: v for k, v in node.meta.items() if k in ("path", "shape")}
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def replace_with(node: fx.Node, op: OpView) -> fx.Node:
    """`replace` by an op of the dialect."""
    return replace(node, op.target, op.args)


class WeightNodes:
    """The placeholders of a graph's weights by recipe; one for a pass that adds some."""

    def __init__(self, graph: fx.Graph) -> None:
        placeholders = graph.find_nodes(op="placeholder")
        self._graph, self._last = graph, placeholders[-1]
        self._nodes = {node.meta["weight"]: node for node in placeholders if "weight" in node.meta}

    def add(self, ref: WeightRef) -> fx.Node:
        """The placeholder of a recipe, new or the one that is there already."""
        if ref not in self._nodes:
            with self._graph.inserting_after(self._last):
                self._last = self._nodes[ref] = self._graph.placeholder(weight_name(ref))
            self._last.meta |= {"weight": ref, "shape": ref.shape}
        return self._nodes[ref]
