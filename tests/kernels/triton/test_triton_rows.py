"""Norms, embedding, conversion and elementwise kernels against the dialect."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_harness import F16, SLACK, DeviceWeight, Form, Output, ceil_div, converted, launch, meta, pow2, same_bits

from llmc.kernels.dialect import ACTIVATIONS, OPS
from llmc.kernels.quant import fake_quantize_activations
from llmc.kernels.triton import rows

T = 3


def random(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def normed(x, *, kind="rms", c=None, xc=0, heads=1, weight=None, bias=None, residual=None, out="f32", eps=1e-5):
    """x [T, LDX] -> Form [T, heads * c]; the grid has more rows than the step has tokens."""
    t, ldx = x.shape
    c = ldx if c is None else c
    y = Form.empty(out, t + 2, t, heads * c, F16)
    launch(
        rows.norm, (t + 2, heads), x=x, weight=weight, bias=bias, residual=residual, meta=meta(rows=t), C=c,
        W=pow2(c, 32), XC=xc, LDX=ldx, LDR=heads * c, LDY=y.ld, COUNT=1, KIND=kind, EPS=eps, OUT=out, **y.outputs(),
    )  # fmt: skip
    return y


def close(got, want):
    torch.testing.assert_close(got, want, rtol=2e-6 * SLACK, atol=2e-6 * SLACK)


@pytest.mark.parametrize("c", [32, 72, 100])
def test_rms_norm(c):
    x, weight, residual = random(T, c) * 3, random(c, seed=1), random(T, c, seed=2)
    close(normed(x).values(), OPS["rms_norm"](x, None, 1e-5))
    close(normed(x, weight=weight).values(), OPS["rms_norm"](x, weight, 1e-5))
    close(normed(x, weight=weight, residual=residual).values(), OPS["rms_norm_add"](x, residual, weight, 1e-5))
    assert torch.equal(normed(torch.zeros(T, c)).values(), torch.zeros(T, c))
    close(normed(x * 1e-6, eps=1e-2).values(), OPS["rms_norm"](x * 1e-6, None, 1e-2))


@pytest.mark.parametrize("c", [32, 72])
def test_layer_norm(c):
    x, weight, bias = random(T, c) + 5, random(c, seed=1), random(c, seed=2)
    close(normed(x, kind="layer").values(), OPS["layer_norm"](x, None, None, 1e-5))
    close(normed(x, kind="layer", weight=weight, bias=bias).values(), OPS["layer_norm"](x, weight, bias, 1e-5))


def test_norm_of_heads():
    """Queries and keys normed per head, where they lie in a wider row; one weight for all heads."""
    x, weight, residual = random(T, 200), random(24, seed=1), random(T, 72, seed=2)
    heads = x[:, 50:122].reshape(T, 3, 24)
    want = OPS["rms_norm"](heads, weight, 1e-5).reshape(T, 72)
    close(normed(x, c=24, xc=50, heads=3, weight=weight).values(), want)
    close(normed(x, c=24, xc=50, heads=3, weight=weight, residual=residual).values(), want + residual)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm_in_other_forms(kind):
    """Form "half" and "q8" hold the float32 result rounded, as `convert` does it, to the bit."""
    x, weight = random(T, 72), random(72, seed=1)
    full = normed(x, kind=kind, weight=weight).values()
    for out in ("half", "q8"):
        assert same_bits(normed(x, kind=kind, weight=weight, out=out), converted(full, out, F16))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_norm_does_not_hide_nan(bad):
    x = random(T, 72)
    clean = normed(x).values()
    x[1, 7] = bad
    got = normed(x).values()
    assert got[1, 7].isnan()
    assert torch.equal(got[[0, 2]], clean[[0, 2]])
    assert normed(x, out="q8").values()[1, :32].isnan().all()


@pytest.mark.parametrize(("fmt", "dtype"), [("w8", None), ("w4", None), ("f32", torch.float32), ("bf16", F16)])
def test_embed(fmt, dtype):
    table = random(40, 100).numpy()
    weight, ids, offset = DeviceWeight(fmt, table, dtype=dtype), torch.tensor([0, 37, 5, 5], dtype=torch.int32), 2
    for scale in (1.0, 3.25):
        y = Output((6, 100), torch.float32)
        launch(
            rows.embed, (6,), ids=ids, w=weight.w, ws=weight.ws, y=y, meta=meta(tokens=4), K=100, W=128,
            KP=weight.kp, ROWS=weight.rows, OFFSET=offset, SCALE=scale, FORMAT=fmt,
        )  # fmt: skip
        want = OPS["embed"](ids, torch.from_numpy(table), 1.0, offset, fmt)
        want = (want.to(F16).float() if dtype == F16 else want) * scale
        assert torch.equal(y.checked(4), want)


@pytest.mark.parametrize("c", [5, 32, 72, 200])
def test_convert_q8(c):
    """The same groups, scales and rounding as the dialect's, group by group, and zeros and extremes among them."""
    x = random(5, c) * torch.tensor([[1.0], [1e-30], [1e30], [0.0], [1.0]])
    x[4, :3] = torch.tensor([127.0, 0.5, -126.5])[: min(c, 3)]  # ties round to even
    got = converted(x, "q8", F16, capacity=7)
    torch.testing.assert_close(got.values(), fake_quantize_activations(x), rtol=0, atol=0)
    if c > 2:
        assert got.y.checked(5)[4, :3].tolist() == [127, 0, -126]
    assert converted(x, "half", F16).values().equal(x.to(F16).float())


