"""The forms in which a kernel leaves its result for the next one.

"f32"   [rows, LD] float32
"half"  [rows, LD] bfloat16 or float16: the operand of a tensor-core product
"q8"    int8 [rows, LD] with scale and sum [rows, LD / 32] float32 per group of 32: the operand of an integer product

A form is part of a kernel's constants (OUT); `y` points at the values, `ys` and `ysum` at scales and sums.
"""

import triton
import triton.language as tl

from llmc.kernels.triton.numeric import quantize_groups


@triton.jit
def store_tile(value, y, ys, ysum, n, t, N: tl.constexpr, LD: tl.constexpr, num_t, OUT: tl.constexpr):
    """Stores value [BN, BT] (columns first) at columns n [BN] of rows t [BT]; rows >= num_t and columns >= N are left
    out. For "q8", n starts at a multiple of 32 and BN is one; columns from N up to LD become 0."""
    if OUT == "q8":
        BN: tl.constexpr = value.shape[0]
        BT: tl.constexpr = value.shape[1]
        value = tl.where((n < N)[:, None], value, 0.0)
        q, scale, total = quantize_groups(tl.reshape(value, (BN // 32, 32, BT)))
        mask = (n < LD)[:, None] & (t < num_t)[None, :]
        tl.store(y + t[None, :].to(tl.int64) * LD + n[:, None], tl.reshape(q, (BN, BT)), mask=mask)
        g = tl.min(n, axis=0) // 32 + tl.arange(0, BN // 32)
        at = t[None, :].to(tl.int64) * (LD // 32) + g[:, None]
        mask = (g < LD // 32)[:, None] & (t < num_t)[None, :]
        tl.store(ys + at, scale, mask=mask)
        tl.store(ysum + at, total, mask=mask)
    else:
        mask = (n < N)[:, None] & (t < num_t)[None, :]
        tl.store(y + t[None, :].to(tl.int64) * LD + n[:, None], value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def store_row(value, y, ys, ysum, row, N: tl.constexpr, LD: tl.constexpr, OUT: tl.constexpr):
    """Stores one row: value [W] with W a power of two >= N and a multiple of 32."""
    W: tl.constexpr = value.shape[0]
    n = tl.arange(0, W)
    if OUT == "q8":
        value = tl.where(n < N, value, 0.0)
        q, scale, total = quantize_groups(tl.reshape(value, (W // 32, 32, 1)))
        tl.store(y + row.to(tl.int64) * LD + n, tl.reshape(q, (W,)), mask=n < LD)
        g = tl.arange(0, W // 32)
        at = row.to(tl.int64) * (LD // 32) + g
        tl.store(ys + at, tl.reshape(scale, (W // 32,)), mask=g < LD // 32)
        tl.store(ysum + at, tl.reshape(total, (W // 32,)), mask=g < LD // 32)
    else:
        tl.store(y + row.to(tl.int64) * LD + n, value.to(y.dtype.element_ty), mask=n < N)
