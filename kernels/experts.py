"""A mixture of experts as the frontend exports it, before its router is known: two ops besides the dialect's.

    llmc_experts::up(x, index, weight, bias, transposed)                    [T, K] -> [T, top_k, N]
    llmc_experts::down(h, index, weights, weight, bias, transposed)         [T, top_k, N] -> [T, K]

Between them stand the activation, or gate and activation, as ordinary ops; before them the router, which makes index
[T, top_k] (int64) and weights [T, top_k]. weight is a stack [E, N, K] of matrices, transposed [E, K, N]; bias [E, N].
passes/experts.py makes one `moe` of all that. As the dialect's, the ops run in plain torch, so that passes can be
checked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIB = torch.library.Library("llmc_experts", "DEF")
_LIB.define("up(Tensor x, Tensor index, Tensor weight, Tensor? bias, bool transposed) -> Tensor")
_LIB.define("down(Tensor h, Tensor index, Tensor weights, Tensor weight, Tensor? bias, bool transposed) -> Tensor")


def _products(rows: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """rows [T, top_k, K] times the matrices of their experts, one expert at a time."""
    n = weight.shape[2] if transposed else weight.shape[1]
    y = rows.new_empty(*rows.shape[:2], n)
    for e in range(0 if y.is_meta else len(weight)):
        chosen = index == e
        matrix = weight[e].T if transposed else weight[e]
        y[chosen] = torch.nn.functional.linear(rows[chosen], matrix, None if bias is None else bias[e])
    return y


def _up(x: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    return _products(x[:, None].expand(-1, index.shape[1], -1), index, weight, bias, transposed)


def _down(h: Tensor, index: Tensor, weights: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    return (_products(h, index, weight, bias, transposed) * weights[..., None]).sum(1)


_LIB.impl("up", _up, "CompositeExplicitAutograd")
_LIB.impl("down", _down, "CompositeExplicitAutograd")
UP: Any = torch.ops.llmc_experts.up.default
DOWN: Any = torch.ops.llmc_experts.down.default
