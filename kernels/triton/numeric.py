"""Scalar functions that several kernels share: activations, rounding, quantisation of a group, the softmax merge."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds a small float32 to the nearest integer, ties to even
_INV_SQRT2 = tl.constexpr(0.7071067811865476)
_SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
_GELU_CUBIC = tl.constexpr(0.044715)


@triton.jit
def tanh(x):
    """tanh of float32, from exp: exact at 0 and saturating without overflow."""
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def activate(x, ACT: tl.constexpr):
    """An activation of the dialect (ACTIVATIONS in kernels/dialect.py) on float32."""
    if ACT == "silu":
        x = x / (1.0 + tl.exp(-x))
    elif ACT == "gelu":
        x = 0.5 * x * (1.0 + tl.math.erf(x * _INV_SQRT2))
    elif ACT == "gelu_tanh":
        x = 0.5 * x * (1.0 + tanh((x + x * x * x * _GELU_CUBIC) * _SQRT_2_OVER_PI))
    elif ACT == "relu":
        x = tl.where(x < 0, 0.0, x)  # keeps NaN, unlike a maximum
    elif ACT == "relu2":
        x = tl.where(x < 0, 0.0, x)
        x = x * x
    elif ACT == "tanh":
        x = tanh(x)
    elif ACT == "sigmoid":
        x = 1.0 / (1.0 + tl.exp(-x))
    else:
        tl.static_assert(ACT == "none", "unknown activation")
    return x


@triton.jit
def round_even(x):
    """The nearest integer as float32, ties to even; |x| < 2^22."""
    return (x + _ROUND) - _ROUND


@triton.jit
def quantize_groups(x):
    """x [A, 32, B] float32 -> int8 [A, 32, B], scale and sum of the group [A, B] float32.

    As kernels/cpu/quantize.h: scale = amax / 127, and NaN if the group holds a NaN or an infinity.
    """
    amax = tl.max(tl.abs(x), axis=1)
    not_finite = tl.sum(x - x, axis=1)  # 0 or NaN
    scale = tl.math.div_rn(amax, tl.full(amax.shape, 127.0, tl.float32)) + not_finite
    divisor = tl.where(scale > 0, scale, 1.0)
    v = tl.math.div_rn(x, tl.broadcast_to(divisor[:, None, :], x.shape))
    v = tl.where(scale[:, None, :] > 0, tl.minimum(tl.maximum(v, -127.0), 127.0), 0.0)
    q = round_even(v)
    return q.to(tl.int8), scale, tl.sum(q, axis=1)


@triton.jit
def merge_softmax(m, total, acc, m_block, total_block, acc_block):
    """Adds a block of keys to a running softmax (Dao et al. 2022, in base 2); rows of both with m = -inf are empty.

    Every kernel merges through this one function, in the order of the blocks, so that the same row gets the same bits
    whether a whole prompt or one token is computed. Products and sums are fused explicitly: the compiler has no choice.
    """
    m_new = tl.maximum(m, m_block)
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    old, new = tl.exp2(m - base), tl.exp2(m_block - base)
    total = tl.fma(total, old, total_block * new)
    acc = tl.fma(acc, tl.broadcast_to(old[:, None], acc.shape), acc_block * new[:, None])
    return m_new, total, acc
