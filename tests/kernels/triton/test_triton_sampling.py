"""The sampling kernels against a float64 reimplementation of kernels/cpu/sampling.h."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.random import philox_impl
from triton_harness import DEVICE, SLACK, launch

from llmc.kernels.triton.philox import philox_uniform
from llmc.kernels.triton.sampling import adjust_logits, sample_rows, sample_stats, stats_chunk
from llmc.runtime.batch import RowSampling
from llmc.runtime.sampling_rows import pack_sampling

BLOCK = 1024 if DEVICE else 512  # plans have 1024
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinities, in the interpreter's numpy
MARGIN = 1e-6  # what the sums of the kernels may be off, relative to the total


def allowed_ids(row, vocab):
    return np.isin(np.arange(vocab), list(row["allowed"]))


def device_arrays(rows, vocab):
    """Dicts of RowSampling fields (and `penalties`, `bias`: lists of (id, value); `allowed`: ids) as the kernels get
    them: `sampling`, the starts of the five arrays in `extra`, `extra`."""
    made = []
    for row in rows:
        row = dict(row)
        for name, ids, values, dtype in (
            ("penalties", "penalty_tokens", "penalty_counts", np.int32),
            ("bias", "bias_tokens", "bias_values", np.float32),
        ):
            entries = row.pop(name, [])
            row[ids] = np.array([e[0] for e in entries], np.int32)
            row[values] = np.array([e[1] for e in entries], dtype)
        if "allowed" in row:
            bits = np.ones(-(-vocab // 32) * 32, np.uint8)  # nothing reads what is past the vocabulary
            bits[:vocab] = allowed_ids(row, vocab)
            row["allowed"] = np.packbits(bits, bitorder="little").view(np.uint32)
        made.append(RowSampling(**row))
    sampling, arrays = pack_sampling(tuple(made))
    names = ("penalty_tokens", "penalty_counts", "bias_tokens", "bias_values", "allowed")
    words = [np.zeros(0, np.int32) if arrays[n] is None else arrays[n].view(np.int32) for n in names]
    starts = np.cumsum([7, *(w.size for w in words)])  # something else comes first
    extra = np.concatenate([np.full(7, 3, np.int32), *words, np.full(3, 3, np.int32)])
    return sampling, starts[:5], extra


def sample(logits, rows, positions=None, block=BLOCK, spare=1):
    """Tokens and log-probabilities of logits [R, V]; `spare` programs and output rows more than there are rows."""
    r, vocab = logits.shape
    sampling, starts, extra = device_arrays(rows, vocab)
    positions = np.arange(r) if positions is None else np.asarray(positions)
    rng = np.random.default_rng(r)
    where = rng.permutation(r + 5)[:r]  # `rows` points into more tokens than are sampled
    token_positions = np.full(r + 5, 999)
    token_positions[where] = positions
    meta = np.full(16, -1)
    meta[1], meta[9:14] = r, starts
    integers = [meta, token_positions, where, sampling.view(np.int32), extra]
    meta, token_positions, where, sampling, extra = (
        torch.from_numpy(np.ascontiguousarray(a, np.int32)) for a in integers
    )
    raw = torch.from_numpy(np.array(logits, np.float32))
    adjusted, stats = torch.full((r, vocab), torch.nan), torch.full((r, 128), torch.nan)
    tokens, logprobs = torch.full((r + spare,), -7, dtype=torch.int32), torch.full((r + spare,), 7.0)
    chunk = stats_chunk(vocab)
    programs, arrays = r + spare, {"logits": raw, "meta": meta, "V": vocab}
    launch(sample_stats, (programs, triton.cdiv(vocab, chunk)), stats=stats, CHUNK=chunk, **arrays)
    arrays |= {"adjusted": adjusted, "sampling": sampling, "BLOCK": block}
    launch(adjust_logits, (programs, triton.cdiv(vocab, block)), extra=extra, **arrays)
    launch(
        sample_rows, (programs,), stats=stats, positions=token_positions, rows=where, out_tokens=tokens,
        out_logprobs=logprobs, CHUNK=chunk, **arrays,
    )  # fmt: skip
    assert np.array_equal(raw.numpy(), logits, equal_nan=True)
    assert (tokens[r:] == -7).all() and (logprobs[r:] == 7).all()
    return tokens[:r].numpy(), logprobs[:r].numpy()


def philox(counter, key):
    """Philox4x32-10 of four words under two, in Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b % 2**32, (a >> 32) ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def uniform(seed, position):
    """u of the token that follows the one at `position`."""
    words = philox([position + 1, 0, 0, 0], [seed % 2**32, seed >> 32])
    return ((words[0] << 32 | words[1]) >> 11) * 2.0**-53


