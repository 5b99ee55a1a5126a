"""From rows of logits to tokens, with the meaning that kernels/cpu/sampling.h defines.

sample_stats looks at all raw rows with many programs, adjust_logits writes the rows that have a mask, biases or
penalties anew, and sample_rows turns a row into a token with one program: no row's result depends on another row.

There is no sort. The order (z descending, then id ascending) is that of an integer: the bits of |z| = (max - l) / T,
the *key*. A cut (top_k, top_p, the draw) is the smallest key for which the entries with at most that key are many or
heavy enough; a pass over the entries tries 8 keys at once (_measure), and the next pass tries 8 in between. After the
first passes over a row few entries are left: they are copied to a list in the row's scratch memory, and the rest of
the work is on that list. Entries of one key have one weight, so that a cut within them is a division.

Sums of weights are float32, added up by position modulo BLOCK and then in the tree of tl.sum: every term is
non-negative, so that they ascend with the key whatever the rounding. What is computed from them is float64.
"""

import triton
import triton.language as tl

from llmc.kernels.triton.philox import philox_uniform

MAX_CHUNKS = tl.constexpr(64)  # of a row in `stats`
_SAMPLING_WORDS = tl.constexpr(16)  # of RowSampling in kernels/cpu/abi.h
_INF = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(3.4028234663852886e38)
_LAST_KEY = tl.constexpr(0x42D00000)  # of |z| = 104, where exp(z) has left float32
_DEAD = tl.constexpr(0x7F800000)  # key of an entry without weight
_FIRST_KEYS = tl.constexpr(0x40000000)  # of |z| = 2; adding _HALF_OCTAVE gives 3, 4, 6, 8, 12, 16
_HALF_OCTAVE = tl.constexpr(0x00400000)
_LOWEST_ALLOWED = tl.constexpr(-1e30)
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-52)


def stats_chunk(vocab: int) -> int:
    """The CHUNK that sample_stats and sample_rows need: a power of two that cuts a row in at most 64 pieces."""
    return max(256, triton.next_power_of_2(triton.cdiv(vocab, MAX_CHUNKS.value)))


@triton.jit
def _clean(x):
    """Makes every logit comparable: NaN counts as -inf, +inf as the largest float."""
    return tl.where(x == x, tl.minimum(x, _LARGEST), -_INF)


@triton.jit
def _float(word):
    """The float32 in a 32-bit word."""
    return tl.load(word).to(tl.float32, bitcast=True)


@triton.jit
def sample_stats(logits, stats, meta, V: tl.constexpr, CHUNK: tl.constexpr):
    """stats [MR, 128] float32 of raw logits [R, V]: per chunk of CHUNK ids the largest logit, and from word 64 on the
    sum of exp(logit - largest). Grid: (R, ceil(V / CHUNK))."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    if row >= tl.load(meta + 1):
        return
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _clean(tl.load(logits + row.to(tl.int64) * V + i, mask=i < V, other=-_INF))
    largest = tl.max(x)
    total = tl.sum(tl.exp(x - tl.where(largest == -_INF, 0.0, largest)))
    at = stats + row * (2 * MAX_CHUNKS) + chunk
    tl.store(at, largest)
    tl.store(at + MAX_CHUNKS, total)


@triton.jit
def _adjusted(s):
    """Whether a row has penalties, biases or a mask."""
    return tl.load(s + 7) + tl.load(s + 8) + tl.load(s + 14) > 0


@triton.jit
def _masked(x, i, s, extra, meta, V: tl.constexpr):
    """Logits x of ids i, as the row's mask allows them."""
    words = extra + tl.load(meta + 13) + tl.load(s + 15)
    word = tl.load(words + (i >> 5), mask=i < V, other=0)
    return tl.where(((word >> (i & 31)) & 1) != 0, tl.maximum(x, _LOWEST_ALLOWED), -_INF)


@triton.jit
def _biased(x, i, s, extra, meta):
    """Logits x of ids i plus the biases of the row, one after the other: an id may have several."""
    at = tl.load(s + 10)
    tokens, values = extra + tl.load(meta + 11) + at, extra + tl.load(meta + 12) + at
    for k in range(tl.load(s + 8)):
        token = tl.load(tokens + k)
        x = tl.where(i == token, x + _float(values + k), x)
    return x


