"""Runs a graph of the dialect (or of what is left of aten on the way to it) in plain torch, one node at a time.

Weights are evaluated from their recipes when a node needs them and dropped after its last use, and large ones are read
in blocks of rows, so that running a model needs memory for a weight and its activations, not for all weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from llmc.kernels.dialect import OPS, mixture
from llmc.kernels.ops import Embed, Linear, Moe
from llmc.kernels.quant import to_float32
from llmc.kernels.weights import Reader, WeightRef

WHOLE_WEIGHT = 1 << 25
"""Elements of a weight that is loaded whole (128 MiB); larger ones, such as heads, are read in blocks of rows."""
_BLOCK = 1 << 22
"""Elements of such a block."""


Watch = Callable[[fx.Node, Tensor], None]


def load(node: fx.Node, reader: Reader, dtype: torch.dtype = torch.float32) -> Tensor:
    """The value of a weight or constant placeholder; dtype: of weights."""
    if "constant" in node.meta:
        value: Tensor = node.meta["constant"]
        return value
    return to_float32(node.meta["weight"].read(reader)).to(dtype)


def is_weight(node: fx.Node) -> bool:
    """Whether a node is a weight or a constant, i.e. not an input of the step."""
    return node.op == "placeholder" and ("weight" in node.meta or "constant" in node.meta)


def run_graph(graph: fx.Graph, inputs: dict[str, Tensor], reader: Reader, rows_per_run: int = 256) -> Tensor:
    """logits [R, V] for inputs tokens [T], positions [T], query_start [S+1], rows [R] (int64).

    What depends on `rows` (the head) runs for `rows_per_run` rows at a time; see `Body.logits`.
    """
    return torch.cat(list(run_body(graph, inputs, reader).logits(rows_per_run)))


@dataclass(frozen=True)
class Body:
    """A graph that has run up to the nodes that depend on `rows`: the head, and what lies between."""

    graph: fx.Graph
    reader: Reader
    rows: Tensor
    values: dict[fx.Node, Any]
    """What the rest of the graph needs."""

    def logits(self, rows_per_run: int) -> Iterator[Tensor]:
        """The logits of `rows` in blocks [<= rows_per_run, V]."""
        tail = downstream(self.graph, "rows")
        kept: dict[fx.Node, Tensor] = {}
        for block in self.rows.split(rows_per_run):
            yield self._logits(block, tail, kept)

    @torch.no_grad()
    def _logits(self, rows: Tensor, tail: set[fx.Node], kept: dict[fx.Node, Tensor]) -> Tensor:
        values = dict(self.values)
        for node in self.graph.nodes:
            if node.op == "placeholder" and node.name == "rows":
                values[node] = rows
            elif node in tail and node.op == "call_function":
                values[node] = _call(node, values, self.reader, kept)
        (output,) = (n.args[0] for n in self.graph.nodes if n.op == "output")
        result: Tensor = values[output]
        return result if output in tail else result[rows]


@torch.no_grad()
def run_body(
    graph: fx.Graph,
    inputs: dict[str, Tensor],
    reader: Reader,
    done: Callable[[fx.Node], None] = lambda node: None,
    dtype: torch.dtype = torch.float32,
    watch: Watch | None = None,
) -> Body:
    """Runs what does not depend on `rows`; inputs as for `run_graph`. `done` is called after each node, `watch` with
    the weight of every product and rows [T, K] that it multiplies. dtype: of weights, and so of what is computed."""
    tail = downstream(graph, "rows")
    values: dict[fx.Node, Any] = {}
    last_use = last_uses(graph)
    for node in graph.nodes:
        if node.op == "placeholder" and not is_weight(node):
            values[node] = inputs.get(node.name)
        elif node.op == "call_function" and node not in tail:
            if watch is not None and (linear := Linear.match(node)) is not None:
                watch(linear.weight, values[linear.x])
            values[node] = _call(node, values, reader, {}, dtype, watch)
            for used in node.all_input_nodes:
                if last_use[used] is node:
                    values.pop(used, None)
            done(node)
    return Body(graph, reader, inputs["rows"], values)


def downstream(graph: fx.Graph, name: str) -> set[fx.Node]:
    """The input of a name and every node that depends on it."""
    found = {n for n in graph.nodes if n.op == "placeholder" and n.name == name}
    for node in graph.nodes:
        if any(a in found for a in node.all_input_nodes):
            found.add(node)
    return found


def last_uses(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The last node that needs the value of each."""
    return {a: n for n in graph.nodes for a in n.all_input_nodes}