def clean(logits):
    return np.where(np.isnan(logits), -np.inf, np.minimum(logits, np.finfo(np.float32).max)).astype(np.float32)


def adjust(logits, row):
    """Steps 0 and 1 of sampling.h, in float32."""
    x = clean(logits)
    if "allowed" in row:
        x = np.where(allowed_ids(row, x.size), np.maximum(x, np.float32(-1e30)), np.float32(-np.inf))
    repetition = np.float32(row.get("repetition_penalty", 1))
    presence, frequency = (np.float32(row.get(f"{n}_penalty", 0)) for n in ("presence", "frequency"))
    for i, value in row.get("bias", []):
        if 0 <= i < x.size:
            x[i] += np.float32(value)
    for i, count in row.get("penalties", []):
        if 0 <= i < x.size:
            x[i] = x[i] / repetition if x[i] > 0 else x[i] * repetition
            if count > 0:
                x[i] = x[i] - presence - frequency * np.float32(count)
    return clean(x)


@np.errstate(over="ignore", invalid="ignore")
def reference(logits, row, position):
    """The token, and how near the nearest decision was: a distance in the sum of weights over their total."""
    x, margin = adjust(logits, row), np.inf
    temperature = np.float32(row.get("temperature", 1))
    if clean(logits).max() == -np.inf and "allowed" not in row:
        return 0, margin
    if temperature == 0 or x.max() == -np.inf:
        return int(np.argmax(x)), margin
    z = (x - x.max()) / temperature
    w = np.exp(z.astype(np.float64))
    w[z < -103.9] = 0
    min_p, top_p, top_k = np.float32(row.get("min_p", 0)), float(np.float32(row.get("top_p", 1))), row.get("top_k", 0)
    if min_p > 0:
        margin = np.abs(w - min_p).min()
        w[w < min_p] = 0
    order = np.arange(x.size)
    if min_p > 0 or top_p < 1 or 0 < top_k < x.size:
        order = np.lexsort((order, -z))
    order = order[w[order] > 0]
    if 0 < top_k < x.size:
        order = order[:top_k]
    if top_p < 1:
        upto = np.cumsum(w[order]) / w[order].sum()
        margin = min(margin, np.abs(upto - top_p).min())
        order = order[: 1 + np.searchsorted(upto, top_p)]
    upto = np.cumsum(w[order]) / w[order].sum()
    u = uniform(row.get("seed", 0), position)
    margin = min(margin, np.abs(upto[:-1] - u).min(initial=np.inf))
    return int(order[np.searchsorted(upto[:-1], u, side="right")]), margin


def check(logits, rows, positions=None, **options):
    """Tokens equal the reference, log-probabilities are right. The data are fixed, so that no decision is near is a
    property of them that is asserted, not an excuse."""
    tokens, logprobs = sample(logits, rows, positions, **options)
    positions = np.arange(len(rows)) if positions is None else positions
    for i, row in enumerate(rows):
        want, margin = reference(logits[i], row, int(positions[i]))
        assert margin > MARGIN, f"row {i}: choose other data"
        if margin > MARGIN * SLACK:
            assert tokens[i] == want, i
    x = clean(logits).astype(np.float64)
    at = np.arange(len(rows))
    with np.errstate(invalid="ignore"):
        x -= x.max(axis=1, keepdims=True)
        want = x[at, tokens] - np.log(np.exp(x).sum(axis=1))
    some = np.isfinite(want)
    assert np.abs(logprobs - want)[some].max(initial=0) <= SLACK * (2e-6 + 1e-6 * np.abs(want[some]).max(initial=0))
    assert (logprobs[~some] == -np.inf).all()
    return tokens


