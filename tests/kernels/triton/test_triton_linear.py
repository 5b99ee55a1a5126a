"""Matrix products against the dialect, and bit for bit over tilings and numbers of tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_harness import (
    DEVICE,
    F16,
    SLACK,
    TRITON_TYPES,
    DeviceWeight,
    Form,
    ceil_div,
    converted,
    launch,
    meta,
    same_bits,
)

from llmc.kernels.codes import Codes
from llmc.kernels.dialect import OPS
from llmc.kernels.formats import find_format
from llmc.kernels.quant import fake_quantize
from llmc.kernels.triton.linear import linear

INTEGER, WIDENED = ("w8", "w4"), ("w8a16", "w4a16")
F32 = torch.float32
BN = 64 if DEVICE else 32
"""Outputs of a tile: tensor cores that take 64 rows at a time have no smaller tile for floating products."""


def product(
    weight, x, *, fmt=None, act="none", bias=None, residual=None, out="f32", half=F16, bn=BN, bt=16, bk=32, widen=False
):
    """x a Form, residual [T, N] float32 -> Form [T, N] computed by the kernel over a capacity of T + 3 rows."""
    y = Form.empty(out, x.rows + 3, x.rows, weight.n, half)
    launch(
        linear, (ceil_div(x.rows, bt), ceil_div(weight.n, bn)), **x.inputs(), w=weight.w, ws=weight.ws, bias=bias,
        residual=residual, **y.outputs(), meta=meta(rows=x.rows), N=weight.n, K=weight.k, LDX=x.ld, LDR=weight.n,
        LDY=y.ld, ROWS=weight.rows, KP=weight.kp, COUNT=1, FORMAT=fmt or weight.fmt, ACT=act, GATED=weight.gated,
        OUT=out, HALF=TRITON_TYPES[half], BN=bn, BT=bt, BK=bk, WIDEN=widen, STAGES=3,
    )  # fmt: skip
    return y


def inputs(t, n, k, seed=0, gated=False):
    rng = np.random.default_rng(seed)
    parts = [rng.standard_normal((n, k)).astype(np.float32) for _ in range(2 if gated else 1)]
    x, bias, residual = (
        torch.from_numpy(rng.standard_normal(shape).astype(np.float32)) for shape in ((t, k), (n * len(parts),), (t, n))
    )
    return parts, x, bias, residual


def dialect(fmt, x, parts, bias=None, residual=None, act="none"):
    """The dialect's result. For 16-bit products, on weights rounded to float16 after their format."""
    w = torch.from_numpy(np.concatenate(parts))
    if fmt in WIDENED or fmt == "bf16":
        w, fmt = fake_quantize(w, find_format(fmt)).to(F16).float(), "f32"
    return OPS["linear"](x, w, bias, residual, act, len(parts) == 2, fmt)


def close(got, want, tolerance):
    """Largest difference relative to the largest value."""
    assert got.shape == want.shape
    assert (got - want).abs().max() <= SLACK * tolerance * want.abs().max()


def stored(fmt, parts, device_type=F16):
    base = fmt.removesuffix("a16")
    return DeviceWeight(base, *parts, dtype=F32 if base == "f32" else device_type)


def tilings(fmt, gated, *interpreted):
    """Tiles to compare: on a device all that plans have for it, in the interpreter those that are given."""
    if not DEVICE:
        return interpreted
    from gpu_launch import linear_configs

    found = [config.constants for config in linear_configs(fmt, gated)]
    return [{"bn": c["BN"], "bt": c["BT"], "bk": c["BK"], "widen": c["WIDEN"]} for c in found]


def activations(fmt, x):
    """x in the form that a format's product takes, and its values as float32."""
    kind = "q8" if fmt in INTEGER else "f32" if fmt == "f32" else "half"
    form = converted(x, kind, F16, capacity=x.shape[0] + 2)
    return form, (x if kind == "q8" else form.values())


@pytest.mark.parametrize("t", [1, 17])
@pytest.mark.parametrize("fmt", ["w8", "w4", "w8a16", "w4a16", "bf16", "f32"])
def test_plain(fmt, t):
    """Odd N and K, bias and residual; against the dialect within float32 rounding."""
    parts, x, bias, residual = inputs(t, 72, 100)
    form, values = activations(fmt, x)
    got = product(stored(fmt, parts), form, fmt=fmt, bias=bias, residual=residual, bn=64)
    close(got.values(), dialect(fmt, values, parts, bias, residual), 1e-6)


