"""Matrix products y = act(x W^T + b) (+ residual), for few tokens and for many.

A program makes BN outputs of BT tokens. The weights are the left operand of the tensor core ("swapped": tokens are
the narrow side), so that one instruction family serves every batch size and its sums over K run in the same order: a
token's outputs do not depend on how many tokens the step has, nor on BN and BT.

W8A8, W4A8: int8 x int8, exact integer sums over a group of 32, then acc = fma(sum, w_scale * x_scale, acc) group by
group, as kernels/cpu/dot.h does; W4A8 then adds fma(minimum, x_scale * x_sum, acc). WIDEN multiplies the same integers
as 16-bit floats into a float32 sum, which is exact too (32 * 127 * 127 < 2^24): for tensor cores that have no integer
mode.
W8A16, W4A16: weights are widened to the activations' type in registers. F32, BF16: as they are stored.
"""

import triton
import triton.language as tl

from llmc.kernels.triton.numeric import activate
from llmc.kernels.triton.store import store_tile


@triton.jit
def _integer_dot(w, x, WIDEN: tl.constexpr, HALF: tl.constexpr):
    """w [BN, 32], x [32, BT] int8 -> their exact product as float32."""
    if WIDEN:
        return tl.dot(w.to(HALF), x.to(HALF), out_dtype=tl.float32)
    return tl.dot(w, x, out_dtype=tl.int32).to(tl.float32)


