"""Matrix products, quantisation of activations and embedding lookups, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cpu_harness import (
    AARCH64,
    AVXVNNI,
    EMULATED,
    NO_MAT,
    PORTABLE,
    V3,
    V4,
    VNNI_EMULATED,
    QuantBuf,
    Unit,
    Weight,
    aligned_bytes,
    as_mat,
    checked,
    compile_unit,
    new_mat,
    require,
)

from llmc.kernels import pack
from llmc.kernels.codes import Codes
from llmc.kernels.formats import find_format

ON_AVXVNNI = pytest.param(AVXVNNI, marks=pytest.mark.cross)
FORMATS = ("f32", "bf16", "w8", "w4")
N, K = 72, 100  # neither is a multiple of its padding
GATED_N, GATED_K = 40, 64
DEEP_N, DEEP_K = 20, 2100  # several blocks along K
SHORT_K = 40
WRAPPERS = f"""
#define LINEAR(fmt, X) \\
  EXPORT void linear_##fmt(Par p, int t, X x, Weight w, const float* b, Mat r, Mat out) {{ \\
    linear<Fmt::fmt, {N}, {K}, Act::none, false>(p, t, x, w, b, r, out); }} \\
  EXPORT void gated_##fmt(Par p, int t, X x, Weight w, const float* b, Mat r, Mat out) {{ \\
    linear<Fmt::fmt, {GATED_N}, {GATED_K}, Act::silu, true>(p, t, x, w, b, r, out); }} \\
  EXPORT void embed_##fmt(Par p, int t, const int32_t* ids, int offset, Weight w, float s, Mat out) {{ \\
    embed<Fmt::fmt, {K}>(p, t, ids, offset, w, s, out); }}
LINEAR(f32, Mat)
LINEAR(bf16, Mat)
LINEAR(w8, QuantBuf)
LINEAR(w4, QuantBuf)
#define DEEP(fmt, X) \\
  EXPORT void deep_##fmt(Par p, int t, X x, Weight w, const float* b, Mat r, Mat out) {{ \\
    linear<Fmt::fmt, {DEEP_N}, {DEEP_K}, Act::none, false>(p, t, x, w, b, r, out); }}
DEEP(f32, Mat)
DEEP(w8, QuantBuf)
EXPORT void gelu_f32(Par p, int t, Mat x, Weight w, const float* b, Mat r, Mat out) {{
  linear<Fmt::f32, {N}, {K}, Act::gelu, false>(p, t, x, w, b, r, out); }}
#define QUANTIZE(fmt, k) \\
  EXPORT void quantize_##k##_##fmt(Par p, int t, Mat x, QuantBuf q) {{ quantize<k, Fmt::fmt>(p, t, x, q); }}
#define QUANTIZE_ALL(k) QUANTIZE(w8, k) QUANTIZE(w4, k)
QUANTIZE_ALL({K}) QUANTIZE_ALL({GATED_K}) QUANTIZE_ALL({DEEP_K}) QUANTIZE_ALL({SHORT_K})
EXPORT int widened(int fmt) {{ return is_widened((Fmt)fmt); }}
EXPORT int64_t packed_tile_bytes(int fmt, int k) {{ return tile_bytes((Fmt)fmt, k); }}
"""


# What is compiled for targets that this machine may not run: the parts that differ between them.
ELSEWHERE = f"""
EXPORT void linear_w8(Par p, int t, QuantBuf x, Weight w, Mat out) {{
  linear<Fmt::w8, {N}, {K}, Act::none, false>(p, t, x, w, nullptr, Mat{{}}, out); }}
EXPORT void attend(Par p, const Batch& b, Mat q, uint8_t* pool, AttentionParams a, Mat out) {{
  attention<4, 2, 64, Kv::bf16>(p, b, q, pool, a, out); }}
