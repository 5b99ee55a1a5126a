"""Paged attention against the dialect, and bit for bit over chunking, batching, page placement and programs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from triton_harness import F16, SLACK, TRITON_TYPES, Form, Output, ceil_div, launch, meta, pow2

from llmc.codegen.triton import attention as lowering
from llmc.kernels.dialect import OPS
from llmc.kernels.triton import attention
from llmc.kv_page import PAGE_SIZE
from llmc.runtime.cuda import upload

F32, I8 = torch.float32, torch.int8
PAGE, BLOCK, ROWS = 16, 64, 64
TOLERANCE = {F32: 2e-6 * SLACK, F16: 1e-3 * SLACK, I8: 1e-3 * SLACK}
"""Largest error of an output, for values of about 1: float32 rounding; probabilities rounded to 16 bits."""


def test_pages_blocks_and_tiles_are_those_of_compiler_and_runtime():
    assert attention.PAGE_SIZE.value == PAGE_SIZE
    assert attention.BLOCK.value == upload.BLOCK
    assert attention.ROWS.value == lowering.ROWS


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def quantized(x):
    """[L, HKV, D] -> int8 and scales [L, HKV], by the definition of an int8 pool."""
    scale = x.abs().amax(-1) / 127
    return torch.round(x / scale[..., None]).to(I8), scale


class Sequences:
    """Sequences with random q, k, v, attended to step by step. Slots not yet written hold NaN, or garbage with NaN
    scales; so does the page that the unused entries of block tables name."""

    def __init__(self, hq, hkv, d, kv, lengths, *, seed=0, pages=0, out="f32", **options):
        self.hq, self.hkv, self.d, self.kv, self.out, self.options = hq, hkv, d, kv, out, options
        self.half = F32 if kv == F32 else F16
        rngs = [np.random.default_rng((seed, i)) for i in range(len(lengths))]

        def random(heads):
            shapes = [(n, heads, d) for n in lengths]
            drawn = [r.standard_normal(s) for r, s in zip(rngs, shapes, strict=True)]
            return [torch.from_numpy(x.astype(np.float32)) for x in drawn]

        self.q = [q.to(self.half) for q in random(hq)]
        self.kv_values = [random(hkv), random(hkv)]
        need = [ceil_div(n, PAGE) for n in lengths]
        order = np.random.default_rng(pages).permutation(sum(need)) + 1  # page 0 stays unused
        self.tables = np.split(order, np.cumsum(need)[:-1])
        shape = (sum(need) + 1, hkv, PAGE)
        self.pools = [torch.full((*shape, d), 77 if kv == I8 else float("nan"), dtype=kv) for _ in range(2)]
        self.scales = [torch.full(shape, float("nan")) if kv == I8 else None for _ in range(2)]
        self.done = [0] * len(lengths)
        self.results = [[] for _ in lengths]

    def _write(self, s, a, b):
        at = torch.arange(a, b)
        page, offset = torch.from_numpy(self.tables[s])[at // PAGE], at % PAGE
        for pool, scales, values in zip(self.pools, self.scales, self.kv_values, strict=True):
            if scales is None:
                pool[page, :, offset] = values[s][a:b].to(self.kv)
            else:
                pool[page, :, offset], scales[page, :, offset] = quantized(values[s][a:b])

    def step(self, chunks, programs=3):
        """chunks: sequence -> how many of its next tokens to run, all in one batch."""
        spans = [(s, self.done[s], self.done[s] + n) for s, n in chunks.items()]
        for span in spans:
            self._write(*span)
        starts = [0, *itertools.accumulate(b - a for _, a, b in spans)]
        t, group = starts[-1], self.hq // self.hkv
        decodes = [i for i, (_, a, b) in enumerate(spans) if b - a == 1]
        blocks = [0, *itertools.accumulate(ceil_div(spans[i][2], BLOCK) for i in decodes)]
        per_tile = ROWS // group
        tiles = [(i, f) for i, (_, a, b) in enumerate(spans) if b - a > 1 for f in range(0, b - a, per_tile)]
        stride = max(len(self.tables[s]) for s, _, _ in spans) + 1
        tables = torch.zeros(len(spans), stride, dtype=torch.int32)
        for i, (s, _, b) in enumerate(spans):
            used = ceil_div(b, PAGE)
            tables[i, :used] = torch.from_numpy(self.tables[s][:used])
        y = Form.empty(self.out, t + 2, t, self.hq * self.d, self.half)
        dp = pow2(self.d, 16)
        common = {
            "positions": int32([p for _, a, b in spans for p in range(a, b)]), "starts": int32(starts), "HQ": self.hq,
            "D": self.d, "DP": dp, "WINDOW": self.options.get("window", 0),
            "meta": meta(
                tokens=t, seqs=len(spans), decodes=len(decodes), items=blocks[-1], stride=stride, tiles=len(tiles)
            ),
        }  # fmt: skip
        both = common | {
            "q": torch.cat([self.q[s][a:b] for s, a, b in spans]), "keys": self.pools[0], "values": self.pools[1],
            "key_scales": self.scales[0], "value_scales": self.scales[1], "tables": tables, "HKV": self.hkv,
            "SCALE": self.options.get("scale", 0.2), "SOFTCAP": self.options.get("softcap", 0.0),
            "HALF": TRITON_TYPES[self.half],
        }  # fmt: skip
        last = {"sinks": self.options.get("sinks"), "OUT": self.out} | y.outputs()
        launch(attention.attention_prefill, (len(tiles), self.hkv), tiles=int32(tiles), TILES=6, **both, **last)
        if decodes:
            partials = Output((blocks[-1], self.hq, dp + 2), F32)
            which = {"decode_seqs": int32(decodes), "decode_blocks": int32(blocks), "partials": partials}
            launch(attention.attention_decode, (programs,), **both, **which)
            partials.checked()
            launch(attention.attention_combine, (len(decodes), self.hq), **common, **which, **last, STAGES=2)
        values = y.values()
        for (s, a, b), lo in zip(spans, starts, strict=False):
            self.results[s].append(values[lo : lo + b - a])
            self.done[s] = b
        return y

    def output(self, s):
        return torch.cat(self.results[s])

    def reference(self, s):
        """The dialect on the whole sequence, with the values that the pool holds."""
        n = self.done[s]
        k, v = (values[s][:n] for values in self.kv_values)
        if self.kv == I8:
            k, v = ((q.float() * scale[..., None]) for q, scale in map(quantized, (k, v)))
        else:
            k, v = k.to(self.kv).float(), v.to(self.kv).float()
        o = self.options
        y = OPS["attention"](
            self.q[s][:n].float(), k, v, torch.arange(n), torch.tensor([0, n]), o.get("sinks"), o.get("scale", 0.2),
            o.get("window", 0), o.get("softcap", 0.0), 0,
        )  # fmt: skip
        return y.reshape(n, -1)

    def check(self, tolerance=None):
        for s in range(len(self.q)):
            error = (self.output(s) - self.reference(s)).abs().max()
            assert error <= (TOLERANCE[self.kv] if tolerance is None else tolerance), (s, error)


def same_outputs(a, b):
    return all(torch.equal(a.output(s), b.output(s)) for s in range(len(a.q)))


@pytest.mark.parametrize("kv", [F16, I8])
@pytest.mark.parametrize("shape", [(3, 1, 64), (2, 2, 16)])
def test_ragged_batches(shape, kv):
    """Prompts, a prompt with history, decoding, and both in one batch."""
    case = Sequences(*shape, kv, [70, 23, 18, 2])
    case.step({0: 21, 1: 16, 3: 2})
    case.step({2: 17, 0: 44, 1: 1})
    case.step({1: 6, 0: 1, 2: 1})
    case.step({0: 4})
    case.check()


@pytest.mark.parametrize("kv", [F32, I8])
def test_wide_group_of_odd_heads(kv):
    """7 query heads a key head, so that a tile's last row is unused; 80 elements, padded to 128."""
    case = Sequences(7, 1, 80, kv, [70, 11])
    case.step({0: 69, 1: 10})
    case.step({1: 1, 0: 1})
    case.check()


