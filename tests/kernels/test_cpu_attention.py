"""Paged attention: against float64, and bit for bit across chunking, batching, page placement and threads."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_batch import make_batch
from cpu_harness import PORTABLE, V3, Unit, aligned_bytes, checked, new_mat, require

SHAPES = {"gqa": (6, 2, 64), "mha": (2, 2, 16), "mqa": (5, 1, 24), "wide": (20, 1, 8)}
KINDS = ("f32", "bf16", "int8")
WRAPPERS = "".join(
    f"""
EXPORT void write_{name}_{kv}(Par p, const Batch& b, Mat k, Mat v, uint8_t* pool) {{
  kv_write<{hkv}, {d}, Kv::{kv}>(p, b, k, v, pool); }}
EXPORT void attend_{name}_{kv}(Par p, const Batch& b, Mat q, uint8_t* pool, float scale, int window,
                               float cap, const float* sinks, Mat out) {{
  attention<{hq}, {hkv}, {d}, Kv::{kv}>(p, b, q, pool, AttentionParams{{scale, window, cap, sinks}}, out); }}
EXPORT void share_{name}_{kv}(Par p, const Batch& b, Mat q, uint8_t* pool, float scale, int window, float cap,
                              const float* sinks, Mat out, void* memory, int size, int* shared, int half) {{
  Attention<{hq}, {hkv}, {d}, Kv::{kv}> work{{b, q, pool, {{scale, window, cap, sinks}}, out, {{memory, size}}}};
  *shared = work.shares_rows(p.nt);
  if (half == 0) work.attend(p, *shared); else if (*shared) work.merge(p); }}
