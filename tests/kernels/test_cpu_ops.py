"""Norms, rotary embedding and elementwise kernels, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cpu_harness import EMULATED, PORTABLE, V3, Unit, as_mat, checked, new_mat, require

C = 50  # of one segment; not a multiple of the vector width
WRAPPERS = f"""
EXPORT void rms(Par p, int t, Mat x, const float* w, float eps, Mat out) {{
  rms_norm<1, {C}>(p, t, x, w, eps, out); }}
EXPORT void rms_heads(Par p, int t, Mat x, const float* w, float eps, Mat out) {{
  rms_norm<3, 32>(p, t, x, w, eps, out); }}
EXPORT void rms_add(Par p, int t, Mat x, const float* w, float eps, Mat residual, Mat out) {{
  rms_norm_add<1, {C}>(p, t, x, w, eps, residual, out); }}
EXPORT void layer(Par p, int t, Mat x, const float* w, const float* b, float eps, Mat out) {{
  layer_norm<1, {C}>(p, t, x, w, b, eps, out); }}
EXPORT void layer_heads(Par p, int t, Mat x, const float* w, const float* b, float eps, Mat out) {{
  layer_norm<3, 32>(p, t, x, w, b, eps, out); }}
EXPORT void table(Par p, int t, const int32_t* positions, const float* f, float s, Mat out) {{
  rope_table<20>(p, t, positions, f, s, out); }}
EXPORT void table_64(Par p, int t, const int32_t* positions, const float* f, float s, Mat out) {{
  rope_table<64>(p, t, positions, f, s, out); }}
EXPORT void rotate(Par p, int t, Mat x, Mat table, Mat out) {{ rope<3, 32, 20, false>(p, t, x, table, out); }}
EXPORT void rotate_64(Par p, int t, Mat x, Mat table, Mat out) {{ rope<2, 64, 64, false>(p, t, x, table, out); }}
EXPORT void rotate_pairs(Par p, int t, Mat x, Mat table, Mat out) {{ rope<3, 32, 20, true>(p, t, x, table, out); }}
EXPORT void rotate_pairs_64(Par p, int t, Mat x, Mat table, Mat out) {{ rope<2, 64, 64, true>(p, t, x, table, out); }}
EXPORT void k_add(Par p, int t, Mat a, Mat b, Mat out) {{ add<{C}>(p, t, a, b, out); }}
EXPORT void k_mul(Par p, int t, Mat a, Mat b, Mat out) {{ mul<{C}>(p, t, a, b, out); }}
EXPORT void k_bias(Par p, int t, Mat a, const float* b, Mat out) {{ add_bias<{C}>(p, t, a, b, out); }}
EXPORT void k_scale(Par p, int t, Mat a, float s, Mat out) {{ scale<{C}>(p, t, a, s, out); }}
EXPORT void k_act(Par p, int t, Mat a, Mat out) {{ act<Act::gelu_tanh, {C}>(p, t, a, out); }}
EXPORT void k_gated(Par p, int t, Mat g, Mat u, Mat out) {{ gated_act<Act::silu, {C}>(p, t, g, u, out); }}
EXPORT void k_softcap(Par p, int t, Mat a, float cap, Mat out) {{ softcap<{C}>(p, t, a, cap, out); }}
EXPORT void k_copy(Par p, int t, Mat a, Mat out) {{ copy<{C}>(p, t, a, out); }}
EXPORT void k_select(Par p, int r, const int32_t* rows, Mat a, Mat out) {{
  select_rows<{C}>(p, r, rows, a, out); }}