@triton.jit
def _philox_kernel(words, out):
    c, k = words, words + 4
    a, b, d, e = philox_impl(
        tl.load(c).to(tl.uint32, bitcast=True), tl.load(c + 1).to(tl.uint32, bitcast=True),
        tl.load(c + 2).to(tl.uint32, bitcast=True), tl.load(c + 3).to(tl.uint32, bitcast=True),
        tl.load(k).to(tl.uint32, bitcast=True), tl.load(k + 1).to(tl.uint32, bitcast=True),
    )  # fmt: skip
    tl.store(out, a.to(tl.int32, bitcast=True))
    tl.store(out + 1, b.to(tl.int32, bitcast=True))
    tl.store(out + 2, d.to(tl.int32, bitcast=True))
    tl.store(out + 3, e.to(tl.int32, bitcast=True))


@triton.jit
def _uniform_kernel(words, out):
    at = words + tl.program_id(0) * 3
    tl.store(out + tl.program_id(0), philox_uniform(tl.load(at), tl.load(at + 1), tl.load(at + 2)))


KNOWN = [  # kat_vectors of Random123
    ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


own_kernels = pytest.mark.skipif(bool(DEVICE), reason="a kernel of this file, which plans do not have")


@own_kernels
@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_philox_known_answers(counter, key, want):
    assert " ".join(f"{w:08x}" for w in philox(counter, key)) == want
    out = torch.zeros(4, dtype=torch.int32)
    _philox_kernel[(1,)](torch.from_numpy(np.array(counter + key, np.uint32).view(np.int32)), out)
    assert " ".join(f"{w:08x}" for w in out.numpy().view(np.uint32)) == want


@own_kernels
def test_uniforms_have_all_bits():
    seeds = [0, 1, 2**32, 2**63 + 5, 2**64 - 1]
    words = np.array([[s % 2**32, s >> 32, p] for s in seeds for p in (1, 77, 2**31 - 1)], np.uint32)
    out = torch.zeros(len(words), dtype=torch.float64)
    _uniform_kernel[(len(words),)](torch.from_numpy(words.view(np.int32)), out)
    assert out.tolist() == [uniform(int(a) | int(b) << 32, int(p) - 1) for a, b, p in words]


ROWS = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.3},
    "icy": {"temperature": 1e-30},
    "greedy": {"temperature": 0.0, "top_p": 0.1, "top_k": 3},
    "top_k": {"top_k": 12},
    "top_k_one": {"top_k": 1},
    "top_k_all": {"top_k": 5000},
    "top_k_many": {"top_k": 290},
    "top_p": {"top_p": 0.831},
    "top_p_wide": {"top_p": 0.9999, "temperature": 3.0},
    "top_p_tiny": {"top_p": 1e-5},
    "min_p": {"min_p": 0.051},
    "min_p_icy": {"min_p": 0.05, "temperature": 1e-30},
    "all": {"temperature": 0.9, "min_p": 0.011, "top_k": 40, "top_p": 0.9},
    "penalties": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.2,
        "penalties": [(3, 2), (10, 0), (-1, 4), (77, 5), (290, 1), (5000, 1), (5, 1)],
        "bias": [(5, 3.0), (6, -100.0), (5, -1.5), (2**31 - 1, 90.0), (-2, 90.0), (299, 0.5)],
    },
}
ROWS["allowed"] = {"allowed": range(0, 1500, 3)}
ROWS["allowed_one"] = {"allowed": [0], "temperature": 0.5}
ROWS["allowed_greedy"] = {"allowed": [0, 5, 16, 31, 32, 33, 299], "temperature": 0.0}
ROWS["allowed_penalties"] = ROWS["penalties"] | {"allowed": range(0, 1500, 2), "top_p": 0.9}
ROWS["penalties_top_p"] = ROWS["penalties"] | {"top_p": 0.95}
ROWS["penalties_top_k"] = ROWS["penalties"] | {"top_k": 7, "temperature": 0.7}
ROWS["penalties_flat"] = ROWS["penalties"] | {"top_p": 0.99, "temperature": 20.0}
ROWS["penalties_greedy"] = ROWS["penalties"] | {"temperature": 0.0}