@triton.jit
def _penalise(row, begin, end, s, extra, meta, BLOCK: tl.constexpr):
    """Applies the penalties of the ids in [begin, end) to a row in memory; the ids are distinct."""
    repetition, presence, frequency = _float(s + 3), _float(s + 4), _float(s + 5)
    num, at = tl.load(s + 7), tl.load(s + 9)
    tokens, counts = extra + tl.load(meta + 9) + at, extra + tl.load(meta + 10) + at
    for start in range(0, num, BLOCK):
        k = start + tl.arange(0, BLOCK)
        token = tl.load(tokens + k, mask=k < num, other=-1)
        here = (token >= begin) & (token < end)
        count = tl.load(counts + k, mask=here, other=0)
        x = tl.load(row + token, mask=here, other=0)
        x = tl.where(x > 0, tl.math.div_rn(x, tl.full(x.shape, repetition, tl.float32)), x * repetition)
        # The product in float64 is exact, so that it is rounded once as on the CPU and not fused with the difference.
        often = (frequency.to(tl.float64) * count.to(tl.float64)).to(tl.float32)
        tl.store(row + token, tl.where(count > 0, x - presence - often, x), mask=here)


@triton.jit
def adjust_logits(logits, adjusted, sampling, extra, meta, V: tl.constexpr, BLOCK: tl.constexpr):
    """adjusted [R, V] float32 = the rows of logits that have a mask, biases or penalties, with these applied; other
    rows are left alone. Grid: (R, ceil(V / BLOCK)); a program makes BLOCK ids."""
    row = tl.program_id(0)
    if row >= tl.load(meta + 1):
        return
    s = sampling + row * _SAMPLING_WORDS
    if not _adjusted(s):
        return
    begin = tl.program_id(1) * BLOCK
    i = begin + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * V
    x = _clean(tl.load(logits + at + i, mask=i < V, other=-_INF))
    if tl.load(s + 14) > 0:
        x = _masked(x, i, s, extra, meta, V)
    tl.store(adjusted + at + i, _biased(x, i, s, extra, meta), mask=i < V)
    if tl.load(s + 7) > 0:
        tl.debug_barrier()  # the penalties read what other threads have written
        _penalise(adjusted + at, begin, tl.minimum(begin + BLOCK, V), s, extra, meta, BLOCK)


@triton.jit
def _row_stats(stats, V: tl.constexpr, CHUNK: tl.constexpr):
    """Of a raw row: its largest logit, the first chunk that has it, the logarithm of the sum of exp(l - largest)."""
    c = tl.arange(0, MAX_CHUNKS)
    known = c < (V + CHUNK - 1) // CHUNK
    largest = tl.load(stats + c, mask=known, other=-_INF)
    total = tl.load(stats + MAX_CHUNKS + c, mask=known, other=0)
    top = tl.max(largest)
    chunk = tl.min(tl.where(largest == top, c, MAX_CHUNKS))
    weight = tl.exp(largest - tl.where(top == -_INF, 0.0, top))
    return top, chunk, tl.log(tl.sum(total * weight))