EXPORT long long page_bytes_{name}_{kv}() {{ return kv_page_bytes<{hkv}, {d}, Kv::{kv}>(); }}
"""
    for name, (hq, hkv, d) in SHAPES.items()
    for kv in KINDS
    if kv == "f32" or name in ("gqa", "mqa")
)


@pytest.fixture(scope="module", params=[PORTABLE, V3])
def unit(request):
    return Unit(WRAPPERS, require(request.param))


class Sequences:
    """Whole sequences of random q, k, v, attended to step by step through a pool that starts full of NaN."""

    def __init__(self, unit, name, kv, lengths, seed, pages=None):
        self.unit, self.name, self.kv = unit, name, kv
        self.hq, self.hkv, self.d = SHAPES[name]
        rngs = [np.random.default_rng((seed, i)) for i in range(len(lengths))]

        def random(heads):
            shapes = [(n, heads * self.d) for n in lengths]
            return [r.standard_normal(shape).astype(np.float32) for r, shape in zip(rngs, shapes, strict=True)]

        self.q, self.k, self.v = random(self.hq), random(self.hkv), random(self.hkv)
        need = [-(-n // 16) for n in lengths]
        order = np.random.default_rng(seed if pages is None else pages).permutation(sum(need) + 3)
        self.tables = np.split(order[: sum(need)].astype(np.int32), np.cumsum(need)[:-1])
        size = unit.call(f"page_bytes_{name}_{kv}") * (sum(need) + 3)
        self.pool = np.full(size, 0xFF, np.uint8)  # NaN as float32 and as bfloat16; -1 with scales of NaN
        self.out = [np.full((n, self.hq * self.d), np.nan, np.float32) for n in lengths]
        self.done = [0] * len(lengths)

    def step(self, chunks, scale=0.2, window=0, cap=0.0, sinks=None, threads=1, scratch=None):
        """chunks: sequence -> how many of its next tokens to run, all in one batch. scratch: bytes of memory through
        which threads may share rows; `shared` tells whether they did."""
        spans = {s: (self.done[s], self.done[s] + n) for s, n in chunks.items()}

        def gather(arrays):
            return np.concatenate([arrays[s][a:b] for s, (a, b) in spans.items()])

        q, k, v = gather(self.q), gather(self.k), gather(self.v)
        batch = make_batch([np.arange(a, b) for a, b in spans.values()], [self.tables[s] for s in spans])
        out = new_mat(len(q), q.shape[1])
        self.unit.run(f"write_{self.name}_{self.kv}", batch.c, k, v, self.pool, threads=threads)
        args = (batch.c, q, self.pool, scale, window, cap, sinks, out)
        shared = np.zeros(1, np.int32)
        if scratch is None:
            self.unit.run(f"attend_{self.name}_{self.kv}", *args, threads=threads)
        else:
            memory = aligned_bytes(b"\xff" * (scratch + 64))
            for half in range(2):  # a barrier stands between them
                rest = (memory, scratch, shared, half)
                self.unit.run(f"share_{self.name}_{self.kv}", *args, *rest, threads=threads)
            assert (memory[scratch:] == 0xFF).all()
        at, result = 0, checked(out, len(q), q.shape[1])
        for s, (a, b) in spans.items():
            self.out[s][a:b] = result[at : at + b - a]
            at += b - a
            self.done[s] = b
        self.shared = bool(shared[0])
        return self


def rounded(x, kv, d):
    """What a pool of this kind holds of heads [n, heads * d]."""
    if kv == "f32":
        return x.astype(np.float64)
    if kv == "int8":
        heads = x.reshape(-1, d)
        scale = np.abs(heads).max(-1, keepdims=True) / np.float32(127)
        return (np.rint(heads / scale).astype(np.float64) * scale).reshape(x.shape)
    bits = x.view(np.uint32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def reference(case, s, scale=0.2, window=0, cap=0.0, sinks=None):
    n, group = len(case.q[s]), case.hq // case.hkv
    q = case.q[s].astype(np.float64).reshape(n, case.hq, case.d)
    k = np.repeat(rounded(case.k[s], case.kv, case.d).reshape(n, case.hkv, case.d), group, axis=1)
    v = np.repeat(rounded(case.v[s], case.kv, case.d).reshape(n, case.hkv, case.d), group, axis=1)
    scores = np.einsum("ihd,jhd->hij", q, k) * scale
    if cap:
        scores = cap * np.tanh(scores / cap)
    i, j = np.arange(n)[:, None], np.arange(n)[None]
    scores = np.where((j <= i) & ((window == 0) | (j > i - window)), scores, -np.inf)
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (case.hq, n, 1))], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", weights[..., :n], v).reshape(n, -1)


CASES = [(name, kv) for name in SHAPES for kv in KINDS if kv == "f32" or name in ("gqa", "mqa")]


@pytest.mark.parametrize(("name", "kv"), CASES)
def test_ragged_prefill(unit, name, kv):
    lengths = [1, 16, 17, 290, 5, 256, 257]
    case = Sequences(unit, name, kv, lengths, 1).step(dict(enumerate(lengths)))
    for s in range(len(lengths)):
        assert np.abs(case.out[s] - reference(case, s)).max() <= 3e-6


OPTIONS = [{"window": 7}, {"window": 16}, {"window": 100}, {"window": 280}, {"cap": 1.5}, {"sinks": True}]


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("options", OPTIONS)
def test_options(unit, options, kv):
    if "sinks" in options:
        options = {"sinks": np.linspace(-2, 4, 6).astype(np.float32)}
    case = Sequences(unit, "gqa", kv, [333, 3], 2).step({0: 333, 1: 3}, **options)
    for s in range(2):
        assert np.abs(case.out[s] - reference(case, s, **options)).max() <= 3e-6


@pytest.mark.parametrize("options", [{}, {"window": 9}, {"window": 270}])
@pytest.mark.parametrize(("name", "kv"), CASES)
def test_chunks_batches_pages_and_threads_change_no_bit(unit, name, kv, options):
    n = 290
    whole = Sequences(unit, name, kv, [n], 3).step({0: n}, **options).out[0]
    for sizes in ([7] * 41 + [3], [270, *[1] * 20], [1, 255, 1, 1, 32], [n - 1, 1]):
        case = Sequences(unit, name, kv, [n], 3, pages=len(sizes))
        for size in sizes:
            case.step({0: size}, **options)
        assert np.array_equal(case.out[0].view(np.uint32), whole.view(np.uint32)), sizes
    for threads in (2, 3):
        case = Sequences(unit, name, kv, [n, 20, 33], 3)
        case.step({0: 12, 2: 33}, threads=threads, **options)
        case.step({1: 1, 0: n - 12}, threads=threads, **options)
        assert np.array_equal(case.out[0].view(np.uint32), whole.view(np.uint32)), threads


@pytest.mark.parametrize("options", [{}, {"window": 290, "cap": 2.0}])
@pytest.mark.parametrize(("name", "kv"), CASES)
def test_threads_that_share_rows_change_no_bit(unit, name, kv, options):
    """A few long sequences of one token are cut into ranges, where the memory is enough."""
    lengths = [600, 300, 30]
    want = Sequences(unit, name, kv, lengths, 9).step(dict(enumerate(lengths)), **options).out
    for threads in (2, 3, 8):
        case = Sequences(unit, name, kv, lengths, 9)
        case.step({0: 599, 1: 299, 2: 10}, **options)
        case.step({2: 19, 0: 1, 1: 1}, threads=threads, scratch=1 << 18, **options)
        assert case.shared
        case.step({2: 1}, threads=threads, scratch=1 << 18, **options)
        assert not case.shared  # a single range
        assert all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in zip(case.out, want, strict=True))
    case = Sequences(unit, name, kv, lengths, 9).step({0: 599})
    assert not case.step({0: 1}, threads=2, scratch=1000).shared


def test_a_few_items_of_many_are_not_shared(unit):
    lengths = [300] * 40
    case = Sequences(unit, "gqa", "f32", lengths, 9).step(dict.fromkeys(range(40), 299))
    assert not case.step(dict.fromkeys(range(40), 1), threads=2, scratch=1 << 20).shared


@pytest.mark.parametrize("kv", KINDS)
def test_later_garbage_does_not_reach_earlier_rows(unit, kv):
    want = Sequences(unit, "gqa", kv, [300], 4).step({0: 300}).out[0]
    for at in (20, 270):
        case = Sequences(unit, "gqa", kv, [300], 4)
        case.v[0][at], case.k[0][at + 1] = np.nan, np.inf
        case.step({0: 300})
        assert np.array_equal(case.out[0][:at], want[:at])
        assert np.isnan(case.out[0][at:]).all()


def test_int8_pages(unit):
    """Half a step from the value at most, a scale per position and head, extremes at +-127, NaN stays visible."""
    hkv, d = SHAPES["mqa"][1:]
    case = Sequences(unit, "mqa", "int8", [18], 7)
    case.k[0][3, 5], case.v[0][4, 2], case.v[0][5] = np.nan, -np.inf, 0
    case.step({0: 18})
    pages = case.pool.reshape(-1, hkv, case.pool.size // hkv // (18 // 16 + 4))[case.tables[0]]
    keys = pages[..., : 16 * d].view(np.int8).reshape(2, hkv, d, 16).transpose(0, 3, 1, 2).reshape(32, -1)[:18]
    values = pages[..., 16 * d : 32 * d].view(np.int8).reshape(2, hkv, 16, d).transpose(0, 2, 1, 3)
    values = values.reshape(32, -1)[:18]
    scales = pages[..., 32 * d :].copy().view(np.float32).reshape(2, hkv, 2, 16)
    for which, (q, x) in enumerate(((keys, case.k[0]), (values, case.v[0]))):
        scale = scales[:, 0, which].reshape(-1)[:18]
        finite = np.isfinite(x).all(-1)
        assert np.isnan(scale[~finite]).all() and (q[~finite] == 0).all() and (~finite).sum() == 1
        assert np.allclose(scale[finite], np.abs(x[finite]).max(-1) / 127, rtol=1e-6)
        error = np.abs(q[finite] * scale[finite, None] - x[finite])
        assert (error <= 0.5001 * scale[finite, None]).all()
        largest = np.abs(q[finite].astype(int)).max(-1)
        assert (largest == np.where(scale[finite] > 0, 127, 0)).all()
    assert scales[0, 0, 1, 5] == 0 and (values[5] == 0).all()


def test_extreme_scores_stay_finite(unit):
    case = Sequences(unit, "gqa", "f32", [20], 5)
    case.q[0] *= 1000
    case.step({0: 20})
    assert np.abs(case.out[0] - reference(case, 0)).max() <= 1e-3


def test_empty_batch_and_empty_sequences(unit):
    case = Sequences(unit, "gqa", "f32", [20, 5], 6)
    want = Sequences(unit, "gqa", "f32", [20, 5], 6).step({0: 20, 1: 5}).out
    case.step({0: 0, 1: 5})
    case.step({0: 20, 1: 0})
    case.step({0: 0, 1: 0}, threads=2)
    assert all(np.array_equal(a, b) for a, b in zip(case.out, want, strict=True))
