"""Shapes of every value, by running the graph on the meta device with probe sizes for T, S and R.

The first dimension of an activation is T (R after `select_rows`); every other dimension is a constant of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from llmc.errors import UserError

PROBE_T, PROBE_S, PROBE_R = 7, 2, 3
_INPUT_SIZES = {"tokens": PROBE_T, "positions": PROBE_T, "query_start": PROBE_S + 1, "rows": PROBE_R}


def annotate_shapes(graph: fx.Graph) -> None:
    """Sets meta["shape"] on every node. Raises UserError at a node whose op refuses its operands."""
    env: dict[fx.Node, torch.Tensor] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = _placeholder(node)
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
            try:
                env[node] = node.target(*args, **kwargs)
            except (RuntimeError, TypeError, IndexError) as error:
                reason = str(error).splitlines()[0]
                raise UserError(f"op {node.target} at {node.meta.get('path', '?')}: {reason}") from error
        if node in env:
            node.meta["shape"] = tuple(env[node].shape)
            node.meta["dtype"] = env[node].dtype


def _placeholder(node: fx.Node) -> torch.Tensor:
    if "weight" in node.meta:
        return torch.empty(node.meta["weight"].shape, device="meta")
    if "constant" in node.meta:
        value: Any = node.meta["constant"]
        return torch.empty_like(value, device="meta")
    return torch.empty(_INPUT_SIZES[node.name], dtype=torch.int64, device="meta")
