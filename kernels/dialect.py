"""The llmc dialect: the closed set of ops that a lowered graph consists of, each with its schema, shape rule and
reference implementation in plain torch.

Activations are tokens-major and ragged: [T, …] with T all tokens of a step, of all sequences; no batch dimension, no
padding. After `select_rows` the first dimension is R, the rows to sample. Because every op has a reference, the graph
runs in PyTorch at every stage; that is how passes are checked and backends are tested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmc.kernels.formats import find_format
from llmc.kernels.quant import fake_quantize, fake_quantize_activations
from llmc.kernels.routing import Router, mix, route

_LIB = torch.library.Library("llmc", "DEF")
OPS: dict[str, Any] = {}
"""Every op of the dialect by name, e.g. OPS["rms_norm"] is torch.ops.llmc.rms_norm.default."""

ACTIVATIONS = {
    "none": lambda x: x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),  # So et al. 2021
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


_SCORES_AT_ONCE = 1 << 22
"""Attention scores that the reference holds at once (16 MiB): a block of queries, whatever the sequence's length."""


def _op(schema: str) -> Any:
    """Registers a function as reference *and* shape rule of an op; a name can be registered once."""

    def register(fn: Any) -> Any:
        name = schema.split("(", 1)[0]
        if name in OPS:
            raise ValueError(f"dialect op {name} is registered twice")
        _LIB.define(schema)
        _LIB.impl(name, fn, "CompositeExplicitAutograd")
        OPS[name] = getattr(torch.ops.llmc, name).default
        return fn

    return register


def _shapes(op: str, **wanted: tuple[Tensor | None, Sequence[int]]) -> None:
    """Raises ValueError naming the first tensor that has not the shape that an op needs beside its others."""
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{op}: {name} is {list(tensor.shape)}, and must be {list(shape)}")


@_op("embed(Tensor ids, Tensor weight, float scale, int offset, str format) -> Tensor")
def embed(ids: Tensor, weight: Tensor, scale: float, offset: int, format: str) -> Tensor:
    """ids [T] int, weight [V, C] -> weight[ids + offset] * scale, [T, C], through the stored format."""
    if ids.is_meta:
        return weight.new_empty(ids.shape[0], weight.shape[1])
    rows = fake_quantize(weight[ids + offset], find_format(format))
    return rows * scale if scale != 1.0 else rows


@_op("linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str act, bool gated, str format) -> Tensor")
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    act: str,
    gated: bool,
    format: str,
) -> Tensor:
    """x [T, K], weight [N, K] (gated: [2N, K], gate rows then up rows) -> [T, N].

    y = act(x W^T + b), gated: act(gate) * up; then + residual. `format` names how the weight is stored and multiplied
    (kernels/formats.py); formats with integer products quantise activations per token and group of 32.
    """
    n = weight.shape[0] // (2 if gated else 1)
    if x.is_meta or weight.is_meta:
        _shapes("linear", x=(x, (x.shape[0], weight.shape[1])), bias=(bias, weight.shape[:1]))
        _shapes("linear", residual=(residual, (x.shape[0], n)))
        return x.new_empty(x.shape[0], n)
    how = find_format(format)
    if how.integer_products:
        x = fake_quantize_activations(x)
    y = F.linear(x, fake_quantize(weight, how), bias)
    y = ACTIVATIONS[act](y[:, :n]) * y[:, n:] if gated else ACTIVATIONS[act](y)
    return y if residual is None else y + residual