def random_rows(vocab, base, count, seed):
    """Rows of every shape: flat and peaked, with many ties, shifted."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((count, vocab)) * rng.uniform(0.1, 5, (count, 1)) + rng.uniform(-20, 20, (count, 1))
    logits[::3] = np.round(logits[::3] * 4) / 4
    return logits.astype(np.float32), [base | {"seed": int(rng.integers(2**63)) * 2 + i % 2} for i in range(count)]


@pytest.mark.parametrize("vocab", [1, 17, 300, pytest.param(1500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ROWS)
def test_tokens_equal_the_reference(name, vocab):
    check(*random_rows(vocab, ROWS[name], 5, [len(name), vocab, sum(map(ord, name))]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "top_p_wide", "top_k_many", "penalties_flat", "all"])
def test_a_vocabulary_below_and_above_the_block(name):
    for block in (BLOCK,) if DEVICE else (64, 2048):
        check(*random_rows(303, ROWS[name], 2, [block, len(name)]), block=block)


def test_flat_rows_are_cut_by_id():
    logits = np.full((40, 1200), 2.5, np.float32)
    rows = [{"top_k": 700}, {"top_p": 0.5003}, {"top_k": 1}, {}, {"top_k": 700, "top_p": 0.2503}] * 8
    tokens = check(logits, [row | {"seed": 5 + i} for i, row in enumerate(rows)])
    for i, end in enumerate([700, 601, 1, 1200, 176]):
        assert end * 0.5 < tokens[i::5].max() + 1 <= end


@pytest.mark.slow
def test_top_p_keeps_a_prefix_that_weighs_exactly_as_much():
    """0.5 of ten equal tokens are five. The float32 nearest to 0.1 is larger, so that one token is not enough."""
    logits = np.zeros((24, 10), np.float32)
    for top_p, kept in ((0.5, 5), (0.1, 2)):
        tokens, _ = sample(logits, [{"top_p": top_p, "seed": i} for i in range(24)], block=BLOCK if DEVICE else 16)
        assert set(tokens.tolist()) == set(range(kept))


def test_greedy_takes_the_lowest_id_of_a_tie():
    logits = np.zeros((5, 1000), np.float32)
    logits[0, [999, 40, 41]] = 1
    logits[1, 999] = 1
    logits[3, [300, 600]] = np.inf
    bias = {"bias": [(700, 1.0), (900, 1.0)]}
    rows = [{}, {}, {}, {}, bias]
    tokens = check(logits, [row | {"temperature": 0.0} for row in rows])
    assert tokens.tolist() == [40, 999, 0, 300, 700]


@pytest.mark.parametrize("name", ["plain", "hot", "icy", "greedy", "top_k", "top_p", "min_p", "penalties_top_k"])
def test_bad_logits(name):
    logits = np.zeros((9, 300), np.float32)
    logits[0] = np.nan
    logits[1] = -np.inf
    logits[2] = np.inf
    logits[3, 7] = np.inf
    logits[4, ::2] = np.nan
    logits[5, 1:] = -np.inf
    logits[6] = np.float32(3e38)
    logits[7, :150], logits[7, 150:] = np.float32(3e38), np.float32(-3e38)
    logits[8] = np.random.default_rng(5).integers(0, 2**32, 300, dtype=np.uint32).view(np.float32)
    tokens = check(logits, [ROWS[name] | {"seed": 3}] * 9)
    assert tokens[0] == tokens[1] == 0 and tokens[3] == 7 and tokens[5] == 0


def test_a_bias_may_forbid_every_token():
    logits = np.zeros((2, 20), np.float32)
    bias = {"bias": [(i, -np.inf) for i in range(20)]}
    tokens, logprobs = sample(logits, [bias, bias | {"temperature": 0.0}])
    assert tokens.tolist() == [0, 0] and np.allclose(logprobs, -np.log(20))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_is_kept_whatever_the_logits_are(temperature):
    """Also where every logit that it allows, or every one there is, is -inf, and over the largest bias."""
    rng = np.random.default_rng(7)
    logits = rng.standard_normal((12, 70)).astype(np.float32)
    rows = []
    for i in range(12):
        allowed = np.flatnonzero(rng.random(70) < 0.2).tolist()
        if i % 4 == 1:
            logits[i, allowed] = -np.inf
        if i % 4 == 2:
            logits[i] = [-np.inf, np.nan][i % 8 // 4]
        bias = [(j, 100.0) for j in range(0, 70, 2)] if i % 4 == 3 else []
        penalties = [(j, 3) for j in range(70)]
        rows.append({"allowed": allowed, "seed": i, "temperature": temperature, "bias": bias, "penalties": penalties,
                     "repetition_penalty": 100.0, "presence_penalty": 2.0})  # fmt: skip
    tokens = check(logits, rows)
    assert all(token in row["allowed"] for token, row in zip(tokens.tolist(), rows, strict=True))


def test_adjusted_rows_have_the_bits_of_the_definition():
    logits, rows = random_rows(900, ROWS["penalties"], 3, 1)
    ids = np.random.default_rng(2).permutation(900)
    rows[0] = rows[0] | {"penalties": [(int(i), int(i) % 4) for i in ids], "bias": [(int(i), 0.3) for i in ids[:200]]}
    rows[1] = {"repetition_penalty": 1.7}  # no token has been seen
    sampling, starts, extra = device_arrays(rows, 900)
    meta = np.full(16, -1, np.int32)
    meta[1], meta[9:14] = 3, starts
    adjusted = torch.full((4, 900), 7.0)
    arrays = [torch.from_numpy(a) for a in (sampling.view(np.int32), extra, meta)]
    names = ("sampling", "extra", "meta")
    launch(
        adjust_logits, (4, 4), logits=torch.from_numpy(logits), adjusted=adjusted, V=900, BLOCK=256,
        **dict(zip(names, arrays, strict=True)),
    )  # fmt: skip
    want = np.stack([adjust(logits[0], rows[0]), np.full(900, 7.0), adjust(logits[2], rows[2]), np.full(900, 7.0)])
    assert np.array_equal(adjusted.numpy(), want)


@pytest.mark.slow
def test_a_row_depends_on_no_other_row():
    """Bit for bit: alone, among others, in another order."""
    names = ["plain", "cold", "greedy", "top_k", "top_p", "top_p_wide", "all", "penalties_top_p", "penalties_greedy"]
    logits, rows, positions = [], [], []
    for i, name in enumerate(names):
        made = random_rows(700, ROWS[name], 1, i + 40)
        logits, rows, positions = [*logits, *made[0]], rows + made[1], [*positions, 3 * i]
    logits = np.stack(logits)
    tokens, logprobs = sample(logits, rows, positions)
    order = np.random.default_rng(0).permutation(len(rows))
    again = sample(logits[order], [rows[i] for i in order], [positions[i] for i in order], spare=3)
    assert np.array_equal(again[0], tokens[order]) and np.array_equal(again[1], logprobs[order])
    for i in range(len(rows)):
        token, logprob = sample(logits[i : i + 1], rows[i : i + 1], positions[i : i + 1])
        assert token[0] == tokens[i] and logprob[0] == logprobs[i]


def test_position_and_seed_alone_choose():
    logits = np.tile(np.random.default_rng(3).standard_normal(400).astype(np.float32), (60, 1))
    tokens = check(logits, [{"seed": 9}] * 30 + [{"seed": 2**40 + i} for i in range(30)], [*range(30), *[4] * 30])
    assert len(set(tokens[:30].tolist())) > 20 and len(set(tokens[30:].tolist())) > 20


def test_chunks_fit_the_statistics():
    for vocab in (1, 256, 257, 16384, 16385, 49152, 151936, 262144):
        chunk = stats_chunk(vocab)
        assert chunk & (chunk - 1) == 0 and triton.cdiv(vocab, chunk) <= 64
