"""Runs a graph of the dialect (or of what is left of aten on the way to it) in plain torch, one node at a time.

Weights are evaluated from their recipes when a node needs them and dropped after its last use, so that running a
model needs memory for its largest weight and its activations, not for all weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from llmc.kernels.quant import to_float32
from llmc.kernels.weights import Reader


def load(node: fx.Node, reader: Reader) -> Tensor:
    """The value of a weight or constant placeholder."""
    if "constant" in node.meta:
        value: Tensor = node.meta["constant"]
        return value
    return to_float32(node.meta["weight"].read(reader))


def is_weight(node: fx.Node) -> bool:
    """Whether a node is a weight or a constant, i.e. not an input of the step."""
    return node.op == "placeholder" and ("weight" in node.meta or "constant" in node.meta)


def run_graph(graph: fx.Graph, inputs: dict[str, Tensor], reader: Reader, rows_per_run: int = 256) -> Tensor:
    """logits [R, V] for inputs tokens [T], positions [T], query_start [S+1], rows [R] (int64).

    What depends on `rows` (the head) runs for `rows_per_run` rows at a time; see `iter_logits`.
    """
    return torch.cat(list(iter_logits(graph, inputs, reader, rows_per_run)))


@torch.no_grad()
def iter_logits(graph: fx.Graph, inputs: dict[str, Tensor], reader: Reader, rows_per_run: int) -> Any:
    """Yields the logits of `rows` in blocks [<= rows_per_run, V]; everything above the head runs once."""
    rows = inputs["rows"]
    tail = _downstream(graph, "rows")
    env: dict[fx.Node, Any] = {}
    last_use = {a: n for n in graph.nodes for a in n.all_input_nodes}
    for node in graph.nodes:
        if node.op == "placeholder" and not is_weight(node):
            env[node] = inputs.get(node.name)
        elif node.op == "call_function" and node not in tail:
            env[node] = _call(node, env, reader)
            for used in node.all_input_nodes:
                if last_use[used] is node:
                    env.pop(used, None)
    (rows_node,) = [n for n in graph.nodes if n.op == "placeholder" and n.name == "rows"]
    cache: dict[fx.Node, Tensor] = {}
    for block in rows.split(rows_per_run):
        local = dict(env) | {rows_node: block}
        result = None
        for node in graph.nodes:
            if node in tail and node.op == "call_function":
                local[node] = _call(node, local, reader, cache)
            elif node.op == "output":
                value = local[node.args[0]]
                result = value if node.args[0] in tail else value[block]
        yield result


def _downstream(graph: fx.Graph, name: str) -> set[fx.Node]:
    found = {n for n in graph.nodes if n.op == "placeholder" and n.name == name}
    for node in graph.nodes:
        if any(a in found for a in node.all_input_nodes):
            found.add(node)
    return found


def _call(node: fx.Node, env: dict[fx.Node, Any], reader: Reader, cache: dict[fx.Node, Tensor] | None = None) -> Any:
    def value(arg: fx.Node) -> Any:
        if not is_weight(arg):
            return env[arg]
        if cache is None:
            return load(arg, reader)
        if arg not in cache:
            cache[arg] = load(arg, reader)
        return cache[arg]

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    return node.target(*args, **kwargs)