@_op(
    "moe(Tensor x, Tensor logits, Tensor? correction, Tensor up, Tensor? up_bias, Tensor down, Tensor? down_bias, "
    "str scores, int top_k, int groups, int top_groups, int group_best, bool normalise, float floor, float eps, "
    "float scale, str act, bool gated, str format) -> Tensor"
)
def moe(
    x: Tensor,
    logits: Tensor,
    correction: Tensor | None,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    scores: str,
    top_k: int,
    groups: int,
    top_groups: int,
    group_best: int,
    normalise: bool,
    floor: float,
    eps: float,
    scale: float,
    act: str,
    gated: bool,
    format: str,
) -> Tensor:
    """A mixture of E experts (Shazeer et al. 2017): x [T, K], logits [T, E] -> [T, K].

    The router (kernels/routing.py) chooses top_k experts of each token, and the results of those are added with its
    weights. An expert is down(act(up(x))), gated down(act(gate(x)) * up(x)), as `linear` computes with `format`. The
    matrices of all are one: up [E N, K], gated [2 E N, K], the gates of all experts before the ups of all; down
    [E K, N]. up_bias [E N], gated [E 2 N], expert by expert, its gate first; down_bias [E K]; correction [E].
    """
    router = Router(scores, top_k, groups, top_groups, group_best, normalise, floor, eps, scale)
    experts, k = logits.shape[1], x.shape[1]
    if x.is_meta or up.is_meta:
        router.check(experts)
        n, sides = down.shape[1], 2 if gated else 1
        _shapes("moe", logits=(logits, (x.shape[0], experts)), correction=(correction, (experts,)))
        _shapes("moe", up=(up, (sides * experts * n, k)), up_bias=(up_bias, (sides * experts * n,)))
        _shapes("moe", down=(down, (experts * k, n)), down_bias=(down_bias, (experts * k,)))
        return x.new_empty(x.shape)
    matrices = (lambda lo, hi: up[lo:hi]), (lambda lo, hi: down[lo:hi])
    return mixture(x, logits, correction, router, *matrices, up_bias, down_bias, down.shape[1], act, gated, format)


def mixture(
    x: Tensor,
    logits: Tensor,
    correction: Tensor | None,
    router: Router,
    up: Callable[[int, int], Tensor],
    down: Callable[[int, int], Tensor],
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    n: int,
    act: str,
    gated: bool,
    format: str,
    watch: Callable[[Tensor, Tensor], None] = lambda tokens, h: None,
) -> Tensor:
    """The op `moe` with matrices that are functions of (first row, end row): only the rows of experts that have tokens
    are asked for, one expert at a time. n: the width of an expert. watch: told the inputs of both products of each."""
    experts, k, sides = logits.shape[1], x.shape[1], 2 if gated else 1

    def expert(e: int, tokens: Tensor) -> Tensor:
        rows = [up((side * experts + e) * n, (side * experts + e + 1) * n) for side in range(sides)]
        bias = None if up_bias is None else up_bias[e * sides * n : (e + 1) * sides * n]
        h = linear(tokens, torch.cat(rows), bias, None, act, gated, format)
        watch(tokens, h)
        bias = None if down_bias is None else down_bias[e * k : (e + 1) * k]
        return linear(h, down(e * k, (e + 1) * k), bias, None, "none", False, format)

    return mix(x, *route(logits, correction, router), experts, expert)


@_op("rms_norm(Tensor x, Tensor? weight, float eps) -> Tensor")
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [T, …, C], over the last dimension (Zhang & Sennrich 2019)."""
    _shapes("rms_norm", weight=(weight, x.shape[-1:]))
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


@_op("rms_norm_add(Tensor x, Tensor residual, Tensor? weight, float eps) -> Tensor")
def rms_norm_add(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """rms_norm(x, weight, eps) + residual (models that normalise what a block adds: Gemma 2, OLMo 2)."""
    _shapes("rms_norm_add", residual=(residual, x.shape))
    return rms_norm(x, weight, eps) + residual


@_op("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor")
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x [T, …, C], over the last dimension (Ba et al. 2016)."""
    _shapes("layer_norm", weight=(weight, x.shape[-1:]), bias=(bias, x.shape[-1:]))
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


@_op("rope_table(Tensor positions, Tensor inv_freq, float scale) -> Tensor")
def rope_table(positions: Tensor, inv_freq: Tensor, scale: float) -> Tensor:
    """positions [T], inv_freq [ROT/2] -> [T, ROT]: cos(p f) * scale, then sin(p f) * scale."""
    angle = (positions.to(torch.float32)[:, None] * inv_freq).double()  # whose sines are the same on every machine
    return torch.cat([angle.cos(), angle.sin()], -1).to(torch.float32) * scale


