"""Shapes of every value, by running ops on the meta device with probe sizes for T, S and R.

The first dimension of an activation is T (R after `select_rows`); every other dimension is a constant of the model.
Layers repeat, so each distinct call (op, operand shapes, constants) is run once per process.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from llmc.errors import UserError

PROBE_T, PROBE_S, PROBE_R = 7, 2, 3
_INPUT_SIZES = {"tokens": PROBE_T, "positions": PROBE_T, "query_start": PROBE_S + 1, "rows": PROBE_R}
_Meta = tuple[tuple[int, ...], torch.dtype]
_KNOWN: dict[str, _Meta] = {}


def annotate_shapes(graph: fx.Graph) -> None:
    """Sets meta["shape"] and meta["dtype"] on every node. Raises UserError at a node whose op refuses its operands."""
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["shape"], node.meta["dtype"] = _placeholder(node)
        elif node.op == "call_function":
            key = f"{node.target}{fx.node.map_arg((node.args, node.kwargs), _describe)}"
            if key not in _KNOWN:
                _KNOWN[key] = _run(node)
            node.meta["shape"], node.meta["dtype"] = _KNOWN[key]


def _describe(node: fx.Node) -> Any:
    return (node.meta["shape"], node.meta["dtype"])


def _run(node: fx.Node) -> _Meta:
    args, kwargs = fx.node.map_arg(
        (node.args, node.kwargs),
        lambda n: torch.empty(n.meta["shape"], dtype=n.meta["dtype"], device="meta"),
    )
    try:
        result = node.target(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"op {node.target} at {node.meta.get('path', '?')}: {reason}") from error
    return tuple(result.shape), result.dtype


def _placeholder(node: fx.Node) -> _Meta:
    if "weight" in node.meta:
        return node.meta["weight"].shape, torch.float32
    if "constant" in node.meta:
        value = node.meta["constant"]
        return tuple(value.shape), value.dtype
    return (_INPUT_SIZES[node.name],), torch.int64