@triton.jit
def _largest(source, V: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.full((BLOCK,), -_INF, tl.float32)
    for start in range(0, V, BLOCK):
        i = start + tl.arange(0, BLOCK)
        lanes = tl.maximum(lanes, _clean(tl.load(source + i, mask=i < V, other=-_INF)))
    return tl.max(lanes)


@triton.jit
def _first_at_least(source, begin, end, value, V: tl.constexpr, BLOCK: tl.constexpr):
    """The lowest id in [begin, end) whose logit is at least `value`; V if there is none."""
    lanes = tl.full((BLOCK,), V, tl.int32)
    for start in range(begin, end, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = _clean(tl.load(source + i, mask=i < end, other=float("nan")))
        lanes = tl.minimum(lanes, tl.where((x >= value) & (i < end), i, V))
    return tl.min(lanes)


@triton.jit
def _weigh(entries, i):
    """Key and weight of entries i; without weight (too small, dropped by min_p, past the end) they are _DEAD and 0.

    entries: (source, num, top, temperature, min_p), logits `source` [num] whose z is (logit - top) / temperature.
    """
    source, num, top, temperature, min_p = entries
    x = _clean(tl.load(source + i, mask=i < num, other=-_INF))
    distance = tl.abs(tl.math.div_rn(x - top, tl.full(x.shape, temperature, tl.float32)))
    key = distance.to(tl.int32, bitcast=True)
    weight = tl.exp(-distance)
    alive = (key <= _LAST_KEY) & (weight > 0) & (weight >= min_p)
    return tl.where(alive, key, _DEAD), tl.where(alive, weight, 0.0)


@triton.jit
def _weight_of(key):
    return tl.exp(-(key.to(tl.float32, bitcast=True)))


@triton.jit
def _measure(entries, keys, BLOCK: tl.constexpr):
    """Count [8] int32 and weight [8] float32 of the entries whose key is at most keys [8]."""
    count = tl.zeros((8, BLOCK), tl.int32)
    mass = tl.zeros((8, BLOCK), tl.float32)
    for start in range(0, entries[1], BLOCK):
        key, weight = _weigh(entries, start + tl.arange(0, BLOCK))
        inside = key[None, :] <= keys[:, None]
        count += inside.to(tl.int32)
        mass += tl.where(inside, weight[None, :], 0.0)
    return tl.sum(count, axis=1), tl.sum(mass, axis=1)


@triton.jit
def _narrow(cut, keys, count, mass, by_count, needed):
    """The part of a cut between two of the keys that were measured."""
    low, high, count_low, count_high, mass_low = cut
    reached = tl.where(by_count, count.to(tl.float32), mass) >= needed
    low = tl.maximum(low, tl.max(tl.where(reached, -1, keys)))
    high = tl.minimum(high, tl.min(tl.where(reached, keys, _DEAD)))
    count_low = tl.maximum(count_low, tl.max(tl.where(reached, 0, count)))
    count_high = tl.minimum(count_high, tl.min(tl.where(reached, count, count_high)))
    mass_low = tl.maximum(mass_low, tl.max(tl.where(reached, 0.0, mass)))
    return low, high, count_low, count_high, mass_low


@triton.jit
def _search(entries, cut, by_count, needed, STOP: tl.constexpr, BLOCK: tl.constexpr):
    """Narrows a cut until at most STOP entries are up to its high end, or between its ends are only entries of one key.

    cut: (low, high, count_low, count_high, mass_low). The entries with key <= low do not reach `needed` (their number
    if by_count, else their weight; float32), those with key <= high do.
    """
    low, high, count_low, count_high, mass_low = cut
    while (high - low > 1) & (count_high - count_low > 1) & (count_high > STOP):
        # low < first and keys[7] < high, so that the gap shrinks to an eighth or to nothing.
        step = (high - low + 6) // 8
        keys = tl.minimum(low + 1 + step * tl.arange(0, 8), high - 1)
        count, mass = _measure(entries, keys, BLOCK)
        low, high, count_low, count_high, mass_low = _narrow(
            (low, high, count_low, count_high, mass_low), keys, count, mass, by_count, needed
        )
    return low, high, count_low, count_high, mass_low


@triton.jit
def _last_key(entries, low, high, BLOCK: tl.constexpr):
    """The largest key in (low, high] that an entry has."""
    lanes = tl.full((BLOCK,), -1, tl.int32)
    for start in range(0, entries[1], BLOCK):
        key, _ = _weigh(entries, start + tl.arange(0, BLOCK))
        lanes = tl.maximum(lanes, tl.where((key > low) & (key <= high), key, -1))
    return tl.max(lanes)


@triton.jit
def _smallest_float32(x, ABOVE: tl.constexpr):
    """The smallest float32 that is at least x (above x, if ABOVE); x >= 0 is float64."""
    near = x.to(tl.float32)
    enough = near.to(tl.float64) > x if ABOVE else near.to(tl.float64) >= x
    return tl.where(enough, near, (near.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True))


@triton.jit
def _ties_needed(missing, weight, most, ABOVE: tl.constexpr):
    """How many entries of one weight weigh at least (ABOVE: more than) `missing` float64; in [1, most]."""
    ratio = missing / weight.to(tl.float64)
    whole = tl.minimum(ratio, most.to(tl.float64)).to(tl.int32)  # towards zero
    more = whole.to(tl.float64) <= ratio if ABOVE else whole.to(tl.float64) < ratio
    return tl.maximum(tl.minimum(whole + more.to(tl.int32), most), 1)


@triton.jit
def _cut_mass(entries, prefix, target, ABOVE: tl.constexpr, BLOCK: tl.constexpr):
    """The shortest part of a prefix that weighs at least (ABOVE: more than) `target` float64, as a prefix.

    A prefix is (low, key, ties, count_low, mass_low): the entries with key <= low, and the first `ties` of those with
    `key`, which is the next one.
    """
    low, key, ties, count_low, mass_low = prefix
    needed = _smallest_float32(target, ABOVE)
    if mass_low >= needed:
        cut = _search(entries, (low * 0 - 1, low, count_low * 0, count_low, mass_low * 0), False, needed, 0, BLOCK)
        low, high, count_low, count_high, mass_low = cut
        key = _last_key(entries, low, high, BLOCK)
        ties = count_high - count_low
    ties = _ties_needed(target - mass_low.to(tl.float64), _weight_of(key), ties, ABOVE)
    return low, key, ties, count_low, mass_low


@triton.jit
def _prefix_mass(prefix):
    _, key, ties, _, mass_low = prefix
    return mass_low.to(tl.float64) + ties.to(tl.float64) * _weight_of(key).to(tl.float64)


@triton.jit
def _nth_of_key(entries, key, n, BLOCK: tl.constexpr):
    """Position of the n-th entry with `key`, counted from 1."""
    num = entries[1]
    start = num * 0
    before = n * 0
    same = (_weigh(entries, tl.arange(0, BLOCK))[0] == key).to(tl.int32)
    here = tl.sum(same)
    while (before + here < n) & (start + BLOCK < num):
        before += here
        start += BLOCK
        same = (_weigh(entries, start + tl.arange(0, BLOCK))[0] == key).to(tl.int32)
        here = tl.sum(same)
    found = (tl.cumsum(same) == n - before) & (same > 0)
    return start + tl.min(tl.where(found, tl.arange(0, BLOCK), BLOCK - 1))


@triton.jit
def _compact(entries, last, scratch, CAPACITY: tl.constexpr, BLOCK: tl.constexpr):
    """Copies the entries with key <= last, of which there are at most CAPACITY, in their order: z to scratch [CAPACITY]
    and ids behind it. scratch may be where the entries are: it is within the first BLOCK of them."""
    num = last * 0
    for start in range(0, entries[1], BLOCK):
        i = start + tl.arange(0, BLOCK)
        key, _ = _weigh(entries, i)
        keep = key <= last
        at = num + tl.cumsum(keep.to(tl.int32)) - 1
        tl.debug_barrier()  # every thread has read its part of the first block
        tl.store(scratch + at, -(key.to(tl.float32, bitcast=True)), mask=keep)
        tl.store(scratch + CAPACITY + at, i.to(tl.float32, bitcast=True), mask=keep)
        num += tl.sum(keep.to(tl.int32))
    tl.debug_barrier()  # what comes next reads the list
    return num


@triton.jit
def _choose(entries, high, total, top_k, top_p, u, BLOCK: tl.constexpr):
    """Position of the sampled entry among those with key <= high. top_k: 0 is off. total: the weight before top_p where
    top_k is off, float64."""
    count, mass = _measure(entries, high + tl.zeros((8,), tl.int32), BLOCK)
    count_high, mass_high = tl.max(count), tl.max(mass)
    # Everything: no ties, and `key` says nothing.
    low, key, ties, count_low, mass_low = high, high, count_high * 0, count_high, mass_high
    if (top_k > 0) & (top_k < count_high):
        cut = (high * 0 - 1, high, count_high * 0, count_high, mass_high * 0)
        low, end, count_low, _, mass_low = _search(entries, cut, True, top_k.to(tl.float32), 0, BLOCK)
        key = _last_key(entries, low, end, BLOCK)
        ties = top_k - count_low
    if top_p < 1.0:
        prefix = (low, key, ties, count_low, mass_low)
        weight = _prefix_mass(prefix)
        # Sums over the row and over the list are rounded differently: never ask for more than there is.
        target = tl.minimum(top_p.to(tl.float64) * tl.where(top_k > 0, weight, total), weight)
        low, key, ties, count_low, mass_low = _cut_mass(entries, prefix, target, False, BLOCK)
    prefix = (low, key, ties, count_low, mass_low)
    weight = _prefix_mass(prefix)
    target = tl.minimum(u * weight, weight * _BELOW_ONE)
    _, key, ties, _, _ = _cut_mass(entries, prefix, target, True, BLOCK)
    return _nth_of_key(entries, key, ties, BLOCK)


@triton.jit
def _sample_filtered(source, top, temperature, min_p, top_k, top_p, u, scratch, V: tl.constexpr, BLOCK: tl.constexpr):
    """The sampled id of a row with min_p, top_k or top_p: in the order (z descending, id ascending)."""
    CAPACITY: tl.constexpr = (V if V < BLOCK else BLOCK) // 2
    entries = (source, V, top, temperature, min_p)
    lane = tl.arange(0, 8)
    keys = tl.where(lane < 7, _FIRST_KEYS + lane * _HALF_OCTAVE, _LAST_KEY)
    count, mass = _measure(entries, keys, BLOCK)
    alive, total = tl.max(count), tl.max(mass)
    if top_k >= alive:
        top_k = top_k * 0
    # A high end that leaves out nothing that could be kept.
    by_count = (top_k > 0) | (top_p >= 1.0)
    wanted = tl.where(top_k > 0, top_k, alive).to(tl.float32)
    needed = tl.where(by_count, wanted, _smallest_float32(top_p.to(tl.float64) * total.to(tl.float64), False))
    cut = (alive * 0 - 1, alive * 0 + _LAST_KEY, alive * 0, alive, total * 0)
    cut = _narrow(cut, keys, count, mass, by_count, needed)
    _, high, _, kept, _ = _search(entries, cut, by_count, needed, CAPACITY, BLOCK)
    num, compact = V, kept <= CAPACITY
    if compact:
        num = _compact(entries, high, scratch, CAPACITY, BLOCK)
        source, top, temperature = scratch, 0.0, 1.0
    at = _choose((source, num, top, temperature, min_p), high, total.to(tl.float64), top_k, top_p, u, BLOCK)
    if compact:
        at = tl.load(scratch + CAPACITY + at).to(tl.int32, bitcast=True)
    return at


@triton.jit
def _sample_by_id(source, top, temperature, u, V: tl.constexpr, BLOCK: tl.constexpr):
    """The sampled id of a row without filters: ids ascending, first by blocks, then within the block."""
    entries = (source, V, top, temperature, 0.0)
    i = tl.arange(0, BLOCK)
    total = u * 0
    for start in range(0, V, BLOCK):
        total += tl.sum(_weigh(entries, start + i)[1]).to(tl.float64)
    target = tl.minimum(u * total, total * _BELOW_ONE)
    start = 0
    before = u * 0
    weight = _weigh(entries, i)[1]
    here = tl.sum(weight).to(tl.float64)
    while (before + here <= target) & (start + BLOCK < V):
        before += here
        start += BLOCK
        weight = _weigh(entries, start + i)[1]
        here = tl.sum(weight).to(tl.float64)
    reached = before + tl.cumsum(weight).to(tl.float64) > target
    first = tl.min(tl.where(reached & (weight > 0), i, BLOCK))
    last = tl.max(tl.where(weight > 0, i, 0))  # it takes what rounding leaves
    return start + tl.minimum(first, last)


@triton.jit
def _sample(source, top, chunk, s, position, scratch, V: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """The sampled id of a row whose largest logit is `top`; with temperature 0 only ids of `chunk` are looked at (of
    all of the row, if it is negative)."""
    temperature, top_p, min_p, top_k = _float(s), _float(s + 1), _float(s + 2), tl.load(s + 6)
    if (temperature == 0.0) | (top == -_INF):
        begin = tl.where(chunk < 0, 0, chunk * CHUNK)
        end = tl.where(chunk < 0, V, tl.minimum(begin + CHUNK, V))
        token = _first_at_least(source, begin, end, top, V, BLOCK)
    else:
        u = philox_uniform(tl.load(s + 12), tl.load(s + 13), position)
        if top_k >= V:
            top_k = 0
        if (min_p > 0.0) | (top_p < 1.0) | (top_k > 0):
            token = _sample_filtered(source, top, temperature, min_p, top_k, top_p, u, scratch, V, BLOCK)
        else:
            token = _sample_by_id(source, top, temperature, u, V, BLOCK)
    return token


@triton.jit
def sample_rows(logits, adjusted, stats, sampling, positions, rows, out_tokens, out_logprobs, meta, V: tl.constexpr,
                CHUNK: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """A token and its log-probability (under the softmax of the raw row) of every row of logits [R, V].

    stats: what sample_stats left, with the same CHUNK. adjusted [R, V]: what adjust_logits left; it is overwritten.
    Grid: (R,).
    """
    row = tl.program_id(0)
    if row >= tl.load(meta + 1):
        return
    s = sampling + row * _SAMPLING_WORDS
    raw, scratch = logits + row.to(tl.int64) * V, adjusted + row.to(tl.int64) * V
    raw_top, chunk, log_total = _row_stats(stats + row * (2 * MAX_CHUNKS), V, CHUNK)
    token, logprob = 0, raw_top  # -inf, if all of the row is
    if (raw_top > -_INF) | (tl.load(s + 14) > 0):
        source, top = raw, raw_top
        if _adjusted(s):
            source, chunk = scratch, -1
            top = _largest(source, V, BLOCK)
        position = tl.load(positions + tl.load(rows + row)) + 1
        token = _sample(source, top, chunk, s, position, scratch, V, CHUNK, BLOCK)
        if raw_top > -_INF:
            logprob = _clean(tl.load(raw + token)) - raw_top - log_total
    tl.store(out_tokens + row, token)
    tl.store(out_logprobs + row, logprob)