@pytest.mark.parametrize("fmt", ["w8", "w8a16"])
def test_int8_weights_use_the_lowest_code(fmt):
    rng = np.random.default_rng(5)
    q = rng.choice(np.array([-128, 0, 127], np.int8), (72, 4, 32))
    q[0] = -128
    codes = Codes(q, rng.random((72, 4)).astype(np.float16), None, 100)
    x = torch.from_numpy(rng.choice(np.array([-1, 1], np.float32), (5, 100)))
    form, values = activations(fmt, x)
    got = product(DeviceWeight("w8", codes), form, fmt=fmt, bn=64)
    close(got.values(), values @ torch.from_numpy(codes.values()).T, 1e-3 if fmt == "w8a16" else 1e-6)


@pytest.mark.parametrize("fmt", ["w8", "w4", "w8a16", "w4a16", "bf16", "f32"])
def test_gated(fmt):
    """N not a multiple of 16, so that gate and up rows are padded apart; K a multiple of 32 but not of 64."""
    parts, x, bias, residual = inputs(5, 40, 96, seed=1, gated=True)
    form, values = activations(fmt, x)
    got = product(stored(fmt, parts), form, fmt=fmt, act="silu", bias=bias, residual=residual)
    close(got.values(), dialect(fmt, values, parts, bias, residual, "silu"), 1e-6)


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "tanh"])
def test_activations(act):
    parts, x, bias, _ = inputs(5, 32, 64, seed=2)
    x = x * torch.tensor([[1e-3], [0.03], [0.3], [1], [100]])  # from the linear part to saturation
    weight, form = stored("f32", parts), converted(x, "f32", F16)
    want = OPS["act"](product(weight, form, bias=bias).values(), act)
    got = product(weight, form, act=act, bias=bias).values()
    torch.testing.assert_close(got, want, rtol=1e-5 * SLACK, atol=1e-6 * SLACK)


@pytest.mark.parametrize("fmt", ["w8", "f32"])
@pytest.mark.parametrize("gated", [False, True])
def test_forms_of_the_result(fmt, gated):
    """Form "half" is the float32 result rounded, "q8" what `convert` makes of it, to the bit; N = 72 pads to 96."""
    parts, x, bias, residual = inputs(9, 72, 64, seed=3, gated=gated)
    weight, form = stored(fmt, parts), activations(fmt, x)[0]
    args = {"fmt": fmt, "bias": bias, "residual": residual, "bn": 64}
    full = product(weight, form, **args)
    assert torch.equal(product(weight, form, out="half", **args).values(), full.values().to(F16).float())
    want = converted(full.values(), "q8", F16, capacity=12)
    assert same_bits(product(weight, form, out="q8", **args), want)


@pytest.mark.parametrize("fmt", ["w8", "w4"])
@pytest.mark.parametrize("gated", [False, True])
def test_integer_bits(device_sums, fmt, gated):
    """Tiles, tokens beside it and the width of the multiplication change no bit of a row."""
    parts, x, _, residual = inputs(33, 72, 160, seed=4, gated=gated)
    weight = stored(fmt, parts)
    whole = converted(x, "q8", F16)
    want = product(weight, whole, act="silu", residual=residual)
    tiles = tilings(fmt, gated, {"bn": 64, "bt": 32}, {"bn": 128, "bt": 64})
    for options in (*tiles, {"widen": True, "bn": 64}):
        assert same_bits(product(weight, whole, act="silu", residual=residual, **options), want)
    got = product(weight, converted(x[20:25], "q8", F16), act="silu", residual=residual[20:25].contiguous())
    assert torch.equal(got.values(), want.values()[20:25])


@pytest.mark.parametrize("fmt", ["w8", "w4"])
def test_integer_arithmetic(device_sums, fmt):
    """Exact sums of a group, then one fused multiply-add per group, and one for the minima: to the bit."""
    parts, x, _, _ = inputs(3, 24, 96, seed=9)
    weight, form = stored(fmt, parts), converted(x, "q8", F16)
    q, xs, xsum = (o.checked().numpy() for o in (form.y, form.ys, form.ysum))
    u, scale, low = weight.levels()
    acc = np.zeros((weight.rows, 3), np.float32)
    for g in range(3):
        at = slice(g * 32, g * 32 + 32)
        total = (u[:, at].astype(np.int32) @ q[:, at].T.astype(np.int32)).astype(np.float64)
        acc = (total * (scale[:, g, None] * xs[None, :, g]) + acc).astype(np.float32)
        if fmt == "w4":
            acc = (low[:, g, None].astype(np.float64) * (xs[:, g] * xsum[:, g]) + acc).astype(np.float32)
    assert np.array_equal(product(weight, form).values().numpy(), acc[:24].T)