OPTIONS = {
    "window": {"window": 7},
    "wide window": {"window": 64},
    "softcap": {"softcap": 1.5, "scale": 0.4},
    "sinks": {"sinks": torch.linspace(-2, 4, 4)},
    "all": {"window": 20, "softcap": 3.0, "sinks": torch.linspace(-3, 30, 4)},
}


@pytest.mark.parametrize(("kv", "name"), [*((F32, name) for name in OPTIONS), (I8, "all")])
def test_options(kv, name):
    """Also that windows skip blocks: the later steps begin beyond the first block."""
    case = Sequences(4, 2, 16, kv, [135, 3], **OPTIONS[name])
    for chunks in ({0: 100, 1: 1}, {0: 1, 1: 2}, {0: 33}, {0: 1}):
        case.step(chunks)
    case.check()


def test_edges_of_a_window():
    """Single tokens that see the last key of a block alone, then none of it."""
    case = Sequences(2, 1, 16, F32, [72], window=7)
    for n in (69, 1, 1, 1):
        case.step({0: n})
    case.check()


@pytest.mark.parametrize("out", ["half", "q8"])
def test_forms_of_the_result(out):
    """From a prompt and from a single token; "q8" within half a step of the float32 result, "half" rounded."""
    full, other = (Sequences(2, 1, 64, F16, [5, 4], seed=1, out=o) for o in ("f32", out))
    for chunks in ({0: 4, 1: 4}, {0: 1}):
        want, got = full.step(chunks), other.step(chunks)
        if out == "half":
            assert torch.equal(got.values(), want.values().to(F16).float())
        else:
            limit = want.values().view(-1, 32).abs().amax(-1, keepdim=True) / 254 * 1.001
            assert ((got.values() - want.values()).view(-1, 32).abs() <= limit).all()


