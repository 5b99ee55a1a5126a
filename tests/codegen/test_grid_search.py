"""codegen/grid_search.py: the compiled search is the one that is written here in numpy, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmc.codegen.grid_search import search_grids
from llmc.kernels.codes import quantize
from llmc.kernels.formats import W4

F = np.float32
STEPS, SHRINK, LEVELS = 4, F(0.15), F(15)


def _sum(x: Any) -> Any:
    """[n, 32] -> [n], in the order of the kernel."""
    v = ((x[:, :8] + x[:, 8:16]) + x[:, 16:24]) + x[:, 24:]
    return ((v[:, 0] + v[:, 4]) + (v[:, 2] + v[:, 6])) + ((v[:, 1] + v[:, 5]) + (v[:, 3] + v[:, 7]))


def _nearest(w: Any, h: Any, scale: Any, minimum: Any) -> tuple[Any, Any]:
    s, m = scale[:, None], minimum[:, None]
    u = np.rint(np.clip((w - m) * (F(1) / s), F(0), LEVELS))
    d = u * s + m - w
    return u, _sum(h * d * d)


def _reference(w: Any, h: Any, scale: Any, minimum: Any) -> tuple[Any, Any]:
    """Groups w, h [n, 32] and the grids to begin with, all of scale > 0."""
    total, moment = _sum(h), _sum(h * w)
    lowest, highest = w.min(-1), w.max(-1)
    span = highest - lowest
    _, least = _nearest(w, h, scale, minimum)
    scale, minimum = scale.copy(), minimum.copy()
    for p in range(STEPS + 1):
        for q in range(STEPS + 1):
            lo = lowest + span * (SHRINK * F(p) / F(STEPS))
            s, m = (highest - span * (SHRINK * F(q) / F(STEPS)) - lo) / LEVELS, lo
            u, _ = _nearest(w, h, s, m)
            alive = np.ones(len(w), bool)
            for _ in range(2):
                hu = h * u
                su, suu, suw = _sum(hu), _sum(hu * u), _sum(hu * w)
                det = total * suu - su * su
                alive &= det > F(1e-6) * total * suu
                safe = np.where(alive, det, F(1))
                s = (total * suw - su * moment) / safe
                m = (moment - s * su) / total
                s16, m16 = s.astype(np.float16).astype(F), m.astype(np.float16).astype(F)
                alive &= (s > 0) & (s16 > 0)
                u, error = _nearest(w, h, np.where(alive, s16, F(1)), m16)
                better = alive & (error < least)
                least[better], scale[better], minimum[better] = error[better], s16[better], m16[better]
    return scale, minimum


@pytest.mark.parametrize("seed", range(4))
def test_the_compiled_search_is_numpys_to_the_bit(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((48, 96)) * np.exp(rng.standard_normal((48, 96)) * seed)).astype(F)
    importance = np.exp(rng.standard_normal(96) * 2).astype(F)
    start = quantize(W4, rows)
    assert start.minimum is not None
    h = np.broadcast_to(importance.reshape(3, 32), (48, 3, 32)).reshape(-1, 32)
    scale, minimum = _reference(
        rows.reshape(-1, 32), h, start.scale.reshape(-1).astype(F), start.minimum.reshape(-1).astype(F)
    )
    got = search_grids(rows, importance)
    assert got.minimum is not None
    np.testing.assert_array_equal(got.scale.reshape(-1).astype(F), scale)
    np.testing.assert_array_equal(got.minimum.reshape(-1).astype(F), minimum)
    codes, _ = _nearest(rows.reshape(-1, 32), h, scale, minimum)
    np.testing.assert_array_equal(got.q.reshape(-1, 32), codes)


def _loss(rows: Any, codes: Any, importance: Any) -> float:
    return float((((codes.values() - rows).astype(np.float64) ** 2) * importance).sum())


def test_the_weighted_error_falls_most_where_columns_weigh_most() -> None:
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((64, 256)).astype(F)
    importance = np.exp(rng.standard_normal(256) * 2).astype(F)
    nearest, found = quantize(W4, rows), search_grids(rows, importance)
    even = search_grids(rows, np.ones(256, F))
    assert _loss(rows, found, importance) < 0.5 * _loss(rows, nearest, importance)
    assert _loss(rows, found, importance) < 0.7 * _loss(rows, even, importance)
    assert _loss(rows, even, np.ones(256)) < 0.9 * _loss(rows, nearest, np.ones(256))


def test_weights_on_a_grid_stay_as_they_are() -> None:
    rng = np.random.default_rng(6)
    u = rng.integers(0, 16, (32, 4, 32))
    u[..., 0] = 0
    scale = rng.uniform(0.01, 0.1, (32, 4, 1)).astype(np.float16).astype(F)
    minimum = rng.uniform(-1, 0, (32, 4, 1)).astype(np.float16).astype(F)
    rows = (u.astype(F) * scale + minimum).reshape(32, 128)
    np.testing.assert_array_equal(search_grids(rows, rng.uniform(0.1, 9, 128).astype(F)).values(), rows)


@pytest.mark.parametrize("k", [1, 31, 33, 100])
def test_odd_lengths_and_constant_rows(k: int) -> None:
    rng = np.random.default_rng(k)
    rows = rng.standard_normal((5, k)).astype(F)
    rows[1], rows[2] = 0.0, -7.25
    found = search_grids(rows, np.ones(k, F)).values()
    assert found.shape == rows.shape
    np.testing.assert_array_equal(found[1:3], rows[1:3])
    assert np.abs(found - rows).max() < 0.35


def test_many_threads_and_blocks_find_what_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(8)
    rows, importance = rng.standard_normal((64, 64)).astype(F), np.ones(64, F)
    whole = search_grids(rows, importance)
    monkeypatch.setattr("llmc.codegen.grid_search._AT_ONCE", 7)
    parts = search_grids(rows, importance)
    np.testing.assert_array_equal(whole.values(), parts.values())
    np.testing.assert_array_equal(whole.q, np.concatenate([search_grids(r[None], importance).q for r in rows]))


def test_weights_beyond_float16_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit int4"):
        search_grids(np.full((1, 32), 1e9, F), np.ones(32, F))