@pytest.mark.parametrize("fmt", ["w8a16", "w4a16", "bf16", "f32"])
def test_floating_bits(device_sums, fmt):
    """As long as a product sums along K in order, tiles and other tokens change no bit of a row either."""
    parts, x, _, _ = inputs(33, 72, 100, seed=5)
    weight, form = stored(fmt, parts), activations(fmt, x)[0]
    want = product(weight, form, fmt=fmt)
    for options in tilings(fmt, False, {"bn": 64, "bt": 16, "bk": 64}, {"bn": 128, "bt": 64, "bk": 32}):
        assert same_bits(product(weight, form, fmt=fmt, **options), want), options
    got = product(weight, activations(fmt, x[20:25])[0], fmt=fmt)
    assert torch.equal(got.values(), want.values()[20:25])


@pytest.mark.parametrize("fmt", ["w8a16", "w4a16", "bf16"])
def test_half_is_float32(fmt):
    """A GPU without 16-bit products: everything widened to float32."""
    parts, x, _, _ = inputs(3, 40, 100, seed=6)
    weight = stored(fmt, parts, F32)
    got = product(weight, converted(x, "half", F32), fmt=fmt, half=F32).values()
    w = fake_quantize(torch.from_numpy(parts[0]), find_format(fmt))
    close(got, dialect("f32", x, [w.numpy()]), 1e-6)


@pytest.mark.parametrize("widen", [False, True])
def test_saturated_integers(widen):
    """The largest sums there are, +-32 * 127 * 127 a group, are exact."""
    signs = np.where(np.arange(16) % 2, -1, 1).astype(np.float32)[:, None]
    w = np.full((16, 128), 127, np.float32) * signs
    x = torch.full((2, 128), 127.0) * torch.tensor([[1], [-1]])
    got = product(DeviceWeight("w8", w), converted(x, "q8", F16), widen=widen).values()
    assert torch.equal(got, x @ torch.from_numpy(w).T)


def test_no_tokens():
    """With 0 tokens in the step nothing is written, also by programs that a larger grid brings."""
    parts, _, _, _ = inputs(1, 16, 64)
    weight, x, y = stored("w8", parts), Form.empty("q8", 4, 0, 64, F16), Form.empty("f32", 4, 0, 16, F16)
    launch(
        linear, (1, 1), **x.inputs(), w=weight.w, ws=weight.ws, **y.outputs(), meta=meta(), N=16, K=64, LDX=64,
        LDR=16, LDY=16, ROWS=16, KP=64, COUNT=0, FORMAT="w8", ACT="none", GATED=False, OUT="f32",
        HALF=TRITON_TYPES[F16], BN=BN, BT=16, BK=32, WIDEN=False, STAGES=3,
    )  # fmt: skip
    assert y.values().shape == (0, 16)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("fmt", ["w8", "w4", "f32", "w8a16"])
def test_not_finite_input(fmt, bad):
    """A NaN or infinity in one token makes its outputs not finite, never plausible, and touches no other token."""
    parts, x, _, _ = inputs(5, 40, 90, seed=7)  # 3 groups: the weights have a fourth, which no input may meet
    weight = stored(fmt, parts)
    clean = product(weight, activations(fmt, x)[0], fmt=fmt, out="f32").values()
    x[2, 5] = bad
    for out in ("f32", "q8"):
        got = product(weight, activations(fmt, x)[0], fmt=fmt, out=out).values()
        assert not got[2].isfinite().any()
        others = [0, 1, 3, 4]
        close(got[others], clean[others], 0.0 if out == "f32" else 0.01)


@pytest.mark.parametrize("fmt", ["f32", "bf16"])
def test_not_finite_weight(fmt):
    """It spoils the outputs of its row alone, and the activation does not hide it."""
    parts, x, _, _ = inputs(5, 40, 100, seed=8)
    form = activations(fmt, x)[0]
    clean = product(stored(fmt, parts), form, fmt=fmt, act="relu").values()
    weight = stored(fmt, parts)
    weight.w.data[33, 99] = float("nan")
    got = product(weight, form, fmt=fmt, act="relu").values()
    assert got[:, 33].isnan().all()
    got[:, 33] = clean[:, 33]
    assert torch.equal(got, clean)