@_op("rope(Tensor x, Tensor table, bool interleaved) -> Tensor")
def rope(x: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    """x [T, H, D], table [T, ROT] -> rotates pairs of the first ROT dims of every head (Su et al. 2021); the rest
    passes through. Pairs are i and i + ROT/2 (half-split: Llama), or 2i and 2i + 1 (interleaved: GPT-J, Cohere)."""
    rot = table.shape[1]
    cos, sin = table[:, None, : rot // 2], table[:, None, rot // 2 :]
    turned, rest = x[..., :rot], x[..., rot:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.split(rot // 2, -1)
    pair = [a * cos - b * sin, b * cos + a * sin]
    return torch.cat([torch.stack(pair, -1).flatten(-2), rest] if interleaved else [*pair, rest], -1)


@_op(
    "attention(Tensor q, Tensor k, Tensor v, Tensor positions, Tensor query_start, Tensor? sinks, float scale, "
    "int window, float softcap, int layer) -> Tensor"
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    query_start: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    layer: int,
) -> Tensor:
    """Causal grouped-query attention over ragged sequences that start at their first token (the paged cache is the
    backend's). q [T, HQ, D], k and v [T, HKV, D], query_start [S+1] -> [T, HQ, D]. Positions within a sequence are
    consecutive.

    Key j is visible to query i when i - window < j <= i (window 0: no lower bound). softcap c > 0 replaces a score s
    by c tanh(s / c). sinks [HQ] add one logit per head to the softmax denominator.
    """
    out = torch.empty_like(q)
    if q.is_meta:
        return out
    for lo, hi in pairwise(query_start.tolist()):
        if not softcap and sinks is None:
            out[lo:hi] = _fused_attention(q[lo:hi], k[lo:hi], v[lo:hi], positions[lo:hi], scale, window)
            continue
        step = max(1, _SCORES_AT_ONCE // max(1, q.shape[1] * (hi - lo)))
        for start in range(lo, hi, step):
            stop = min(start + step, hi)
            first = max(lo, start - window + 1) if window else lo  # no query of the block sees an earlier key
            keys = slice(first, stop)
            out[start:stop] = _attend(
                q[start:stop], k[keys], v[keys], positions[start:stop], positions[keys], sinks, scale, window, softcap
            )
    return out


def _fused_attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float, window: int) -> Tensor:
    """Attention of one sequence by torch's own op, which holds no scores and takes a fifth of the time. A window
    costs a mask."""
    qs, ks, vs = (t.transpose(0, 1)[None] for t in (q, k, v))
    visible = None
    if window:
        delta = positions[:, None] - positions[None, :]
        visible = (delta >= 0) & (delta < window)
    y = F.scaled_dot_product_attention(qs, ks, vs, visible, is_causal=not window, scale=scale, enable_gqa=True)
    return y[0].transpose(0, 1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Attention of a block of queries [B, HQ, D] of one sequence over keys and values [K, HKV, D]."""
    groups = q.shape[1] // k.shape[1]
    qs, ks, vs = (t.transpose(0, 1) for t in (q, k, v))
    ks, vs = ks.repeat_interleave(groups, 0), vs.repeat_interleave(groups, 0)
    s = (qs @ ks.transpose(1, 2)).mul_(scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    delta = query_positions[:, None] - key_positions[None, :]
    s.masked_fill_((delta < 0) | (delta >= window) if window else delta < 0, float("-inf"))
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(-1, s.shape[1], 1)], -1)
    p = s.softmax(-1)[..., : len(k)]
    return (p @ vs).transpose(0, 1)


@_op("act(Tensor x, str kind) -> Tensor")
def act(x: Tensor, kind: str) -> Tensor:
    """Elementwise activation; see ACTIVATIONS."""
    return ACTIVATIONS[kind](x).clone()


@_op("gated_act(Tensor gate, Tensor up, str kind) -> Tensor")
def gated_act(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """act(gate) * up (Shazeer 2020, GLU variants)."""
    return ACTIVATIONS[kind](gate) * up


@_op("add(Tensor a, Tensor b) -> Tensor")
def add(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise sum of equal shapes."""
    return a + b


@_op("mul(Tensor a, Tensor b) -> Tensor")
def mul(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise product of equal shapes."""
    return a * b


@_op("row_gate(Tensor x, Tensor gate, str kind) -> Tensor")
def row_gate(x: Tensor, gate: Tensor, kind: str) -> Tensor:
    """x [T, C] * act(gate), gate [T, 1]: one factor for each row (Qwen2-MoE's shared expert)."""
    _shapes("row_gate", gate=(gate, (x.shape[0], 1)))
    return x * ACTIVATIONS[kind](gate)


@_op("scale(Tensor x, float value) -> Tensor")
def scale(x: Tensor, value: float) -> Tensor:
    """x * value."""
    return x * value


@_op("softcap(Tensor x, float cap) -> Tensor")
def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) (Gemma 2)."""
    return cap * torch.tanh(x / cap)


@_op("select_rows(Tensor x, Tensor rows) -> Tensor")
def select_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [T, C], rows [R] -> [R, C]."""
    return x.new_empty(rows.shape[0], *x.shape[1:]) if x.is_meta else x[rows]
