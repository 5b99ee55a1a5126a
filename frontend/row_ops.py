"""Import of ops that work along the row of each token, as routers are made of: softmax, choices, masks.

Their values have the tokens first, without a batch dimension, in the exported graph already. An op with several
results becomes one op for each of them: topk an argsort and a gather, max an amax and an argmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
_PLAIN = {
    aten.sum.dim_IntList: aten.sum.dim_IntList, aten.amax.default: aten.amax.default,
    aten.softmax.int: aten.softmax.int, aten.gather.default: aten.gather.default,
    aten.scatter.value: aten.scatter.value, aten.masked_fill.Scalar: aten.masked_fill.Scalar,
    aten.bitwise_not.default: aten.bitwise_not.default, aten.abs.default: aten.abs.default,
    aten.clamp.default: aten.clamp.default, aten.clamp.Tensor: aten.clamp.Tensor, aten.gt.Scalar: aten.gt.Scalar,
    aten.concat.default: aten.cat.default, aten.zeros_like.default: aten.zeros_like.default,
    aten.expand.default: aten.expand_copy.default,
}  # fmt: skip
"""Ops that are imported as they are, or under the name of their out-of-place form."""
ROW_OPS = {*_PLAIN, aten.topk.default, aten.max.dim}
IN_PLACE = {
    aten.div_.Tensor: aten.div.Tensor, aten.mul_.Tensor: aten.mul.Tensor, aten.add_.Tensor: aten.add.Tensor,
    aten.scatter_.value: aten.scatter.value, aten.masked_fill_.Scalar: aten.masked_fill.Scalar,
}  # fmt: skip
"""Ops that write into their first operand, and those that do not."""


def row_op(graph: fx.Graph, node: fx.Node, operand: Callable[[Any], Any]) -> Any:
    """What the exported `node`, one of ROW_OPS, becomes in `graph`: a node, or for several results a list of nodes.

    operand: what a new node takes for an exported argument. Raises ValueError with the reason when the op does not keep
    to the rows of tokens.
    """
    _check(node)
    target, args = node.target, node.args
    if target is aten.topk.default:
        x, k = operand(args[0]), args[1]
        if len(args) > 3 and not args[3]:
            raise ValueError("it takes the smallest values")
        last = len(node.meta["val"][0].shape) - 1
        order = graph.call_function(aten.argsort.stable, (x,), {"stable": True, "dim": last, "descending": True})
        index = graph.call_function(aten.slice.Tensor, (order, last, 0, k))
        return [graph.call_function(aten.gather.default, (x, last, index)), index]
    if target is aten.max.dim:
        x, dim, keep = operand(args[0]), args[1], len(args) > 2 and args[2]
        return [
            graph.call_function(aten.amax.default, (x, [dim], keep)),
            graph.call_function(aten.argmax.default, (x, dim, keep)),
        ]
    if target is aten.expand.default:
        args = (args[0], [-1, *node.meta["val"].shape[1:]])
    elif target is aten.softmax.int:
        args = args[:2]
    return graph.call_function(_PLAIN[target], fx.node.map_arg(args, operand))


def _check(node: fx.Node) -> None:
    values = [*_tensors(a.meta["val"] for a in node.all_input_nodes), *_tensors([node.meta["val"]])]
    names = [a.name for a in node.target._schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    dims = given.get("dim", [])
    rank = max(value.ndim for value in values)
    if any(int(d) % rank == 0 for d in (dims if isinstance(dims, list | tuple) else [dims])):
        raise ValueError("it works across tokens")
    if any(value.ndim > 1 and isinstance(value.shape[0], int) for value in values):
        raise ValueError("its values do not have the tokens first")
    if given.get("dtype") not in (None, torch.float32):
        raise ValueError(f"it computes in {given['dtype']}")


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [t for v in values for t in (v if isinstance(v, tuple | list) else [v]) if isinstance(t, Tensor)]
