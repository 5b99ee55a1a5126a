"""Kernels that make each row of their result from one row of their inputs: norms, embedding, elementwise.

Buffers are row-major with row strides LD…; a program handles one row (or one head of one row), so that its sums do not
depend on the rest of the step. Grid: (rows,) or (rows, heads). The programs past meta[COUNT] return.
"""

import triton
import triton.language as tl

from llmc.kernels.triton.numeric import activate, tanh
from llmc.kernels.triton.store import store_row


@triton.jit
def norm(x, weight, bias, residual, y, ys, ysum, meta, C: tl.constexpr, W: tl.constexpr, XC: tl.constexpr,
         LDX: tl.constexpr, LDR: tl.constexpr, LDY: tl.constexpr, COUNT: tl.constexpr, KIND: tl.constexpr,
         EPS: tl.constexpr, OUT: tl.constexpr):  # fmt: skip
    """Over the C elements of head program_id(1) in columns XC + head * C of x: "rms" (Zhang and Sennrich 2019) or
    "layer" (Ba et al. 2016), then weight and bias, then + residual. W: C padded to a power of two."""
    row, head = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(meta + COUNT):
        return
    c = tl.arange(0, W)
    inside = c < C
    v = tl.load(x + row.to(tl.int64) * LDX + XC + head * C + c, mask=inside, other=0)
    if KIND == "layer":
        v = tl.where(inside, v - tl.sum(v, axis=0) / C, 0.0)
    v = v * tl.rsqrt(tl.sum(v * v, axis=0) / C + EPS)
    if weight is not None:
        v = v * tl.load(weight + c, mask=inside, other=0)
    if bias is not None:
        v = v + tl.load(bias + c, mask=inside, other=0)
    if residual is not None:
        v = v + tl.load(residual + row.to(tl.int64) * LDR + head * C + c, mask=inside, other=0)
    if OUT == "q8":
        store_row(v, y, ys, ysum, row, C, LDY, OUT)
    else:
        tl.store(y + row.to(tl.int64) * LDY + head * C + c, v.to(y.dtype.element_ty), mask=inside)


@triton.jit
def embed(ids, w, ws, y, meta, K: tl.constexpr, W: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr,
          OFFSET: tl.constexpr, SCALE: tl.constexpr, FORMAT: tl.constexpr):  # fmt: skip
    """y [T, K] float32 = row ids[t] + OFFSET of a repacked weight, times SCALE. W: K padded to a power of two."""
    t = tl.program_id(0)
    if t >= tl.load(meta):
        return
    row = tl.load(ids + t).to(tl.int64) + OFFSET
    k = tl.arange(0, W)
    inside = k < K
    if FORMAT == "w8":
        q = tl.load(w + row * KP + k, mask=inside, other=0).to(tl.float32)
        word = tl.load(ws + (k // 64).to(tl.int64) * ROWS + row, mask=inside, other=0)
        bits = (word >> (k // 32 % 2 * 16)) & 0xFFFF
        v = q * bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    elif FORMAT == "w4":
        byte = tl.load(w + row * (KP // 2) + k // 64 * 32 + k % 32, mask=inside, other=0).to(tl.int32)
        u = (byte >> (k // 32 % 2 * 4)) & 15
        word = tl.load(ws + (k // 32).to(tl.int64) * ROWS + row, mask=inside, other=0)
        scale = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        low = ((word >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        v = tl.fma(u.to(tl.float32), scale, low)
    else:
        v = tl.load(w + row * KP + k, mask=inside, other=0).to(tl.float32)
    tl.store(y + t.to(tl.int64) * K + k, v * SCALE, mask=inside)


@triton.jit
def convert(x, y, ys, ysum, meta, C: tl.constexpr, W: tl.constexpr, XC: tl.constexpr, LDX: tl.constexpr,
            LDY: tl.constexpr, COUNT: tl.constexpr, OUT: tl.constexpr):  # fmt: skip
    """Columns XC … XC + C of x into another form; W: C padded to a power of two, at least 32."""
    row = tl.program_id(0)
    if row >= tl.load(meta + COUNT):
        return
    c = tl.arange(0, W)
    v = tl.load(x + row.to(tl.int64) * LDX + XC + c, mask=c < C, other=0)
    store_row(v, y, ys, ysum, row, C, LDY, OUT)


@triton.jit
def elementwise(a, b, y, meta, C: tl.constexpr, AC: tl.constexpr, BC: tl.constexpr, LDA: tl.constexpr,
                LDB: tl.constexpr, COUNT: tl.constexpr, KIND: tl.constexpr, ACT: tl.constexpr, VALUE: tl.constexpr,
                BLOCK: tl.constexpr):  # fmt: skip
    """y [rows, C] float32 from columns AC.. of a and BC.. of b. KIND: "act", "gated_act", "add", "mul", "scale",
    "softcap" as in the dialect. Grid: (rows, ceil(C / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(meta + COUNT):
        return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < C
    v = tl.load(a + row * LDA + AC + c, mask=inside, other=0)
    if KIND == "act":
        v = activate(v, ACT)
    elif KIND == "scale":
        v = v * VALUE
    elif KIND == "softcap":
        v = VALUE * tanh(v / VALUE)
    else:
        other = tl.load(b + row * LDB + BC + c, mask=inside, other=0)
        if KIND == "gated_act":
            v = activate(v, ACT) * other
        elif KIND == "add":
            v = v + other
        else:
            tl.static_assert(KIND == "mul", "unknown elementwise kernel")
            v = v * other
    tl.store(y + row * C + c, v, mask=inside)


@triton.jit
def select_rows(x, rows, y, meta, C: tl.constexpr, XC: tl.constexpr, LDX: tl.constexpr, BLOCK: tl.constexpr):
    """y [R, C] = columns XC.. of rows `rows` of x. Grid: (R, ceil(C / BLOCK))."""
    r = tl.program_id(0)
    if r >= tl.load(meta + 1):
        return
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(rows + r).to(tl.int64)
    v = tl.load(x + source * LDX + XC + c, mask=c < C, other=0)
    tl.store(y + r.to(tl.int64) * C + c, v, mask=c < C)