EXPORT Pool* create(int n, int* error) {{ return pool_create(n, error); }}
"""


@pytest.fixture(scope="module", params=[PORTABLE, V3, VNNI_EMULATED, V4, ON_AVXVNNI, *EMULATED])
def unit(request):
    return Unit(WRAPPERS, require(request.param))


@pytest.mark.parametrize("mcpu", [V4, *(pytest.param(m, marks=pytest.mark.cross) for m in (AVXVNNI, AARCH64))])
def test_other_targets_compile(mcpu):
    assert compile_unit(ELSEWHERE, mcpu).exists()


class Quantized:
    """The int8 form of x for products with weights of a format."""

    def __init__(self, unit, fmt, x, threads=1):
        rows, k = x.shape
        groups = -(-k // 32)
        wide = fmt == "w8" and unit.call("widened", FORMATS.index(fmt)) == 1
        self._q = np.full((rows, groups * 8, 4), 77, np.int16 if wide else np.int8)
        self.scale = np.full((rows, groups), np.nan, np.float32)
        self.sum = np.full((rows, groups), -1, np.int32)
        self.buf = QuantBuf(self._q.ctypes.data, self.scale.ctypes.data, self.sum.ctypes.data)
        self.buf.arrays = (self._q, self.scale, self.sum)
        unit.run(f"quantize_{k}_{fmt}", rows, x, self.buf, threads=threads)
        self.q = (self._q[..., [0, 2, 1, 3]] if wide else self._q).reshape(rows, groups * 32)

    def values(self, k):
        grouped = self.q.reshape(*self.scale.shape, 32) * self.scale.astype(np.float64)[..., None]
        return grouped.reshape(self.q.shape)[:, :k]


class Packed:
    def __init__(self, fmt, w, up=None):
        layout = pack.packed_layout(find_format(fmt), *w.shape, gated=up is not None)
        self.memory = aligned_bytes(pack.pack(find_format(fmt), w, up))
        at = {r.name: self.memory.ctypes.data + r.offset for r in layout.regions}
        self.weight = Weight(at["data"], at.get("scale"), at.get("min"))
        self.weight.arrays = (self.memory,)


def product(unit, name, fmt, x, packed, n, bias, residual, threads=1, out=None):
    t = len(x)
    result = new_mat(t, n) if out is None else out
    source = x
    if fmt in ("w8", "w4"):
        source = Quantized(unit, fmt, x, threads).buf
    unit.run(f"{name}_{fmt}", t, source, packed.weight, bias, residual, result, threads=threads)
    return checked(result, t, n)


def inputs(fmt, t, n, k, seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((t, k)).astype(np.float32)
    w = rng.standard_normal((n, k)).astype(np.float32)
    bias, residual = rng.standard_normal(n).astype(np.float32), rng.standard_normal((t, n)).astype(np.float32)
    return x, w, bias, residual


def effective(unit, fmt, x):
    """The activations that the product really uses, float64."""
    if fmt not in ("w8", "w4"):
        return x.astype(np.float64)
    return Quantized(unit, fmt, x).values(x.shape[1])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("t", [0, 1, 2, 3, 4, 5, 7, 13, 33, 71])
def test_linear(unit, fmt, t):
    x, w, bias, residual = inputs(fmt, t, N, K, t)
    x[t // 2 : t // 2 + 1] = 0
    packed = Packed(fmt, w)
    got = product(unit, "linear", fmt, x, packed, N, bias, residual)
    a, b = effective(unit, fmt, x), pack.fake_quantize(find_format(fmt), w).astype(np.float64)
    tolerance = 1e-6 * (np.abs(a) @ np.abs(b).T + 1)
    assert (np.abs(got - (a @ b.T + bias + residual)) <= tolerance).all()
    plain = product(unit, "linear", fmt, x, packed, N, None, NO_MAT)
    assert (np.abs(plain - a @ b.T) <= tolerance).all()


@pytest.mark.parametrize("t", [1, 5, 33])
def test_int8_weights_use_the_lowest_code(unit, t):
    """-128 comes from checkpoints that are quantised already; whole groups of it meet the largest activations."""
    rng = np.random.default_rng(t)
    q = rng.choice(np.array([-128, 0, 127], np.int8), (N, 4, 32))
    q[0] = -128
    codes = Codes(q, rng.random((N, 4)).astype(np.float16), None, K)
    x = rng.choice(np.array([-1, 1], np.float32), (t, K))
    x[0] = 1
    got = product(unit, "linear", "w8", x, Packed("w8", codes), N, None, NO_MAT)
    a, b = effective(unit, "w8", x), codes.values().astype(np.float64)
    assert (np.abs(got - a @ b.T) <= 1e-6 * (np.abs(a) @ np.abs(b).T + 1)).all()


@pytest.mark.parametrize("fmt", ["f32", "w8"])
def test_blocks_along_k_and_rows(unit, fmt):
    """With many rows the sums of a block are put aside and taken up again: the bits are those of few rows."""
    x, w, bias, residual = inputs(fmt, 131, DEEP_N, DEEP_K, 12)
    packed = Packed(fmt, w)
    got = product(unit, "deep", fmt, x, packed, DEEP_N, bias, residual, threads=2)
    a, b = effective(unit, fmt, x), pack.fake_quantize(find_format(fmt), w).astype(np.float64)
    assert (np.abs(got - (a @ b.T + bias + residual)) <= 1e-6 * (np.abs(a) @ np.abs(b).T + 1)).all()
    for begin, end in [(0, 64), (60, 71), (130, 131)]:
        part = product(unit, "deep", fmt, x[begin:end], packed, DEEP_N, bias, residual[begin:end])
        assert np.array_equal(part.view(np.uint32), got[begin:end].view(np.uint32))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("t", [1, 6, 11, 67])
def test_gated_linear(unit, fmt, t):
    x, gate, bias, residual = inputs(fmt, t, GATED_N, GATED_K, 20 + t)
    up, up_bias = inputs(fmt, t, GATED_N, GATED_K, 40 + t)[1:3]
    biases = np.concatenate([bias, up_bias])
    got = product(unit, "gated", fmt, x, Packed(fmt, gate, up), GATED_N, biases, residual)
    a = effective(unit, fmt, x)
    g = a @ pack.fake_quantize(find_format(fmt), gate).astype(np.float64).T + bias
    u = a @ pack.fake_quantize(find_format(fmt), up).astype(np.float64).T + up_bias
    want = g / (1 + np.exp(-g)) * u + residual
    assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()


def test_activation_comes_before_the_residual(unit):
    x, w, bias, residual = inputs("f32", 5, N, K, 60)
    got = product(unit, "gelu", "f32", x, Packed("f32", w), N, bias, residual)
    linear = torch.nn.functional.linear(*(torch.from_numpy(a).double() for a in (x, w, bias)))
    want = torch.nn.functional.gelu(linear).numpy() + residual
    assert np.abs(got - want).max() <= 2e-5


@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_do_not_depend_on_their_batch_or_threads(unit, fmt):
    x, w, bias, residual = inputs(fmt, 79, N, K, 70)
    packed = Packed(fmt, w)
    whole = product(unit, "linear", fmt, x, packed, N, bias, residual)
    for threads in (2, 3, 7):
        assert np.array_equal(whole, product(unit, "linear", fmt, x, packed, N, bias, residual, threads))
    for begin, end in [(0, 1), (78, 79), (3, 5), (4, 12), (7, 10), (0, 28), (11, 78)]:
        part = product(unit, "linear", fmt, x[begin:end], packed, N, bias, residual[begin:end])
        assert np.array_equal(part.view(np.uint32), whole[begin:end].view(np.uint32))


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_residual_may_be_the_output(unit, fmt):
    x, w, bias, residual = inputs(fmt, 9, N, K, 80)
    packed = Packed(fmt, w)
    want = product(unit, "linear", fmt, x, packed, N, bias, residual)
    out = new_mat(9, N)
    out[:9, :N] = residual
    got = product(unit, "linear", fmt, x, packed, N, bias, as_mat(out), out=out)
    assert np.array_equal(got, want)


def test_integer_sums_never_saturate(unit):
    """Every weight and activation at +-127: the sums are the largest that occur, and exact."""
    rng = np.random.default_rng(90)
    for signs in (np.ones, lambda s: rng.choice([-1.0, 1.0], s)):
        x = (127 * signs((6, K))).astype(np.float32)
        w = (127 * signs((N, K))).astype(np.float32)
        assert np.array_equal(product(unit, "linear", "w8", x, Packed("w8", w), N, None, NO_MAT), x @ w.T)
        w = np.where(w > 0, 15, 0).astype(np.float32)
        w[:, ::7] = 0
        assert np.array_equal(product(unit, "linear", "w4", x, Packed("w4", w), N, None, NO_MAT), x @ w.T)


@pytest.mark.parametrize("mcpu", [VNNI_EMULATED, V4, ON_AVXVNNI, *EMULATED])
def test_instruction_sets_agree_bit_for_bit(mcpu):
    """The integer sums are exact, and with FMA the float operations are the same."""
    x, w, bias, residual = inputs("w8", 19, N, K, 95)
    units = [Unit(WRAPPERS, require(m)) for m in (V3, mcpu)]
    for fmt in FORMATS:
        packed = Packed(fmt, w)
        for t in range(1, 20):
            args = (fmt, x[:t], packed, N, bias, residual[:t])
            here, there = (product(u, "linear", *args) for u in units)
            assert np.array_equal(here.view(np.uint32), there.view(np.uint32)), (fmt, t)
        gated = Packed(fmt, w[:GATED_N, :GATED_K], w[-GATED_N:, -GATED_K:])
        args = (fmt, x[:, :GATED_K], gated, GATED_N, None, NO_MAT)
        here, there = (product(u, "gated", *args) for u in units)
        assert np.array_equal(here.view(np.uint32), there.view(np.uint32)), fmt


@pytest.mark.parametrize("fmt", ["w8", "w4"])
@pytest.mark.parametrize("k", [K, GATED_K, SHORT_K])
def test_quantize(unit, k, fmt):
    rng = np.random.default_rng(k)
    x = (rng.standard_normal((11, k)) * 10.0 ** rng.uniform(-6, 6, (11, 1))).astype(np.float32)
    x[2] = 0
    x[3, :32] = 0
    x[4] = np.where(x[4] > 0, 127, -127)
    x[5, :16] = [
        0.5,
        1.5,
        2.5,
        -0.5,
        -1.5,
        -2.5,
        127,
        3.5,
        -3.5,
        4.5,
        0,
        0,
        0,
        0,
        0,
        126.5,
    ]  # ties, at scale 1
    x[5, 16:32] = 0
    x[6] = 1e-42
    got = Quantized(unit, fmt, x, threads=3)
    padded = np.pad(x, ((0, 0), (0, -k % 32))).reshape(11, -1, 32)
    scale = np.abs(padded).max(axis=-1) / np.float32(127)
    with np.errstate(all="ignore"):
        q = np.where(scale[..., None] > 0, np.rint(padded / scale[..., None]), 0)
    q = np.clip(q, -127, 127).astype(np.int8)
    assert np.array_equal(got.scale, scale)
    assert np.array_equal(got.q, q.reshape(11, -1))
    total = q.astype(np.int32).sum(axis=-1)
    assert np.array_equal(got.sum, -128 * total if fmt == "w8" else total.astype(np.float32).view(np.int32))


@pytest.mark.parametrize("fmt", ["w8", "w4"])
def test_a_nan_or_infinity_spoils_its_own_row_only(unit, fmt):
    x, w, _, _ = inputs(fmt, 5, N, K, 97)
    packed = Packed(fmt, w)
    want = product(unit, "linear", fmt, x, packed, N, None, NO_MAT)
    x[0, 3], x[2, 99], x[3, 40] = np.nan, np.inf, -np.inf
    got = product(unit, "linear", fmt, x, packed, N, None, NO_MAT)
    assert np.isnan(got[[0, 2, 3]]).all()
    assert np.array_equal(got[[1, 4]], want[[1, 4]])


@pytest.mark.parametrize("fmt", FORMATS)
def test_embed_reads_the_packed_matrix(unit, fmt):
    w = inputs(fmt, 1, N, K, 100)[1]
    ids = np.array([0, 15, 16, 71, 3, 71, 40], np.int32) - 2
    ids[0] = 5
    packed = Packed(fmt, w)
    out = new_mat(7, K)
    unit.run(f"embed_{fmt}", 7, ids, 2, packed.weight, 1.0, out, threads=2)
    want = pack.fake_quantize(find_format(fmt), w)[ids + 2]
    tolerance = 1e-6 if fmt == "w4" else 0  # scale * u + min in two roundings or one
    assert (np.abs(checked(out, 7, K) - want) <= tolerance).all()
    scaled = new_mat(7, K)
    unit.run(f"embed_{fmt}", 7, ids, 2, packed.weight, 24.0, scaled)
    assert np.array_equal(checked(scaled, 7, K), checked(out, 7, K) * np.float32(24))


def test_packer_and_kernels_agree_on_sizes(unit):
    for i, fmt in enumerate(FORMATS):
        for k in (1, 31, 32, 100, 4096):
            assert (
                unit.call("packed_tile_bytes", i, k)
                == pack.packed_layout(find_format(fmt), 16, k).regions[0].tile_bytes
            )