def test_convert_part_of_a_row():
    x = random(T, 90)
    y = Form.empty("q8", T + 1, T, 40, F16)
    launch(
        rows.convert, (T + 1,), x=x, meta=meta(tokens=T), C=40, W=64, XC=33, LDX=90, LDY=64, COUNT=0, OUT="q8",
        **y.outputs(),
    )  # fmt: skip
    assert same_bits(y, converted(x[:, 33:73].contiguous(), "q8", F16))


def elementwise(kind, a, b=None, *, act="none", value=0.0, ac=0, bc=0, c=None, t=T):
    c = a.shape[1] if c is None else c
    y = Output((t + 1, c), torch.float32)
    launch(
        rows.elementwise, (t + 1, ceil_div(c, 64)), a=a, b=b, y=y, meta=meta(tokens=t), C=c, AC=ac, BC=bc,
        LDA=a.shape[1], LDB=0 if b is None else b.shape[1], COUNT=0, KIND=kind, ACT=act, VALUE=value, BLOCK=64,
    )  # fmt: skip
    return y.checked(t)


@pytest.mark.parametrize("act", sorted(ACTIVATIONS))
def test_activations(act):
    x = torch.cat([torch.linspace(-12, 12, 90), torch.tensor([0.0, -0.0, 90.0, -90.0, 1e-20, 1e5])])[None]
    torch.testing.assert_close(
        elementwise("act", x, act=act, t=1), OPS["act"](x, act), rtol=1e-5 * SLACK, atol=1e-6 * SLACK
    )
    assert elementwise("act", torch.full((1, 8), float("nan")), act=act, t=1).isnan().all()


def test_elementwise():
    """Operands that are parts of wider rows; widths that are no multiple of the block."""
    x, z = random(T, 170), random(T, 100, seed=1)
    a, b = x[:, 30:130], z
    at = {"ac": 30, "c": 100}
    assert elementwise("add", x, z, **at).equal(OPS["add"](a, b))
    assert elementwise("mul", x, z, **at).equal(OPS["mul"](a, b))
    assert elementwise("scale", x, value=0.3, **at).equal(OPS["scale"](a, 0.3))
    close(elementwise("gated_act", x, z, act="silu", **at), OPS["gated_act"](a, b, "silu"))
    close(
        elementwise("gated_act", x, x, act="gelu_tanh", bc=100, c=70),
        OPS["gated_act"](x[:, :70], x[:, 100:], "gelu_tanh"),
    )
    torch.testing.assert_close(
        elementwise("softcap", x * 100, value=30.0), OPS["softcap"](x * 100, 30.0), rtol=1e-6 * SLACK, atol=5e-6 * SLACK
    )


def test_select_rows():
    x, chosen = random(7, 150), torch.tensor([6, 0, 3], dtype=torch.int32)
    y = Output((5, 100), torch.float32)
    launch(
        rows.select_rows, (5, 2), x=x, rows=chosen, y=y, meta=meta(tokens=7, rows=3), C=100, XC=40, LDX=150, BLOCK=64
    )
    assert y.checked(3).equal(OPS["select_rows"](x, chosen)[:, 40:140])
