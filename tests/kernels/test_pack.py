"""kernels/pack.py: layouts, streaming by blocks, and the values that each format keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmc.kernels import pack
from llmc.kernels.formats import BF16, F32, W4, W8, find_format

FORMATS = ("f32", "bf16", "w8", "w4")


def matrix(n, k, seed=0):
    return np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)


def q4_1_grid(n, groups, seed, full):
    """Rows on a grid of float16 scales and minima, like GGUF's Q4_1; level 0 is used, 15 if `full`."""
    rng = np.random.default_rng(seed)
    scale = (10.0 ** rng.uniform(-4, 0, (n, groups))).astype(np.float16).astype(np.float32)
    low = (-scale * rng.uniform(0, 16, (n, groups))).astype(np.float16).astype(np.float32)
    u = rng.integers(0, 16 if full else 12, (n, groups, 32))
    u[..., 3] = 0
    if full:
        u[..., 8] = 15
    return (u.astype(np.float32) * scale[..., None] + low[..., None]).reshape(n, -1)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(16, 32), (40, 50), (1, 7), (128, 96)])
def test_layout_matches_the_bytes(fmt, n, k):
    layout = pack.packed_layout(find_format(fmt), n, k)
    parts = pack.pack_rows(find_format(fmt), matrix(n, k))
    assert [r.size for r in layout.regions] == [p.nbytes for p in parts]
    assert all(r.offset % 64 == 0 for r in layout.regions)
    ends = [r.offset + r.size for r in layout.regions]
    assert all(end <= r.offset for end, r in zip(ends, layout.regions[1:], strict=False))
    assert ends[-1] <= layout.size == len(pack.pack(find_format(fmt), matrix(n, k)))


@pytest.mark.parametrize("fmt", FORMATS)
def test_blocks_of_rows_concatenate(fmt, monkeypatch):
    w = matrix(100, 70)
    whole = pack.pack_rows(find_format(fmt), w)
    blocks = [pack.pack_rows(find_format(fmt), w[i : i + 32]) for i in range(0, 100, 32)]
    assert all(np.array_equal(np.concatenate(b), a) for a, b in zip(whole, zip(*blocks, strict=True), strict=True))
    monkeypatch.setattr(pack, "_ROWS_AT_ONCE", 16 * 70)
    assert all(np.array_equal(a, b) for a, b in zip(whole, pack.pack_rows(find_format(fmt), w), strict=True))


@pytest.mark.parametrize("fmt", FORMATS)
def test_gated_tiles_alternate(fmt):
    gate, up = matrix(40, 64, 1), matrix(40, 64, 2)
    layout = pack.packed_layout(find_format(fmt), 40, 64, gated=True)
    both = pack.pack_gated_rows(find_format(fmt), gate, up)
    for i, region in enumerate(layout.regions):
        tiles = both[i].reshape(-1, region.tile_bytes)
        assert tiles.size == region.size
        assert np.array_equal(tiles[0::2].reshape(-1), pack.pack_rows(find_format(fmt), gate)[i])
        assert np.array_equal(tiles[1::2].reshape(-1), pack.pack_rows(find_format(fmt), up)[i])


def test_bf16_rounds_like_torch():
    w = np.concatenate([matrix(64, 64), np.float32([[1.00390625, 1.01171875, -0.0, 3e-39] * 16])])
    want = torch.from_numpy(w).to(torch.bfloat16).float().numpy()
    assert np.array_equal(pack.fake_quantize(BF16, w).view(np.uint32), want.view(np.uint32))


def test_w8_stays_in_range_and_close():
    w = matrix(64, 96) * (10.0 ** np.random.default_rng(1).uniform(-5, 4, (64, 1))).astype(np.float32)
    w[3] = 0
    data, scale = pack.pack_rows(W8, w)
    assert data.min() >= 1 and data.max() <= 255
    got = pack.fake_quantize(W8, w)
    amax = np.abs(w.reshape(64, 3, 32)).max(axis=-1)
    step = (scale.view(np.float16).reshape(4, 3, 16).transpose(0, 2, 1).reshape(64, 3)).astype(np.float32)
    assert (step * 127 >= amax).all() and (step <= amax / 127 * 1.001 + 6e-8).all()
    assert (np.abs(got - w).reshape(64, 3, 32) <= step[..., None] * 0.5001).all()
    assert (got[3] == 0).all()


@pytest.mark.parametrize("full", [True, False])
def test_w4_keeps_a_q4_1_grid_exactly(full):
    w = q4_1_grid(256, 6, 3, full)
    assert np.array_equal(pack.fake_quantize(W4, w), w)


def test_w4_error_is_within_half_a_step():
    w = matrix(64, 100)
    w[5] = 0.25
    w[6] = 0
    got = pack.fake_quantize(W4, w)
    padded = np.pad(w, ((0, 0), (0, 28))).reshape(64, 4, 32)
    step = (padded.max(axis=-1) - padded.min(axis=-1)) / 15
    error = np.abs(np.pad(got - w, ((0, 0), (0, 28)))).reshape(64, 4, 32)
    assert (error <= 0.51 * step[..., None] + 2e-3).all()
    assert (got[5] == 0.25).all() and (got[6] == 0).all()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="does not fit int8"):
        pack.pack_rows(W8, np.full((16, 32), 1e7, np.float32))
    with pytest.raises(ValueError, match="does not fit int4"):
        pack.pack_rows(W4, np.full((16, 32), -1e5, np.float32))
    with pytest.raises(ValueError, match="unknown weight format 'w3'"):
        find_format("w3")
    with pytest.raises(ValueError, match="differ in shape"):
        pack.pack_gated_rows(F32, matrix(16, 32), matrix(32, 32))