def test_q8_of_heads_wider_than_a_power_of_two():
    case = Sequences(2, 2, 96, F32, [3], seed=2, out="q8")
    case.step({0: 2})
    case.step({0: 1})
    case.check(0.02)


@pytest.mark.parametrize("kv", [F32, I8])
def test_chunking_changes_no_bit(device_sums, kv):
    """A token has the same bits from a prompt's tile, wherever it is in it, and from single steps."""
    whole = Sequences(6, 2, 16, kv, [130], seed=3)
    whole.step({0: 130})
    for chunks in ([62, 1, 1, 1, 1, 61, 1, 1, 1], [5, 59, 64, 1, 1]):
        case = Sequences(6, 2, 16, kv, [130], seed=3)
        for n in chunks:
            case.step({0: n})
        assert same_outputs(case, whole)
    whole.check()


@pytest.mark.parametrize("options", [{"window": 30}, {"softcap": 2.0}, {"sinks": torch.linspace(-1, 1, 3)}])
def test_chunking_with_options_changes_no_bit(device_sums, options):
    whole, case = (Sequences(3, 1, 32, F16, [100], seed=4, **options) for _ in range(2))
    whole.step({0: 100})
    for n in (63, 1, 1, 30, 1, 4):
        case.step({0: n})
    assert same_outputs(case, whole)


def test_batch_pages_and_programs_change_no_bit(device_sums):
    """Other sequences beside it, other pages, and any number of persistent programs, more than items too."""
    lengths = [67, 129, 16]
    alone = Sequences(3, 1, 32, F16, lengths, seed=5)
    for s, n in enumerate(lengths):
        alone.step({s: n - 1})
        alone.step({s: 1}, programs=1)
    for programs in (2, 11):
        case = Sequences(3, 1, 32, F16, lengths, seed=5, pages=programs)
        case.step({2: 15, 0: 66, 1: 128})
        case.step({1: 1, 0: 1, 2: 1}, programs=programs)
        assert same_outputs(case, alone)


@pytest.mark.parametrize("out", ["f32", "q8"])
def test_forms_have_the_same_bits_from_both_kernels(device_sums, out):
    prompt, single = (Sequences(2, 1, 32, F16, [66], seed=6, out=out) for _ in range(2))
    whole = prompt.step({0: 66})
    single.step({0: 65})
    last = single.step({0: 1})
    for a, b in zip(whole.bits(), last.bits(), strict=True):
        assert torch.equal(a[65:], b)


def test_not_finite_query_spoils_its_token_alone():
    case = Sequences(2, 1, 16, F32, [5, 3])
    case.q[0][2, 1, 4] = float("nan")
    case.step({0: 5, 1: 2})
    case.step({1: 1})
    got = case.output(0).view(5, 2, 16)
    assert got[2, 1].isnan().all()
    got[2, 1] = 0
    assert got.isfinite().all()
    assert case.output(1).isfinite().all()


@pytest.mark.parametrize("single", [False, True])
def test_not_finite_key_stays_visible(single):
    """Whoever sees a NaN key or value gets NaN, from both kernels."""
    for which in range(2):
        case = Sequences(2, 1, 16, F32, [5])
        case.kv_values[which][0][2, 0, 3] = float("nan")
        case.step({0: 4 if single else 5})
        if single:
            case.step({0: 1})
        assert case.output(0).view(5, 2, 16)[3:, :, 3].isnan().all()