def evaluate(node: fx.Node, values: dict[fx.Node, Any], reader: Reader) -> Any:
    """The value of a node from those of its inputs; weights are loaded."""
    return _call(node, values, reader, {})


def _call(
    node: fx.Node,
    values: dict[fx.Node, Any],
    reader: Reader,
    kept: dict[fx.Node, Tensor],
    dtype: torch.dtype = torch.float32,
    watch: Watch | None = None,
) -> Any:
    """The value of a node. `kept`: weights loaded so far, which gains those of this node. `watch`: of a mixture, see
    `run_body`."""

    def value(arg: fx.Node) -> Any:
        if not is_weight(arg):
            return values[arg]
        if arg not in kept:
            kept[arg] = load(arg, reader, dtype)
        return kept[arg]

    embed, linear, moe = Embed.match(node), Linear.match(node), Moe.match(node)
    if moe is not None and is_weight(moe.up) and is_weight(moe.down):
        return _moe(moe, value, reader, watch)
    if embed is not None and _is_large(embed.weight):
        return _embed(embed, value(embed.ids), reader).to(dtype)
    if linear is not None and not linear.gated and _is_large(linear.weight):
        bias, residual = (None if arg is None else value(arg) for arg in (linear.bias, linear.residual))
        return _linear(linear, value(linear.x), bias, residual, reader)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    return node.target(*args, **kwargs)


def _is_large(weight: fx.Node) -> bool:
    ref = weight.meta.get("weight") if weight.op == "placeholder" else None
    return ref is not None and math.prod(ref.shape) > WHOLE_WEIGHT


def _row_blocks(ref: WeightRef) -> Iterator[tuple[int, int]]:
    """(first row, end row) of the blocks in which a large weight is read."""
    step = max(1, _BLOCK // math.prod(ref.shape[1:]))
    for start in range(0, ref.shape[0], step):
        yield start, min(start + step, ref.shape[0])


def _embed(op: Embed, ids: Tensor, reader: Reader) -> Tensor:
    """The op `embed`, from the rows that occur."""
    ref: WeightRef = op.weight.meta["weight"]
    wanted, inverse = (ids + op.offset).unique(return_inverse=True)
    rows = []
    for start, stop in _row_blocks(ref):
        inside = wanted[(wanted >= start) & (wanted < stop)]
        if len(inside):
            rows.append(to_float32(ref.read(reader, start, stop))[inside - start])
    result: Tensor = OPS["embed"](inverse, torch.cat(rows), op.scale, 0, op.format.name)
    return result


def _linear(op: Linear, x: Tensor, bias: Tensor | None, residual: Tensor | None, reader: Reader) -> Tensor:
    """The op `linear`, a block of its outputs at a time."""
    ref: WeightRef = op.weight.meta["weight"]
    y = x.new_empty(x.shape[0], ref.shape[0])
    for start, stop in _row_blocks(ref):
        weight = to_float32(ref.read(reader, start, stop)).to(x.dtype)
        parts = (None if t is None else t[..., start:stop] for t in (bias, residual))
        y[:, start:stop] = OPS["linear"](x, weight, *parts, op.act, False, op.format.name)
    return y


def _moe(op: Moe, value: Callable[[fx.Node], Tensor], reader: Reader, watch: Watch | None) -> Tensor:
    """The op `moe`, the matrices of one expert at a time."""
    x = value(op.x)
    up, down = (_rows_of(node.meta["weight"], reader, x.dtype) for node in (op.up, op.down))
    vectors = (None if node is None else value(node) for node in (op.correction, op.up_bias, op.down_bias))
    correction, up_bias, down_bias = vectors

    def watch_both(tokens: Tensor, h: Tensor) -> None:
        if watch is not None:
            watch(op.up, tokens)
            watch(op.down, h)

    return mixture(
        x, value(op.logits), correction, op.router, up, down, up_bias, down_bias, op.down.meta["weight"].shape[1],
        op.act, op.gated, op.format.name, watch_both,
    )  # fmt: skip


def _rows_of(ref: WeightRef, reader: Reader, dtype: torch.dtype) -> Callable[[int, int], Tensor]:
    return lambda start, stop: to_float32(ref.read(reader, start, stop)).to(dtype)