"""


@pytest.fixture(scope="module", params=[PORTABLE, V3, *EMULATED])
def unit(request):
    return Unit(WRAPPERS, require(request.param))


def rows(t, c, seed=0):
    return np.random.default_rng(seed).standard_normal((t, c)).astype(np.float32)


def call(unit, name, t, columns, *args, threads=1):
    out = new_mat(t, columns)
    unit.run(name, t, *args, out, threads=threads)
    return checked(out, t, columns)


def reference_norm(x, heads, w, b, eps, kind):
    x = torch.from_numpy(x).double().reshape(len(x), heads, x.shape[1] // heads)
    if kind == "rms":
        y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    else:
        y = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps)
    y = y if w is None else y * torch.from_numpy(w)
    return (y if b is None else y + torch.from_numpy(b)).flatten(1).numpy()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("suffix", "heads", "c"), [("", 1, C), ("_heads", 3, 32)])
@pytest.mark.parametrize("t", [0, 1, 5])
def test_norms(unit, suffix, heads, c, t, weighted):
    x = rows(t, heads * c, t) * 3 + 1
    w, b = (rows(1, c, 1)[0], rows(1, c, 2)[0]) if weighted else (None, None)
    got = call(unit, "rms" + suffix, t, heads * c, x, w, 1e-5)
    assert np.abs(got - reference_norm(x, heads, w, None, 1e-5, "rms")).max(initial=0) <= 3e-6
    got = call(unit, "layer" + suffix, t, heads * c, x, w, b, 1e-5)
    assert np.abs(got - reference_norm(x, heads, w, b, 1e-5, "layer")).max(initial=0) <= 5e-6


def test_norm_adds_a_residual_also_in_place(unit):
    x, residual, w = rows(5, C, 20), rows(5, C, 21), rows(1, C, 22)[0]
    want = call(unit, "rms", 5, C, x, w, 1e-5) + residual
    assert np.array_equal(call(unit, "rms_add", 5, C, x, w, 1e-5, as_mat(residual)), want)
    unit.run("rms_add", 5, x, w, 1e-5, as_mat(residual), as_mat(residual))
    assert np.array_equal(residual, want)


def test_norm_of_zeros_is_finite(unit):
    assert (call(unit, "rms", 2, C, np.zeros((2, C), np.float32), None, 1e-6) == 0).all()
    assert (call(unit, "layer", 2, C, np.zeros((2, C), np.float32), None, None, 1e-6) == 0).all()


def test_norms_and_rope_in_place(unit):
    w = rows(1, C, 3)[0]
    for name, args in (("rms", (w, 1e-6)), ("layer", (w, w, 1e-6))):
        x = rows(4, C, 4)
        want = call(unit, name, 4, C, x, *args)
        unit.run(name, 4, x, *args, as_mat(x))
        assert np.array_equal(x, want)
    table, x = rows(4, 20, 5), rows(4, 96, 6)
    for name in ("rotate", "rotate_pairs"):
        want = call(unit, name, 4, 96, x, table)
        unit.run(name, 4, x, table, x)
        assert np.array_equal(x, want)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("name", "rot"), [("table", 20), ("table_64", 64)])
def test_rope_table_is_what_the_models_compute(unit, name, rot, sign):
    positions = np.array([0, 1, 17, 4095, 131071, 999_999], np.int32)
    inv_freq = (sign / 1e5 ** (np.arange(0, rot, 2) / rot)).astype(np.float32)
    got = call(unit, name, 6, rot, positions, inv_freq, 1.25)
    angles = torch.from_numpy(positions).float()[:, None] * torch.from_numpy(inv_freq)
    want = torch.cat([angles.double().cos(), angles.double().sin()], dim=-1).numpy() * 1.25
    assert np.abs(got - want).max() <= 1.25 * 6e-8 + 8e-8


@pytest.mark.parametrize(("name", "h", "d", "rot"), [("rotate", 3, 32, 20), ("rotate_64", 2, 64, 64)])
def test_rope_rotates_halves(unit, name, h, d, rot):
    x, table = rows(5, h * d, 7), rows(5, rot, 8)
    got = call(unit, name, 5, h * d, x, table).reshape(5, h, d)
    heads = x.astype(np.float64).reshape(5, h, d)
    cos, sin = table[:, None, : rot // 2], table[:, None, rot // 2 :]
    a, b = heads[..., : rot // 2], heads[..., rot // 2 : rot]
    want = np.concatenate([a * cos - b * sin, b * cos + a * sin, heads[..., rot:]], axis=-1)
    assert np.abs(got - want).max() <= 1e-6
    assert np.array_equal(got[..., rot:], x.reshape(5, h, d)[..., rot:])


@pytest.mark.parametrize(("name", "h", "d", "rot"), [("rotate_pairs", 3, 32, 20), ("rotate_pairs_64", 2, 64, 64)])
def test_interleaved_rope_rotates_neighbours(unit, name, h, d, rot):
    """As the half-split form does, of the even elements and then the odd ones: to the bit."""
    x, table = rows(5, h * d, 7), rows(5, rot, 8)
    got = call(unit, name, 5, h * d, x, table).reshape(5, h, d)
    order = [*range(0, rot, 2), *range(1, rot, 2), *range(rot, d)]
    halves = np.ascontiguousarray(x.reshape(5, h, d)[..., order]).reshape(5, h * d)
    want = call(unit, name.replace("_pairs", ""), 5, h * d, halves, table).reshape(5, h, d)
    assert np.array_equal(got[..., order], want)


def test_elementwise(unit):
    a, b = rows(6, C, 9), rows(6, C, 10)
    ta, tb = torch.from_numpy(a), torch.from_numpy(b)
    assert np.array_equal(call(unit, "k_add", 6, C, a, b), a + b)
    assert np.array_equal(call(unit, "k_mul", 6, C, a, b), a * b)
    assert np.array_equal(call(unit, "k_bias", 6, C, a, b[0].copy()), a + b[0])
    assert np.array_equal(call(unit, "k_scale", 6, C, a, 0.3), a * np.float32(0.3))
    assert np.array_equal(call(unit, "k_copy", 6, C, a), a)
    for name, args, want in (
        ("k_act", (a,), torch.nn.functional.gelu(ta, approximate="tanh")),
        ("k_gated", (a, b), torch.nn.functional.silu(ta) * tb),
        ("k_softcap", (a, 0.7), 0.7 * torch.tanh(ta / 0.7)),
    ):
        assert np.abs(call(unit, name, 6, C, *args) - want.numpy()).max() <= 1e-6, name


def test_select_rows(unit):
    a = rows(9, C, 11)
    chosen = np.array([0, 3, 4, 8], np.int32)
    out = new_mat(4, C)
    unit.run("k_select", 4, chosen, a, out, threads=3)
    assert np.array_equal(checked(out, 4, C), a[chosen])


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_share_rows_without_gaps(unit, threads):
    for t in (0, 1, 2, 7):
        x = rows(t, C, 12)
        assert np.array_equal(
            call(unit, "rms", t, C, x, None, 1e-6, threads=threads), call(unit, "rms", t, C, x, None, 1e-6)
        )


def test_a_row_does_not_depend_on_its_batch(unit):
    x = rows(7, C, 13)
    whole = call(unit, "layer", 7, C, x, None, None, 1e-6)
    for t in range(7):
        assert np.array_equal(call(unit, "layer", 1, C, x[t : t + 1], None, None, 1e-6)[0], whole[t])
