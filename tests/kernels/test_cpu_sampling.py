"""Philox and sampling, against published vectors and a float64 reference that shares the kernel's exp."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_batch import ROW_SAMPLING, make_batch
from cpu_harness import EMULATED, PORTABLE, V3, Unit, require

WRAPPERS = """
EXPORT void run_philox(Par, const uint32_t* counter, const uint32_t* key, uint32_t* out) {
  Philox r = philox(Philox{{counter[0], counter[1], counter[2], counter[3]}}, key[0], key[1]);
  for (int i = 0; i < 4; ++i) out[i] = r.word[i];
}
EXPORT void uniforms(Par, int n, const uint64_t* seeds, const uint32_t* index, double* out) {
  for (int i = 0; i < n; ++i) out[i] = philox_uniform(seeds[i], index[i]);
}
EXPORT void run_sample(Par p, const Batch& b, Mat logits, int vocab, void* scratch) {
  sample(p, b, logits, vocab, scratch);
}
EXPORT int64_t scratch_bytes(int vocab) { return sample_scratch_bytes(vocab); }
EXPORT void v_exp(Par, int n, const float* in, float* out) {
  for (int i = 0; i < n; i += 16) store(out + i, exp(load<f32x16>(in + i)));
}
"""


@pytest.fixture(scope="module", params=[PORTABLE, V3, *EMULATED])
def unit(request):
    return Unit(WRAPPERS, require(request.param))


def kernel_exp(unit, x):
    padded = np.zeros(-(-x.size // 16) * 16, np.float32)
    padded[: x.size] = x
    out = np.empty_like(padded)
    unit.run("v_exp", padded.size, padded, out)
    return out[: x.size]


def words_of(allowed, vocab):
    """The mask of a set of ids; bits past the vocabulary are set, as nothing may read them."""
    bits = np.ones(-(-vocab // 32) * 32, np.uint8)
    bits[:vocab] = np.isin(np.arange(vocab), list(allowed))
    return np.packbits(bits, bitorder="little").view(np.uint32)


def sample(unit, logits, rows, positions=None, threads=1, want_logits=False):
    """rows: one dict of RowSampling fields (and `penalties`, `bias`: id -> value; `allowed`: ids) per row of logits."""
    r, vocab = logits.shape
    sampling = np.zeros(r, ROW_SAMPLING)
    sampling["temperature"], sampling["top_p"], sampling["repetition"] = 1, 1, 1
    ids, counts, bias_ids, bias_values = [], [], [], []
    masks = np.zeros(3, np.uint32)  # something else comes first
    for i, row in enumerate(rows):
        row = dict(row)
        penalties, bias = row.pop("penalties", {}), row.pop("bias", {})
        mask = words_of(row.pop("allowed"), vocab) if "allowed" in row else np.zeros(0, np.uint32)
        sampling["num_allowed"][i], sampling["allowed_offset"][i] = len(mask), len(masks)
        masks = np.concatenate([masks, mask])
        for name, value in row.items():
            sampling[name][i] = value
        sampling["num_penalty"][i], sampling["penalty_offset"][i] = len(penalties), len(ids)
        sampling["num_bias"][i], sampling["bias_offset"][i] = len(bias), len(bias_ids)
        ids += penalties
        counts += penalties.values()
        bias_ids += bias
        bias_values += bias.values()
    positions = np.arange(r) if positions is None else positions
    out, logprobs = np.full(r + 1, -7, np.int32), np.full(r + 1, 7, np.float32)
    raw = np.full((r, vocab), np.nan, np.float32) if want_logits else None
    batch = make_batch(
        [np.asarray(positions)],
        [np.zeros(1, np.int32)],
        rows=np.arange(r, dtype=np.int32),
        sampling=sampling,
        penalty_tokens=np.array(ids, np.int32),
        penalty_counts=np.array(counts, np.int32),
        bias_tokens=np.array(bias_ids, np.int32),
        bias_values=np.array(bias_values, np.float32),
        allowed=masks,
        out_tokens=out,
        out_logprobs=logprobs,
        logits=raw,
    )
    scratch = np.full(unit.call("scratch_bytes", vocab) * threads // 4, np.nan, np.float32)
    unit.run("run_sample", batch.c, logits, vocab, scratch, threads=threads)
    assert out[r] == -7 and logprobs[r] == 7
    return (out[:r], logprobs[:r], raw) if want_logits else (out[:r], logprobs[:r])


def uniform(unit, seed, position):
    out = np.empty(1)
    unit.run("uniforms", 1, np.array([seed], np.uint64), np.array([position + 1], np.uint32), out)
    return out[0]


def reference(unit, logits, row, position):
    """The token by the definition in sampling.h, sums in float64; None where it is too close to call."""
    x = np.where(np.isnan(logits), -np.inf, logits).astype(np.float32)
    if "allowed" in row:
        x = np.where(np.isin(np.arange(x.size), list(row["allowed"])), np.maximum(x, np.float32(-1e30)), -np.inf)
        x = x.astype(np.float32)
    for i, value in row.get("bias", {}).items():
        x[i] += np.float32(value)
    for i, count in row.get("penalties", {}).items():
        penalty = np.float32(row.get("repetition", 1))
        x[i] = x[i] / penalty if x[i] > 0 else x[i] * penalty
        if count:
            x[i] -= np.float32(row.get("presence", 0)) + np.float32(row.get("frequency", 0)) * np.float32(count)
    temperature = row.get("temperature", 1)
    if temperature == 0:
        return int(np.argmax(x))
    z = (x - x.max()) / np.float32(temperature)
    w = kernel_exp(unit, z).astype(np.float64)
    w[w < np.float32(row.get("min_p", 0))] = 0
    order = np.arange(x.size)
    top_k, top_p = row.get("top_k", 0), float(np.float32(row.get("top_p", 1)))
    if row.get("min_p", 0) > 0 or 0 < top_k < x.size or top_p < 1:
        order = np.lexsort((order, -z))
        order = order[w[order] > 0]
        if top_k:
            order = order[:top_k]
        if top_p < 1:
            before = np.concatenate([[0], np.cumsum(w[order])[:-1]])
            order = order[(before < top_p * w[order].sum()) | (np.arange(order.size) == 0)]
    running = np.cumsum(w[order])
    target = uniform(unit, row.get("seed", 0), position) * running[-1]
    if np.abs(running - target).min() < 1e-12 * running[-1]:
        return None
    return int(order[np.searchsorted(running, target, side="right")])


KNOWN = [
    ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_philox_known_answers(unit, counter, key, want):
    out = np.zeros(4, np.uint32)
    unit.run("run_philox", np.array(counter, np.uint32), np.array(key, np.uint32), out)
    assert " ".join(f"{w:08x}" for w in out) == want


ROWS = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.3},
    "icy": {"temperature": 1e-30},
    "greedy": {"temperature": 0.0, "top_p": 0.1, "top_k": 3},
    "top_k": {"top_k": 12},
    "top_k_one": {"top_k": 1},
    "top_k_all": {"top_k": 5000},
    "top_p": {"top_p": 0.8},
    "top_p_tiny": {"top_p": 1e-6},
    "min_p": {"min_p": 0.05},
    "all": {"temperature": 0.9, "min_p": 0.01, "top_k": 40, "top_p": 0.9},
    "penalties": {
        "repetition": 1.3,
        "presence": 0.5,
        "frequency": 0.2,
        "penalties": {3: 2, 10: 0, 77: 5},
        "bias": {5: 3.0, 6: -100.0},
        "top_p": 0.95,
    },
    "allowed": {"allowed": range(0, 1000, 3)},
    "allowed_one": {"allowed": [0], "temperature": 0.5},
    "allowed_greedy": {"allowed": [0, 5, 16, 31, 32, 33, 299, 998], "temperature": 0.0},
}
ROWS["allowed_all_ways"] = ROWS["penalties"] | {"allowed": range(0, 1000, 2), "top_k": 9, "min_p": 0.01}


@pytest.mark.parametrize("vocab", [1, 17, 300, 1000])
@pytest.mark.parametrize("name", ROWS)
def test_tokens_equal_the_reference(unit, name, vocab):
    rng = np.random.default_rng(len(name) * vocab)
    logits = (rng.standard_normal((40, vocab)) * rng.uniform(0.1, 5, (40, 1))).astype(np.float32)
    logits[:20] = np.round(logits[:20] * 4) / 4  # many ties
    base = dict(ROWS[name])
    for key in ("penalties", "bias"):
        if key in base:
            base[key] = {i: v for i, v in base[key].items() if i < vocab}
    rows = [base | {"seed": int(rng.integers(0, 2**63)) * 2 + i % 2} for i in range(40)]
    got, logprobs = sample(unit, logits, rows)
    for i in range(40):
        want = reference(unit, logits[i], rows[i], i)
        assert want is None or got[i] == want, i
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    want = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)))[np.arange(40), got]
    assert np.abs(logprobs - want).max() <= 2e-6


@pytest.mark.parametrize("vocab", [1, 17, 300, 1000])
@pytest.mark.parametrize("name", ROWS)
def test_no_token_depends_on_whether_its_logprob_is_wanted(unit, name, vocab):
    rng = np.random.default_rng(vocab)
    logits = np.round(rng.standard_normal((60, vocab)) * 4).astype(np.float32) / 4
    top = np.finfo(np.float32).max
    for i, odd in enumerate((np.nan, -np.inf, np.inf, top, -top)):
        logits[i] = odd
        logits[5 + i, :: 1 + i] = odd
        logits[10 + i, vocab // 2] = odd
    logits[15, : vocab // 2], logits[15, vocab // 2] = top, np.inf  # which are a tie
    logits[16], logits[16, 0] = -np.inf, np.nan
    base = dict(ROWS[name])
    for key in ("penalties", "bias"):
        if key in base:
            base[key] = {i: v for i, v in base[key].items() if i < vocab}
    rows = [base | {"seed": i} for i in range(60)]
    wanted, _ = sample(unit, logits, rows)
    got, logprobs = sample(unit, logits, [row | {"no_logprob": 1} for row in rows])
    assert np.array_equal(got, wanted)
    assert np.isnan(logprobs).all()


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 300])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_is_kept_whatever_the_logits_are(unit, vocab, temperature):
    """Also where every logit that it allows, or every one there is, is -inf or NaN, and over the largest bias."""
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((40, vocab)).astype(np.float32)
    rows = []
    for i in range(40):
        allowed = np.flatnonzero(rng.random(vocab) < 0.3).tolist() or [int(rng.integers(vocab))]
        if i % 4 == 1:
            logits[i, allowed] = -np.inf
        if i % 4 == 2:
            logits[i] = [-np.inf, np.nan][i % 8 // 4]
        bias = dict.fromkeys(range(0, vocab, 2), 100.0) if i % 4 == 3 else {}
        penalties = dict.fromkeys(range(vocab), 3)
        rows.append({"allowed": allowed, "seed": i, "temperature": temperature, "bias": bias, "penalties": penalties,
                     "repetition": 100.0, "presence": 2.0})  # fmt: skip
    tokens, logprobs = sample(unit, logits, rows)
    assert all(token in row["allowed"] for token, row in zip(tokens.tolist(), rows, strict=True))
    x = logits.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        want = (x - np.log(np.nansum(np.exp(x), axis=1, keepdims=True)))[np.arange(40), tokens]
    some = np.isfinite(want)
    assert some.any() and np.abs(logprobs[some] - want[some]).max() <= 2e-6  # of the raw logits
    assert (logprobs[~some] == -np.inf).all()


def test_greedy_takes_the_lowest_id_of_a_tie(unit):
    logits = np.zeros((3, 1000), np.float32)
    logits[0, [999, 40, 41]] = 1
    logits[1, 999] = 1
    assert sample(unit, logits, [{"temperature": 0.0}] * 3)[0].tolist() == [40, 999, 0]


@pytest.mark.parametrize("row", [{}, {"top_p": 0.999}], ids=["by id", "sorted"])
def test_frequencies_follow_the_softmax(unit, row):
    n, vocab = 20000, 10
    logits = np.tile(np.linspace(-1, 1, vocab).astype(np.float32), (n, 1))
    logits[:, 7] = -200  # never
    got, _ = sample(unit, logits, [row | {"seed": i} for i in range(n)], positions=np.full(n, 5))
    p = np.exp(logits[0].astype(np.float64))
    p /= p.sum()
    counts = np.bincount(got, minlength=vocab)
    used = np.arange(vocab) != 7
    assert counts[7] == 0
    assert ((counts[used] - n * p[used]) ** 2 / (n * p[used])).sum() < 26.1  # chi-square, 8 degrees, p = 0.001


def test_position_and_seed_alone_choose(unit):
    logits = np.random.default_rng(3).standard_normal((1, 400)).astype(np.float32)
    rows = [{"seed": 9}, {"seed": 10, "top_p": 0.9}, {"seed": 9}, {"seed": 9, "temperature": 0.0}] * 3
    positions = [4, 4, 5, 6] * 3
    many = np.repeat(logits, 12, axis=0)
    whole, logprobs = sample(unit, many, rows, positions)
    assert whole[:4].tolist() * 3 == whole.tolist()
    for threads in (2, 3, 16):
        again, again_logprobs = sample(unit, many, rows, positions, threads=threads)
        assert np.array_equal(again, whole) and np.array_equal(again_logprobs, logprobs)
    for i in range(4):
        assert sample(unit, logits, rows[i : i + 1], positions[i : i + 1])[0][0] == whole[i]
    tokens = sample(unit, np.repeat(logits, 200, axis=0), [{"seed": 9}] * 200, range(200))[0]
    assert len(set(tokens.tolist())) > 50


def test_raw_logits_are_handed_out_before_bias(unit):
    logits = np.random.default_rng(4).standard_normal((3, 50)).astype(np.float32)
    rows = [{"bias": {4: 100.0}, "penalties": {4: 1}, "repetition": 2.0}] * 3
    tokens, _, raw = sample(unit, logits, rows, want_logits=True)
    assert tokens.tolist() == [4, 4, 4]
    assert np.array_equal(raw, logits)


@pytest.mark.parametrize("row", list(ROWS.values()), ids=list(ROWS))
def test_bad_logits_neither_crash_nor_hang(unit, row):
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
    tokens, _ = sample(unit, logits, [row | {"seed": 3}] * 9)
    assert ((tokens >= 0) & (tokens < 300)).all()
    if "allowed" in row:
        assert all(token in row["allowed"] for token in tokens.tolist())
        return
    assert tokens[3] == 7
    assert not (tokens[4] % 2 == 0 and "bias" not in row)


def test_ids_outside_the_vocabulary_are_ignored(unit):
    logits = np.zeros((1, 20), np.float32)
    row = {
        "bias": {-1: 50.0, 20: 50.0, 2**31 - 1: 50.0, 3: 50.0},
        "penalties": {-5: 1, 99: 1},
        "repetition": 1.5,
    }
    assert sample(unit, logits, [row])[0][0] == 3
