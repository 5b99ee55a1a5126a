"""Weights from the plan's layout to the device's: every element, scale and padding where the definition says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_harness import F16, DeviceWeight

from llmc.kernels import pack
from llmc.kernels.formats import find_format

SHAPES = [(16, 64), (40, 100), (33, 32), (5, 130)]  # N and K: whole, and odd in every way


def expected(fmt, parts, rows, kp):
    """The values of the matrices below each other, each padded to `rows` and kp."""
    padded = np.zeros((len(parts) * rows, kp), np.float32)
    for i, part in enumerate(parts):
        padded[i * rows : i * rows + len(part), : part.shape[1]] = pack.fake_quantize(find_format(fmt), part)
    return padded


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [("w8", None), ("w4", None), ("f32", torch.float32), ("bf16", F16), ("bf16", torch.float32)],
)
def test_values(fmt, dtype, shape, gated):
    rng = np.random.default_rng(sum(shape))
    parts = [rng.standard_normal(shape).astype(np.float32) for _ in range(2 if gated else 1)]
    weight = DeviceWeight(fmt, *parts, dtype=dtype)
    want = expected(fmt, parts, weight.n_rows, weight.kp)
    got = weight.values()
    if dtype == F16:
        want = torch.from_numpy(want).to(F16).float().numpy()
    if fmt == "w4":  # the padding of a group is a level of its grid, and meets inputs that are 0
        k32 = -(-weight.k // 32) * 32
        assert np.abs(got[:, weight.k : k32]).max(initial=0) <= 0.2
        got[:, weight.k : k32] = 0
    np.testing.assert_array_equal(got, want)
    if fmt in ("w8", "w4"):
        assert not weight.levels()[0][:, -(-weight.k // 32) * 32 :].any(), "the padding of a row is not 0"


def test_extreme_integers():
    """-127 and 127, and levels 0 and 15, survive with their signs and places; float16 scales keep all their bits."""
    w = np.tile(np.array([-1.0, 1.0], np.float32), (16, 48)) * (2.0 ** np.arange(-8, 8))[:, None].astype(np.float32)
    for fmt in ("w8", "w4"):
        np.testing.assert_array_equal(DeviceWeight(fmt, w).values()[:, :96], pack.fake_quantize(find_format(fmt), w))
    assert DeviceWeight("w8", w).w.checked().unique().tolist() == [-127, 0, 127]


def test_tile_width_does_not_matter():
    w = np.random.default_rng(1).standard_normal((20, 200)).astype(np.float32)
    for fmt in ("w8", "w4", "bf16"):
        np.testing.assert_array_equal(DeviceWeight(fmt, w, bk=32).values(), DeviceWeight(fmt, w, bk=256).values())
