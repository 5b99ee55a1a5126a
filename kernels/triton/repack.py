"""Weights from the plan's layout (kernels/pack.py: tiles of 16 rows, as the CPU reads them) to the GPU's, once at load.

So a plan for CPU and GPU holds every weight once. On the device a matrix is row-major [ROWS, KP] with KP = K padded to
64 by zeros; ROWS is N padded to 16, and a gated pair is all gate rows, then all up rows.

w8     int8 [ROWS, KP]; words [KP / 64, ROWS]: the float16 scales of groups 2 i (low half) and 2 i + 1 (high half)
w4     bytes [ROWS, KP / 2]: byte b of pair i has element b of group 2 i (low nibble) and of group 2 i + 1 (high);
       words [KP / 32, ROWS]: float16 scale (low half) and minimum (high half)
f32, bf16  values [ROWS, KP] in the type of `w`

Each program moves one tile of 16 rows and BK columns, or the words of all groups in BK of them. Grid:
(ROWS / 16, ceil(KP / BK)).
"""

import triton
import triton.language as tl


@triton.jit
def _rows(N_ROWS: tl.constexpr, GATED: tl.constexpr):
    """The device rows [16] of the tile that this program moves: gate and up tiles alternate in the plan."""
    tile = tl.program_id(0)
    first = (tile % 2) * N_ROWS + tile // 2 * 16 if GATED else tile * 16
    return first + tl.arange(0, 16)


@triton.jit
def repack_w8(source, w, K32: tl.constexpr, KP: tl.constexpr, N_ROWS: tl.constexpr, GATED: tl.constexpr,
              BK: tl.constexpr):  # fmt: skip
    """source uint8 [ROWS / 16][K32 / 4][16][4], q + 128 -> w int8 [ROWS, KP]. K32: K padded to 32."""
    row = _rows(N_ROWS, GATED)[:, None].to(tl.int64)
    k = (tl.program_id(1) * BK + tl.arange(0, BK))[None, :]
    lane = tl.arange(0, 16)[:, None]
    at = source + tl.program_id(0).to(tl.int64) * (K32 * 16) + k // 4 * 64 + lane * 4 + k % 4
    q = tl.load(at, mask=k < K32, other=128)
    tl.store(w + row * KP + k, (q ^ 128).to(tl.int8, bitcast=True), mask=k < KP)


@triton.jit
def repack_w4(source, w, K32: tl.constexpr, KP: tl.constexpr, N_ROWS: tl.constexpr, GATED: tl.constexpr,
              BK: tl.constexpr):  # fmt: skip
    """source bytes [ROWS / 16][K32 / 32][4][16][4], elements j and 16 + j of a group in one -> w [ROWS, KP / 2]."""
    row = _rows(N_ROWS, GATED)[:, None].to(tl.int64)
    byte = (tl.program_id(1) * (BK // 2) + tl.arange(0, BK // 2))[None, :]
    lane = tl.arange(0, 16)[:, None]
    element, group = byte % 32, byte // 32 * 2
    base = source + tl.program_id(0).to(tl.int64) * (K32 // 2 * 16)
    inner = (element % 16) // 4 * 64 + lane * 4 + element % 4
    shift = element // 16 * 4
    low = tl.load(base + group * 256 + inner, mask=group * 32 < K32, other=0)
    high = tl.load(base + (group + 1) * 256 + inner, mask=(group + 1) * 32 < K32, other=0)
    both = ((low.to(tl.int32) >> shift) & 15) | (((high.to(tl.int32) >> shift) & 15) << 4)
    tl.store(w + row * (KP // 2) + byte, both.to(tl.uint8), mask=byte < KP // 2)


@triton.jit
def repack_words(low, high, words, K32: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr, N_ROWS: tl.constexpr,
                 GATED: tl.constexpr, PAIRS: tl.constexpr, BG: tl.constexpr):  # fmt: skip
    """float16 bits [ROWS / 16][K32 / 32][16] -> words. PAIRS: a word holds low[2 i] and low[2 i + 1] (w8; `high` is
    not used), else low[i] and high[i] (w4). Grid: (ROWS / 16, ceil(words of a row / BG))."""
    row = _rows(N_ROWS, GATED)[None, :]
    i = (tl.program_id(1) * BG + tl.arange(0, BG))[:, None]
    lane = tl.arange(0, 16)[None, :]
    G: tl.constexpr = K32 // 32
    COUNT: tl.constexpr = KP // 64 if PAIRS else KP // 32
    base = tl.program_id(0).to(tl.int64) * (G * 16) + lane
    if PAIRS:
        a = tl.load(low + base + i * 32, mask=2 * i < G, other=0)
        b = tl.load(low + base + i * 32 + 16, mask=2 * i + 1 < G, other=0)
    else:
        a = tl.load(low + base + i * 16, mask=i < G, other=0)
        b = tl.load(high + base + i * 16, mask=i < G, other=0)
    word = (a.to(tl.int32) & 0xFFFF) | (b.to(tl.int32) << 16)
    tl.store(words + i.to(tl.int64) * ROWS + row, word, mask=i < COUNT)


@triton.jit
def repack_float(source, w, K: tl.constexpr, KP: tl.constexpr, N_ROWS: tl.constexpr, GATED: tl.constexpr,
                 FORMAT: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """source [ROWS / 16][K][16], float32 or bfloat16 bits as int16 -> w [ROWS, KP]."""
    row = _rows(N_ROWS, GATED)[:, None].to(tl.int64)
    k = (tl.program_id(1) * BK + tl.arange(0, BK))[None, :]
    lane = tl.arange(0, 16)[:, None]
    value = tl.load(source + tl.program_id(0).to(tl.int64) * (K * 16) + k * 16 + lane, mask=k < K, other=0)
    if FORMAT == "bf16":
        value = (value.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    tl.store(w + row * KP + k, value.to(w.dtype.element_ty), mask=k < KP)
