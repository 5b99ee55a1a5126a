"""Rotary position embedding, and keys and values into the paged pool.

Element d pairs with d + ROT/2 (half-split form: GPT-NeoX, Llama), or 2d with 2d + 1 (interleaved: GPT-J, Cohere; Su et
al. 2021).
"""

import triton
import triton.language as tl

from llmc.kernels.triton.attention import PAGE_SIZE
from llmc.kernels.triton.numeric import round_even


@triton.jit
def rope_table(positions, inv_freq, table, meta, ROT: tl.constexpr, W: tl.constexpr, SCALE: tl.constexpr):
    """table [T, ROT] = SCALE * [cos a_0 …, sin a_0 …], a_i = position * inv_freq[i] in float32 as models were trained;
    the functions of that angle in float64, right for any position. W: ROT/2 padded to a power of two. Grid: (T,)."""
    t = tl.program_id(0)
    if t >= tl.load(meta):
        return
    i = tl.arange(0, W)
    inside = i < ROT // 2
    angle = tl.load(positions + t).to(tl.float32) * tl.load(inv_freq + i, mask=inside, other=0)
    angle = angle.to(tl.float64)
    at = table + t.to(tl.int64) * ROT + i
    tl.store(at, tl.cos(angle).to(tl.float32) * SCALE, mask=inside)
    tl.store(at + ROT // 2, tl.sin(angle).to(tl.float32) * SCALE, mask=inside)


@triton.jit
def _rotated(x, table, t, D: tl.constexpr, DP: tl.constexpr, ROT: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The D elements at x, the first ROT of them rotated by row t of the table; [DP] float32, 0 beyond D."""
    d = tl.arange(0, DP)
    v = tl.load(x + d, mask=d < D, other=0)
    if ROT > 0:
        HALF: tl.constexpr = ROT // 2
        turned = d < ROT
        if INTERLEAVED:
            is_first = d % 2 == 0
            other, angle = d ^ 1, d // 2
        else:
            is_first = d < HALF
            other, angle = tl.where(is_first, d + HALF, d - HALF), d % HALF
        partner = tl.load(x + other, mask=turned, other=0)
        cos = tl.load(table + t * ROT + angle, mask=turned, other=1)
        sin = tl.load(table + t * ROT + HALF + angle, mask=turned, other=0)
        v = tl.fma(tl.where(is_first, -partner, partner), sin, v * cos)
    return v


@triton.jit
def rope(x, table, y, meta, D: tl.constexpr, DP: tl.constexpr, ROT: tl.constexpr, INTERLEAVED: tl.constexpr,
         XC: tl.constexpr, LDX: tl.constexpr, LDY: tl.constexpr):  # fmt: skip
    """y [T, H * D] float32: each head of columns XC.. of x rotated. Grid: (T, H)."""
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if t >= tl.load(meta):
        return
    v = _rotated(x + t * LDX + XC + head * D, table, t, D, DP, ROT, INTERLEAVED)
    d = tl.arange(0, DP)
    tl.store(y + t * LDY + head * D + d, v, mask=d < D)


@triton.jit
def _write_kv(v, pool, scales, slot, D: tl.constexpr, DP: tl.constexpr):
    """v [DP] at row `slot` of a pool [pages * heads * PAGE_SIZE, D]; with `scales`, as int8 with amax / 127."""
    d = tl.arange(0, DP)
    if scales is not None:
        amax = tl.max(tl.abs(v), axis=0)
        scale = amax / 127.0 + tl.sum(v - v, axis=0)  # NaN if v holds a NaN or an infinity
        v = tl.where(scale > 0, v / tl.where(scale > 0, scale, 1.0), 0.0)
        v = round_even(tl.minimum(tl.maximum(v, -127.0), 127.0))  # a subnormal scale is far from amax / 127
        tl.store(scales + slot, scale)
    tl.store(pool + slot * D + d, v.to(pool.dtype.element_ty), mask=d < D)


@triton.jit
def rope_kv_write(q, k, v, table, q_out, keys, values, key_scales, value_scales, positions, seqs, tables, meta,
                  HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROT: tl.constexpr,
                  INTERLEAVED: tl.constexpr, QC: tl.constexpr, KC: tl.constexpr, VC: tl.constexpr, LDQ: tl.constexpr,
                  LDK: tl.constexpr, LDV: tl.constexpr):  # fmt: skip
    """Rotates the queries into q_out [T, HQ * D] and writes rotated keys, and values, into the pages of their tokens.

    q, k, v float32: columns QC.., KC.., VC.. of rows of LDQ, LDK, LDV elements. keys, values [pages, HKV, 16, D];
    scales [pages, HKV, 16] for int8 pools. The table is not used if ROT is 0. Grid: (T, HQ + 2 HKV), one head each.
    """
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if t >= tl.load(meta):
        return
    d = tl.arange(0, DP)
    if head < HQ:
        out = _rotated(q + t * LDQ + QC + head * D, table, t, D, DP, ROT, INTERLEAVED)
        tl.store(q_out + (t * HQ + head) * D + d, out.to(q_out.dtype.element_ty), mask=d < D)
    else:
        position = tl.load(positions + t)
        stride = tl.load(meta + 5).to(tl.int64)
        page = tl.load(tables + tl.load(seqs + t) * stride + position // PAGE_SIZE).to(tl.int64)
        if head < HQ + HKV:
            out = _rotated(k + t * LDK + KC + (head - HQ) * D, table, t, D, DP, ROT, INTERLEAVED)
            _write_kv(out, keys, key_scales, (page * HKV + head - HQ) * PAGE_SIZE + position % PAGE_SIZE, D, DP)
        else:
            out = tl.load(v + t * LDV + VC + (head - HQ - HKV) * D + d, mask=d < D, other=0)
            _write_kv(
                out, values, value_scales, (page * HKV + head - HQ - HKV) * PAGE_SIZE + position % PAGE_SIZE, D, DP
            )