@triton.jit
def _half_of(word, HIGH: tl.constexpr):
    """One of the two float16 in a 32-bit word, as float32."""
    bits = (word >> 16) if HIGH else word
    return (bits & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _add_group(acc, d, scale, xs):
    return tl.fma(d, scale[:, None] * xs[None, :], acc)


@triton.jit
def _w8_pair(acc, wp, word, xa, xb, sa, sb, WIDEN: tl.constexpr, HALF: tl.constexpr):
    """Two groups of 32; `word` [BN] holds both scales."""
    acc = _add_group(acc, _integer_dot(tl.load(wp), xa, WIDEN, HALF), _half_of(word, False), sa)
    return _add_group(acc, _integer_dot(tl.load(wp + 32), xb, WIDEN, HALF), _half_of(word, True), sb)


@triton.jit
def _w4_pair(acc, both, word_a, word_b, xa, xb, sa, sb, ta, tb, WIDEN: tl.constexpr, HALF: tl.constexpr):
    """Two groups of 32, whose nibbles share bytes; a word holds scale and minimum: value = scale * u + minimum.
    ta, tb: scale * sum of the inputs."""
    acc = _add_group(acc, _integer_dot((both & 15).to(tl.int8), xa, WIDEN, HALF), _half_of(word_a, False), sa)
    acc = tl.fma(tl.broadcast_to(_half_of(word_a, True)[:, None], acc.shape), ta[None, :], acc)
    acc = _add_group(acc, _integer_dot((both >> 4).to(tl.int8), xb, WIDEN, HALF), _half_of(word_b, False), sb)
    return tl.fma(tl.broadcast_to(_half_of(word_b, True)[:, None], acc.shape), tb[None, :], acc)


@triton.jit
def _integer(acc, up, w, ws, x, xs, xsum, n, t, num_t, N_ROWS: tl.constexpr, ROWS: tl.constexpr, KP: tl.constexpr,
             LDX: tl.constexpr, BITS: tl.constexpr, GATED: tl.constexpr, WIDEN: tl.constexpr, HALF: tl.constexpr,
             STAGES: tl.constexpr):  # fmt: skip
    """W8A8 and W4A8. The inputs are padded to 32 along K, the weights to 64."""
    GX: tl.constexpr = LDX // 32
    BYTES: tl.constexpr = 64 * BITS // 8  # of a pair of groups
    WORDS: tl.constexpr = 1 if BITS == 8 else 2
    LDW: tl.constexpr = KP * BITS // 8
    k = tl.arange(0, 32)
    row = tl.minimum(n, N_ROWS - 1)
    wp = w + row[:, None].to(tl.int64) * LDW + k[None, :]
    up_wp = wp + N_ROWS * LDW
    xp = x + t[None, :].to(tl.int64) * LDX + k[:, None]
    at = t.to(tl.int64) * GX
    known = n < N_ROWS
    for pair in tl.range(0, KP // 64, num_stages=STAGES):
        first, second = t < num_t, (t < num_t) & (pair * 2 + 1 < GX)
        xa = tl.load(xp + pair * 64, mask=first[None, :], other=0)
        xb = tl.load(xp + pair * 64 + 32, mask=second[None, :], other=0)
        sa = tl.load(xs + at + pair * 2, mask=first, other=0)
        sb = tl.load(xs + at + pair * 2 + 1, mask=second, other=0)
        words = ws + pair * WORDS * ROWS + n
        if BITS == 8:
            acc = _w8_pair(acc, wp + pair * BYTES, tl.load(words, mask=known, other=0), xa, xb, sa, sb, WIDEN, HALF)
            if GATED:
                word = tl.load(words + N_ROWS, mask=known, other=0)
                up = _w8_pair(up, up_wp + pair * BYTES, word, xa, xb, sa, sb, WIDEN, HALF)
        else:
            ta = sa * tl.load(xsum + at + pair * 2, mask=first, other=0)
            tb = sb * tl.load(xsum + at + pair * 2 + 1, mask=second, other=0)
            word_a, word_b = tl.load(words, mask=known, other=0), tl.load(words + ROWS, mask=known, other=0)
            both = tl.load(wp + pair * BYTES)
            acc = _w4_pair(acc, both, word_a, word_b, xa, xb, sa, sb, ta, tb, WIDEN, HALF)
            if GATED:
                word_a = tl.load(words + N_ROWS, mask=known, other=0)
                word_b = tl.load(words + N_ROWS + ROWS, mask=known, other=0)
                both = tl.load(up_wp + pair * BYTES)
                up = _w4_pair(up, both, word_a, word_b, xa, xb, sa, sb, ta, tb, WIDEN, HALF)
    return acc, up


@triton.jit
def _widened_pair(acc, wp, words, known, xa, xb, ROWS: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr):
    word = tl.load(words, mask=known, other=0)
    if BITS == 8:
        a = tl.load(wp).to(tl.float32) * _half_of(word, False)[:, None]
        b = tl.load(wp + 32).to(tl.float32) * _half_of(word, True)[:, None]
    else:
        both = tl.load(wp)
        word_b = tl.load(words + ROWS, mask=known, other=0)
        a = (both & 15).to(tl.float32) * _half_of(word, False)[:, None] + _half_of(word, True)[:, None]
        b = (both >> 4).to(tl.float32) * _half_of(word_b, False)[:, None] + _half_of(word_b, True)[:, None]
    PRECISION: tl.constexpr = "tf32x3" if tl.float32 == HALF else "ieee"  # of float32 operands
    acc = tl.dot(a.to(HALF), xa, acc, input_precision=PRECISION)
    return tl.dot(b.to(HALF), xb, acc, input_precision=PRECISION)


@triton.jit
def _widened(acc, up, w, ws, x, n, t, num_t, N_ROWS: tl.constexpr, ROWS: tl.constexpr, KP: tl.constexpr,
             K: tl.constexpr, LDX: tl.constexpr, BITS: tl.constexpr, GATED: tl.constexpr, HALF: tl.constexpr,
             STAGES: tl.constexpr):  # fmt: skip
    """W8A16 and W4A16."""
    BYTES: tl.constexpr = 64 * BITS // 8
    WORDS: tl.constexpr = 1 if BITS == 8 else 2
    LDW: tl.constexpr = KP * BITS // 8
    k = tl.arange(0, 32)
    row = tl.minimum(n, N_ROWS - 1)
    wp = w + row[:, None].to(tl.int64) * LDW + k[None, :]
    xp = x + t[None, :].to(tl.int64) * LDX + k[:, None]
    inside = (t < num_t)[None, :]
    known = n < N_ROWS
    for pair in tl.range(0, KP // 64, num_stages=STAGES):
        k0 = pair * 64
        xa = tl.load(xp + k0, mask=inside & (k0 + k < K)[:, None], other=0)
        xb = tl.load(xp + k0 + 32, mask=inside & (k0 + 32 + k < K)[:, None], other=0)
        words = ws + pair * WORDS * ROWS + n
        acc = _widened_pair(acc, wp + pair * BYTES, words, known, xa, xb, ROWS, BITS, HALF)
        if GATED:
            at = wp + N_ROWS * LDW + pair * BYTES
            up = _widened_pair(up, at, words + N_ROWS, known, xa, xb, ROWS, BITS, HALF)
    return acc, up


@triton.jit
def _floating(acc, up, w, x, n, t, num_t, N_ROWS: tl.constexpr, KP: tl.constexpr, K: tl.constexpr, LDX: tl.constexpr,
              GATED: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    tl.static_assert(KP % BK == 0, "BK must divide KP: rows of the weight are read in whole blocks")
    PRECISION: tl.constexpr = "tf32x3" if w.dtype.element_ty == tl.float32 else "ieee"  # of float32 operands
    k = tl.arange(0, BK)
    wp = w + tl.minimum(n, N_ROWS - 1)[:, None].to(tl.int64) * KP + k[None, :]
    xp = x + t[None, :].to(tl.int64) * LDX + k[:, None]
    inside = (t < num_t)[None, :]
    for k0 in tl.range(0, KP, BK, num_stages=STAGES):
        xv = tl.load(xp + k0, mask=inside & (k0 + k < K)[:, None], other=0)
        acc = tl.dot(tl.load(wp + k0), xv, acc, input_precision=PRECISION)
        if GATED:
            up = tl.dot(tl.load(wp + N_ROWS * KP + k0), xv, up, input_precision=PRECISION)
    return acc, up


@triton.jit
def linear(x, xs, xsum, w, ws, bias, residual, y, ys, ysum, meta, N: tl.constexpr, K: tl.constexpr,
           LDX: tl.constexpr, LDR: tl.constexpr, LDY: tl.constexpr, ROWS: tl.constexpr, KP: tl.constexpr,
           COUNT: tl.constexpr, FORMAT: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, OUT: tl.constexpr,
           HALF: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, WIDEN: tl.constexpr,
           STAGES: tl.constexpr):  # fmt: skip
    """y [T, N] from x [T, K] and the repacked weight [ROWS, KP] (kernels/triton/repack.py).

    ROWS: N padded to 16, twice that if gated (gate rows, then up rows). LDX, LDR, LDY: row strides of x, the residual
    and y in elements. meta[COUNT] is the number of tokens. xs, xsum: scales and sums of a "q8" x. ws: words of two
    float16, [KP / 64, ROWS] scales of two groups (w8) or [KP / 32, ROWS] scale and minimum (w4).
    Grid: (ceil(T / BT), ceil(N / BN)); the tokens come first, so that neighbours read the same weights.
    """
    num_t = tl.load(meta + COUNT)
    if tl.program_id(0) * BT >= num_t:
        return
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    N_ROWS: tl.constexpr = ROWS // 2 if GATED else ROWS
    BITS: tl.constexpr = 4 if FORMAT == "w4" or FORMAT == "w4a16" else 8
    acc = tl.zeros((BN, BT), tl.float32)
    up = tl.zeros((BN, BT), tl.float32) if GATED else acc
    if FORMAT == "w8" or FORMAT == "w4":
        acc, up = _integer(acc, up, w, ws, x, xs, xsum, n, t, num_t, N_ROWS, ROWS, KP, LDX, BITS, GATED, WIDEN, HALF,
                           STAGES)  # fmt: skip
    elif FORMAT == "w8a16" or FORMAT == "w4a16":
        acc, up = _widened(acc, up, w, ws, x, n, t, num_t, N_ROWS, ROWS, KP, K, LDX, BITS, GATED, HALF, STAGES)
    else:
        acc, up = _floating(acc, up, w, x, n, t, num_t, N_ROWS, KP, K, LDX, GATED, BK, STAGES)
    inside = n < N
    if bias is not None:
        acc += tl.load(bias + n, mask=inside, other=0)[:, None]
        if GATED:
            up += tl.load(bias + N + n, mask=inside, other=0)[:, None]
    acc = activate(acc, ACT)
    if GATED:
        acc = acc * up
    if residual is not None:
        at = residual + t[None, :].to(tl.int64) * LDR + n[:, None]
        acc += tl.load(at, mask=inside[:, None] & (t < num_t)[None, :], other=0)
    store_tile(acc, y, ys, ysum, n, t, N, LDY, num_t, OUT)
