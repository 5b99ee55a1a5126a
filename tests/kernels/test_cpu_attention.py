"""Paged attention: against float64, and bit for bit across chunking, batching, page placement and threads."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_batch import make_batch
from cpu_harness import PORTABLE, V3, Unit, checked, new_mat, require

SHAPES = {"gqa": (6, 2, 64), "mha": (2, 2, 16), "mqa": (5, 1, 24), "wide": (20, 1, 8)}
KINDS = ("f32", "bf16")
WRAPPERS = "".join(
    f"""
EXPORT void write_{name}_{kv}(Par p, const Batch& b, Mat k, Mat v, uint8_t* pool) {{
  kv_write<{hkv}, {d}, Kv::{kv}>(p, b, k, v, pool); }}
EXPORT void attend_{name}_{kv}(Par p, const Batch& b, Mat q, uint8_t* pool, float scale, int window,
                               float cap, const float* sinks, Mat out) {{
  attention<{hq}, {hkv}, {d}, Kv::{kv}>(p, b, q, pool, AttentionParams{{scale, window, cap, sinks}}, out); }}
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
        size = getattr(unit.library, f"page_bytes_{name}_{kv}")() * (sum(need) + 3)
        self.pool = np.full(size, 0xFF, np.uint8)  # NaN as float32 and as bfloat16
        self.out = [np.full((n, self.hq * self.d), np.nan, np.float32) for n in lengths]
        self.done = [0] * len(lengths)

    def step(self, chunks, scale=0.2, window=0, cap=0.0, sinks=None, threads=1):
        """chunks: sequence -> how many of its next tokens to run, all in one batch."""
        spans = {s: (self.done[s], self.done[s] + n) for s, n in chunks.items()}

        def gather(arrays):
            return np.concatenate([arrays[s][a:b] for s, (a, b) in spans.items()])

        q, k, v = gather(self.q), gather(self.k), gather(self.v)
        batch = make_batch([np.arange(a, b) for a, b in spans.values()], [self.tables[s] for s in spans])
        out = new_mat(len(q), q.shape[1])
        self.unit.run(f"write_{self.name}_{self.kv}", batch.c, k, v, self.pool, threads=threads)
        args = (batch.c, q, self.pool, scale, window, cap, sinks, out)
        self.unit.run(f"attend_{self.name}_{self.kv}", *args, threads=threads)
        at, result = 0, checked(out, len(q), q.shape[1])
        for s, (a, b) in spans.items():
            self.out[s][a:b] = result[at : at + b - a]
            at += b - a
            self.done[s] = b
        return self


def rounded(x, kv):
    if kv == "f32":
        return x.astype(np.float64)
    bits = x.view(np.uint32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return bits.view(np.float32).astype(np.float64)


def reference(case, s, scale=0.2, window=0, cap=0.0, sinks=None):
    n, group = len(case.q[s]), case.hq // case.hkv
    q = case.q[s].astype(np.float64).reshape(n, case.hq, case.d)
    k = np.repeat(rounded(case.k[s], case.kv).reshape(n, case.hkv, case.d), group, axis=1)
    v = np.repeat(rounded(case.v[s], case.kv).reshape(n, case.hkv, case.d), group, axis=1)
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
    lengths = [1, 16, 17, 53, 5]
    case = Sequences(unit, name, kv, lengths, 1).step(dict(enumerate(lengths)))
    for s in range(len(lengths)):
        assert np.abs(case.out[s] - reference(case, s)).max() <= 3e-6


@pytest.mark.parametrize("options", [{"window": 7}, {"window": 16}, {"window": 100}, {"cap": 1.5}, {"sinks": True}])
def test_options(unit, options):
    if "sinks" in options:
        options = {"sinks": np.linspace(-2, 4, 6).astype(np.float32)}
    case = Sequences(unit, "gqa", "f32", [61, 3], 2).step({0: 61, 1: 3}, **options)
    for s in range(2):
        assert np.abs(case.out[s] - reference(case, s, **options)).max() <= 3e-6


@pytest.mark.parametrize("options", [{}, {"window": 9}])
@pytest.mark.parametrize(("name", "kv"), CASES)
def test_chunks_batches_pages_and_threads_change_no_bit(unit, name, kv, options):
    whole = Sequences(unit, name, kv, [45], 3).step({0: 45}, **options).out[0]
    for sizes in ([7] * 6 + [3], [1] * 45, [44, 1], [16, 29]):
        case = Sequences(unit, name, kv, [45], 3, pages=len(sizes))
        for size in sizes:
            case.step({0: size}, **options)
        assert np.array_equal(case.out[0].view(np.uint32), whole.view(np.uint32)), sizes
    for threads in (2, 3):
        case = Sequences(unit, name, kv, [45, 20, 33], 3)
        case.step({0: 12, 2: 33}, threads=threads, **options)
        case.step({1: 1, 0: 33}, threads=threads, **options)
        assert np.array_equal(case.out[0].view(np.uint32), whole.view(np.uint32)), threads


def test_later_garbage_does_not_reach_earlier_rows(unit):
    want = Sequences(unit, "gqa", "f32", [30], 4).step({0: 30}).out[0]
    case = Sequences(unit, "gqa", "f32", [30], 4)
    case.v[0][20], case.k[0][21] = np.nan, np.inf
    case.step({0: 30})
    assert np.array_equal(case.out[0][:20], want[:20])
    assert np.isnan(case.out[0][20]).all()


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
