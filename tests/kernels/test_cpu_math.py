"""The vector functions of kernels/cpu/vmath.h and simd.h, against float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cpu_harness import EMULATED, PORTABLE, V3, Unit, require

WRAPPERS = """
#define UNARY(name, expression) EXPORT void name(Par, int n, const float* in, float* out) { \\
  for (int i = 0; i < n; i += 16) { f32x16 x = load<f32x16>(in + i); store(out + i, expression); } }
UNARY(v_exp, exp(x))
UNARY(v_exp2, exp2_of_negative(x))
UNARY(v_tanh, tanh(x))
UNARY(v_erf, erf(x))
UNARY(v_sigmoid, sigmoid(x))
UNARY(v_silu, activate<Act::silu>(x))
UNARY(v_gelu, activate<Act::gelu>(x))
UNARY(v_gelu_tanh, activate<Act::gelu_tanh>(x))
UNARY(v_quick_gelu, activate<Act::quick_gelu>(x))
UNARY(v_relu, activate<Act::relu>(x))
UNARY(v_relu2, activate<Act::relu2>(x))
UNARY(v_act_tanh, activate<Act::tanh>(x))
UNARY(v_hsum, splat(hsum(x)))
UNARY(v_hmax, splat(hmax(x)))
EXPORT void v_sincos(Par, int n, const double* in, double* s, double* c) {
  for (int i = 0; i < n; i += 8) {
    f64x8 a, b;
    sincos(load<f64x8>(in + i), a, b);
    store(s + i, a);
    store(c + i, b);
  }
}
EXPORT void v_log(Par, int n, const double* in, double* out) {
  for (int i = 0; i < n; ++i) out[i] = log(in[i]);
}
EXPORT void v_f16(Par, int n, const uint16_t* in, float* out) {
  for (int i = 0; i < n; i += 16) store(out + i, f16_to_f32(load<u16x16>(in + i)));
}
EXPORT void v_bf16(Par, int n, const float* in, uint16_t* out) {
  for (int i = 0; i < n; i += 16) store(out + i, f32_to_bf16(load<f32x16>(in + i)));
}
"""


@pytest.fixture(scope="module", params=[PORTABLE, V3, *EMULATED])
def unit(request):
    return Unit(WRAPPERS, require(request.param))


def apply(unit, name, x):
    x = np.ascontiguousarray(np.resize(x, -(-x.size // 16) * 16), np.float32)
    out = np.empty_like(x)
    unit.run(name, x.size, x, out)
    return x, out


def ulps(got, want):
    """Distance in units in the last place of float32, subnormals counted as 2^-149."""
    unit = np.maximum(np.spacing(np.abs(want).astype(np.float32)), np.float32(2**-149)).astype(np.float64)
    return np.abs(got.astype(np.float64) - want) / unit


def samples(low, high):
    rng = np.random.default_rng(5)
    small = rng.uniform(-1, 1, 40000) * 10.0 ** rng.uniform(-30, 0, 40000)
    return np.concatenate([rng.uniform(low, high, 200000), np.clip(small, low, high), [0.0, -0.0, low, high]])


@pytest.mark.parametrize(
    ("name", "reference", "low", "high"),
    [
        ("v_exp", np.exp, -103.9, 88.7),
        ("v_exp2", np.exp2, -126, 0),
        ("v_tanh", np.tanh, -20, 20),
        ("v_erf", np.vectorize(math.erf), -6, 6),
        ("v_sigmoid", lambda x: 1 / (1 + np.exp(-x)), -87, 80),
    ],
)
def test_within_three_ulps(unit, name, reference, low, high):
    x, got = apply(unit, name, samples(low, high))
    worst = ulps(got, reference(x.astype(np.float64)))
    assert worst.max() <= 3, (worst.max(), x[worst.argmax()])


def test_edges(unit):
    x = np.array([-np.inf, np.inf, np.nan, -104.1, -1e30, 89.5, 1e30, 0.0], np.float32)
    assert np.array_equal(apply(unit, "v_exp", x)[1][:8], [0, np.inf, np.nan, 0, 0, np.inf, np.inf, 1], equal_nan=True)
    falling = np.array([-np.inf, np.nan, -126.01, -1e30, -0.0, 0.0], np.float32)
    assert np.array_equal(apply(unit, "v_exp2", falling)[1][:6], [0, np.nan, 0, 0, 1, 1], equal_nan=True)
    for name in ("v_tanh", "v_erf"):
        got = apply(unit, name, x)[1][:8]
        assert np.array_equal(got, [-1, 1, np.nan, -1, -1, 1, 1, 0], equal_nan=True), name


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("v_silu", torch.nn.functional.silu),
        ("v_gelu", torch.nn.functional.gelu),
        ("v_gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
        ("v_quick_gelu", lambda x: x * torch.sigmoid(1.702 * x)),
        ("v_relu", torch.relu),
        ("v_relu2", lambda x: torch.relu(x) ** 2),
        ("v_act_tanh", torch.tanh),
    ],
)
def test_activations(unit, name, reference):
    x, got = apply(unit, name, samples(-30, 30))
    want = reference(torch.from_numpy(x).double()).numpy()
    assert (np.abs(got - want) <= 5e-7 * np.maximum(np.maximum(np.abs(x), np.abs(want)), 1e-3)).all()


def test_sincos_at_long_positions(unit):
    rng = np.random.default_rng(6)
    x = np.concatenate([rng.uniform(0, 1e6, 100000), np.arange(8), np.arange(1000) * math.pi / 2, [999999.0]])
    x = np.resize(x.astype(np.float32).astype(np.float64), 102016)
    sine, cosine = np.empty_like(x), np.empty_like(x)
    unit.run("v_sincos", x.size, x, sine, cosine)
    assert ulps(sine.astype(np.float32), np.sin(x)).max() <= 0.501
    assert ulps(cosine.astype(np.float32), np.cos(x)).max() <= 0.501


def test_log(unit):
    x = np.concatenate([10.0 ** np.random.default_rng(7).uniform(-30, 30, 5000), [1.0, 2.0, 49152.0]])
    out = np.empty_like(x)
    unit.run("v_log", x.size, x, out)
    assert (np.abs(out - np.log(x)) <= 1e-15 * np.maximum(1, np.abs(np.log(x)))).all()


def test_half_conversions(unit):
    halves = np.arange(65536, dtype=np.uint16)
    halves = halves[np.isfinite(halves.view(np.float16))]
    out = np.empty(halves.size, np.float32)
    unit.run("v_f16", halves.size, halves, out)
    assert np.array_equal(out.view(np.uint32), halves.view(np.float16).astype(np.float32).view(np.uint32))
    rng = np.random.default_rng(8)
    x = rng.integers(0, 2**32, 160000, dtype=np.uint32).view(np.float32)
    got = np.empty(x.size, np.uint16)
    unit.run("v_bf16", x.size, x, got)
    want = torch.from_numpy(x).to(torch.bfloat16)
    back = torch.from_numpy(got.view(np.int16)).view(torch.bfloat16)
    same = (got == want.view(torch.int16).numpy().view(np.uint16)) | (torch.isnan(want) & torch.isnan(back)).numpy()
    assert same.all()


def test_reductions_are_one_tree(unit):
    x = np.random.default_rng(9).standard_normal(16 * 50).astype(np.float32)
    _, sums = apply(unit, "v_hsum", x)
    _, largest = apply(unit, "v_hmax", x)
    rows = x.reshape(-1, 16)
    assert np.array_equal(largest[::16], rows.max(axis=1))
    while rows.shape[1] > 1:
        rows = rows[:, : rows.shape[1] // 2] + rows[:, rows.shape[1] // 2 :]
    assert np.array_equal(sums[::16], rows[:, 0])
