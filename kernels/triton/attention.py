"""Paged causal attention, for prompts and for single tokens, with one arithmetic.

Rows of a tile are (token, query head) pairs that share a key/value head: BM = 64 rows. Keys come in blocks of 64
positions; each block gives its own maximum, sum and weighted values, and blocks are merged in order
(`merge_softmax`). A prompt's tile walks its blocks itself (FlashAttention-2, Dao 2023); for a single token the blocks
are divided over the GPU and merged by a second kernel (FlashDecoding, Dao et al. 2023). Both run `_attend_block` on
tiles of one shape, so a token's result has the same bits either way, whatever the batch and the chunking.
"""

import triton
import triton.language as tl

from llmc.kernels.triton.numeric import LOG2E, merge_softmax, quantize_groups, tanh

PAGE_SIZE = tl.constexpr(16)  # positions in a page of the pool
BLOCK = tl.constexpr(64)  # key positions in a block: a part of the arithmetic, the same on every GPU
ROWS = tl.constexpr(64)  # rows of a tile


@triton.jit
def _load_kv(pool, scales, slot, inside, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, KEYS: tl.constexpr):
    """Rows `slot` [BLOCK] of a pool as [DP, BLOCK] (keys) or [BLOCK, DP], and their scales; positions outside are 0."""
    d = tl.arange(0, DP)
    if KEYS:
        at, mask = slot[None, :] * D + d[:, None], inside[None, :] & (d < D)[:, None]
    else:
        at, mask = slot[:, None] * D + d[None, :], inside[:, None] & (d < D)[None, :]
    v = tl.load(pool + at, mask=mask, other=0)
    if scales is not None:
        return v.to(HALF), tl.load(scales + slot, mask=inside, other=0)
    else:
        return v, inside


