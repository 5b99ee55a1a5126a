"""Norms.

x * rsqrt(mean(x^2) + eps) [* w]  ->  llmc.rms_norm(x, w, eps)      (the root may be a power of -0.5)
the same of x - mean(x)  ->  llmc.layer_norm(x, w, None, eps)
aten.layer_norm over the last dimension  ->  llmc.layer_norm(x, w, b, eps)
"""

from __future__ import annotations

from typing import Any

from torch import fx

from llmc.kernels.ops import LayerNorm, RmsNorm
from llmc.passes.match import (
    arguments,
    aten,
    calls,
    commuted,
    is_call,
    is_vector,
    only_user,
    replace_with,
    scalar,
    shape,
)
from llmc.passes.result import PassContext, PassResult


def run(graph: fx.Graph, ctx: PassContext) -> PassResult:
    count, skipped = 0, []
    for node in calls(graph, aten.rsqrt.default, aten.pow.Tensor_Scalar):
        if node.target is aten.pow.Tensor_Scalar and node.args[1] != -0.5:
            continue
        found = _mean_of_squares(node.args[0])
        if found is None:
            skipped.append((node.name, "the root is not of a mean of squares over the last dimension"))
            continue
        x, eps = found
        product = only_user(node)
        source = _centred(x)
        if product is None or not _scales(product, node, x, source):
            skipped.append((node.name, "the root does not scale the value that it was taken from"))
            continue
        weight, last, user = None, product, only_user(product)
        if user is not None and is_call(user, aten.mul.Tensor):
            weight = next((b for a, b in commuted(user) if a is product and is_vector(b)), None)
            last = user if weight is not None else product
        replace_with(last, RmsNorm(x, weight, eps) if source is None else LayerNorm(source, weight, None, eps))
        count += 1
    for node in calls(graph, aten.layer_norm.default):
        norm = arguments(node)
        if list(norm["normalized_shape"]) != [shape(norm["input"])[-1]]:
            skipped.append((node.name, "it normalises over more than the last dimension"))
            continue
        replace_with(node, LayerNorm(norm["input"], norm["weight"], norm["bias"], norm["eps"]))
        count += 1
    return PassResult(count, skipped)


def _scales(product: fx.Node, root: fx.Node, x: fx.Node, source: fx.Node | None) -> bool:
    """Whether a product is of the root and of x, or of x computed again (source, centred)."""
    if not is_call(product, aten.mul.Tensor):
        return False
    others = [b for a, b in commuted(product) if a is root]
    return any(b is x or (source is not None and _centred(b) is source) for b in others)


def _centred(node: Any) -> fx.Node | None:
    """x of x - mean(x) over the last dimension."""
    if not is_call(node, aten.sub.Tensor) or not is_call(node.args[1], aten.mean.dim):
        return None
    x, mean = node.args
    return x if mean.args[0] is x and list(mean.args[1]) == [len(shape(x)) - 1] else None


def _mean_of_squares(node: Any) -> tuple[fx.Node, float] | None:
    """(x, eps) of add(mean(pow(x, 2), last, keepdim), eps)."""
    if not is_call(node, aten.add.Tensor):
        return None
    mean, eps = node.args[0], scalar(node.args[1])
    if eps is None or not is_call(mean, aten.mean.dim) or not is_call(mean.args[0], aten.pow.Tensor_Scalar):
        return None
    x, exponent = mean.args[0].args
    return (x, eps) if exponent == 2 and list(mean.args[1]) == [len(shape(x)) - 1] else None