@triton.jit
def _attend_block(q, at, keys, values, key_scales, value_scales, table, kv_head, block, count, HKV: tl.constexpr,
                  D: tl.constexpr, DP: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
                  HALF: tl.constexpr):  # fmt: skip
    """Rows q [ROWS, DP] at positions `at` [ROWS] over one block of keys -> maximum, sum, weighted values."""
    j = block * BLOCK + tl.arange(0, BLOCK)
    inside = j < count
    page = tl.load(table + j // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
    slot = (page * HKV + kv_head) * PAGE_SIZE + j % PAGE_SIZE
    k, k_scale = _load_kv(keys, key_scales, slot, inside, D, DP, HALF, True)
    PRECISION: tl.constexpr = "tf32x3" if tl.float32 == HALF else "ieee"  # of float32 operands
    s = tl.dot(q, k, input_precision=PRECISION)
    if key_scales is not None:
        s = s * k_scale[None, :]
    s = tanh(s * (SCALE / SOFTCAP)) * (SOFTCAP * LOG2E) if SOFTCAP > 0 else s * (SCALE * LOG2E)
    visible = inside[None, :] & (j[None, :] <= at[:, None])
    if WINDOW > 0:
        visible = visible & (j[None, :] > at[:, None] - WINDOW)
    s = tl.where(visible, s, float("-inf"))
    m = tl.max(s, axis=1)
    p = tl.exp2(s - tl.where(m == float("-inf"), 0.0, m)[:, None])
    v, v_scale = _load_kv(values, value_scales, slot, inside, D, DP, HALF, False)
    total = tl.sum(p, axis=1)
    if value_scales is not None:
        p = p * v_scale[None, :]
    return m, total, tl.dot(p.to(v.dtype), v, input_precision=PRECISION)


@triton.jit
def _finish(m, total, acc, sinks, head, inside):
    """The attention output of rows whose running softmax is complete; a sink adds one logit to the denominator."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=inside, other=0) * LOG2E
        m_new = tl.maximum(m, sink)
        scale = tl.exp2(m - m_new)
        total = tl.fma(total, scale, tl.exp2(sink - m_new))
        acc = acc * scale[:, None]
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit
def _store(value, y, ys, ysum, row, inside, D: tl.constexpr, DP: tl.constexpr, OUT: tl.constexpr):
    """value [A, DP] at rows `row` [A] of y seen as [T * HQ, D] (so that heads of a token lie one after the other)."""
    d = tl.arange(0, DP)
    mask = inside[:, None] & (d < D)[None, :]
    at = row[:, None].to(tl.int64) * D + d[None, :]
    if OUT == "q8":
        tl.static_assert(D % 32 == 0, "groups of 32 must not cross heads")
        A: tl.constexpr = value.shape[0]
        q, scale, total = quantize_groups(tl.reshape(tl.trans(value), (DP // 32, 32, A)))
        tl.store(y + at, tl.trans(tl.reshape(q, (DP, A))), mask=mask)
        g = tl.arange(0, DP // 32)
        at = row[None, :].to(tl.int64) * (D // 32) + g[:, None]
        mask = inside[None, :] & (g < D // 32)[:, None]
        tl.store(ys + at, scale, mask=mask)
        tl.store(ysum + at, total, mask=mask)
    else:
        tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)


@triton.jit
def attention_prefill(q, keys, values, key_scales, value_scales, sinks, y, ys, ysum, positions, starts, tiles, tables,
                      meta, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
                      TILES: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
                      OUT: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """Sequences of several tokens. q, y [T, HQ * D]. tiles [meta[TILES], 2]: sequence and first token of each tile of
    ROWS // (HQ / HKV) tokens. Grid: (tiles, HKV)."""
    GROUP: tl.constexpr = HQ // HKV
    if tl.program_id(0) >= tl.load(meta + TILES):
        return
    seq = tl.load(tiles + tl.program_id(0) * 2)
    offset = tl.load(tiles + tl.program_id(0) * 2 + 1)
    start, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    r = tl.arange(0, ROWS)
    token = start + offset + r // GROUP
    inside = (r < ROWS // GROUP * GROUP) & (token < end)
    head = tl.program_id(1) * GROUP + r % GROUP
    d = tl.arange(0, DP)
    row = token * HQ + head
    qv = tl.load(q + row[:, None].to(tl.int64) * D + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0)
    first = tl.load(positions + start) + offset
    last = tl.minimum(first + ROWS // GROUP, tl.load(positions + end - 1) + 1) - 1
    at = tl.where(inside, first + r // GROUP, first)
    table = tables + seq.to(tl.int64) * tl.load(meta + 5)
    lowest = tl.maximum(first - WINDOW + 1, 0) // BLOCK if WINDOW > 0 else 0
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DP), tl.float32)
    for block in range(lowest, last // BLOCK + 1):
        mb, tb, ab = _attend_block(qv, at, keys, values, key_scales, value_scales, table, tl.program_id(1), block,
                                   last + 1, HKV, D, DP, SCALE, WINDOW, SOFTCAP, HALF)  # fmt: skip
        m, total, acc = merge_softmax(m, total, acc, mb, tb, ab)
    _store(_finish(m, total, acc, sinks, head, inside), y, ys, ysum, row, inside, D, DP, OUT)


@triton.jit
def _decode_item(item, decode_blocks, count):
    """The decode sequence that work item `item` belongs to: the last i with decode_blocks[i] <= item."""
    low, high = item * 0, count - 1
    while low < high:
        middle = (low + high + 1) // 2
        after = tl.load(decode_blocks + middle) <= item
        low = tl.where(after, middle, low)
        high = tl.where(after, high, middle - 1)
    return low


@triton.jit
def attention_decode(q, keys, values, key_scales, value_scales, partials, positions, starts, decode_seqs,
                     decode_blocks, tables, meta, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
                     DP: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
                     HALF: tl.constexpr):  # fmt: skip
    """Sequences of one token, first half: each (block of keys, KV head) by itself into partials
    [items, HQ, DP + 2]: weighted values, maximum, sum. Grid: (programs,): each takes every programs-th item."""
    GROUP: tl.constexpr = HQ // HKV
    items, count = tl.load(meta + 4), tl.load(meta + 3)
    stride = tl.load(meta + 5)
    r, d = tl.arange(0, ROWS), tl.arange(0, DP)
    for number in range(tl.program_id(0), items * HKV, tl.num_programs(0)):
        work = tl.full((), number, tl.int32)  # the interpreter loops over Python integers
        item = work // HKV
        kv_head = work % HKV
        i = _decode_item(item, decode_blocks, count)
        block = item - tl.load(decode_blocks + i)
        seq = tl.load(decode_seqs + i)
        token = tl.load(starts + seq)
        position = tl.load(positions + token)
        hidden = block * BLOCK + BLOCK <= position - WINDOW + 1 if WINDOW > 0 else False
        if not hidden:
            head = kv_head * GROUP + r
            inside = r < GROUP
            mask = inside[:, None] & (d < D)[None, :]
            qv = tl.load(q + (token.to(tl.int64) * HQ + head)[:, None] * D + d[None, :], mask=mask, other=0)
            at = tl.zeros((ROWS,), tl.int32) + position
            table = tables + seq.to(tl.int64) * stride
            m, total, acc = _attend_block(qv, at, keys, values, key_scales, value_scales, table, kv_head, block,
                                          position + 1, HKV, D, DP, SCALE, WINDOW, SOFTCAP, HALF)  # fmt: skip
            out = partials + (item.to(tl.int64) * HQ + head) * (DP + 2)
            tl.store(out[:, None] + d[None, :], acc, mask=inside[:, None])
            tl.store(out + DP, m, mask=inside)
            tl.store(out + DP + 1, total, mask=inside)


@triton.jit
def attention_combine(partials, sinks, y, ys, ysum, positions, starts, decode_seqs, decode_blocks, meta,
                      HQ: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, WINDOW: tl.constexpr, OUT: tl.constexpr,
                      STAGES: tl.constexpr):  # fmt: skip
    """Second half: merges the blocks of one head of one sequence in their order. Grid: (D sequences, HQ)."""
    i, head = tl.program_id(0), tl.program_id(1)
    if i >= tl.load(meta + 3):
        return
    token = tl.load(starts + tl.load(decode_seqs + i))
    position = tl.load(positions + token)
    lowest = tl.maximum(position - WINDOW + 1, 0) // BLOCK if WINDOW > 0 else 0
    one = tl.arange(0, 1)
    d = tl.arange(0, DP)
    m = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, DP), tl.float32)
    first = tl.load(decode_blocks + i)
    for block in tl.range(lowest, position // BLOCK + 1, num_stages=STAGES):
        at = partials + ((first + block).to(tl.int64) * HQ + head) * (DP + 2)
        mb, tb = tl.load(at + DP + one), tl.load(at + DP + 1 + one)
        m, total, acc = merge_softmax(m, total, acc, mb, tb, tl.load(at + d)[None, :])
    inside = one >= 0
    value = _finish(m, total, acc, sinks, head + one, inside)
    _store(value, y, ys, ysum, token * HQ + head + one, inside, D, DP, OUT)
