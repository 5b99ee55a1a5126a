"""kernels/formats.py and kernels/codes.py: the registry, and codes that a format holds exactly."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from llmc.kernels import formats, pack
from llmc.kernels.codes import Codes, grid_codes, quantize, stack
from llmc.kernels.formats import BF16, F32, FORMATS, W4, W4A16, W8, W8A16, Format, find_format

RNG = np.random.default_rng(0)


def codes_of(format: Format, n: int = 16, k: int = 64) -> Codes:
    return quantize(format, RNG.standard_normal((n, k)).astype(np.float32))


def test_every_format_is_found_by_its_name_and_prints_as_it() -> None:
    assert all(find_format(name) is f and str(f) == name for name, f in FORMATS.items())
    with pytest.raises(ValueError, match=r"unknown weight format 'w3'; known: f32, bf16, w8, w4"):
        find_format("w3")


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        formats._registry(W8, Format("w8", 6))


def test_weight_only_formats_share_the_bytes_of_their_integer_twins() -> None:
    assert (W8.weight_only, W4.weight_only) == (W8A16, W4A16)
    assert (W8A16.stored, W4A16.stored, BF16.stored) == (W8, W4, BF16)
    assert pack.packed_layout(W4A16, 40, 50, True) == pack.packed_layout(W4, 40, 50, True)
    assert F32.weight_only is None and W8A16.weight_only is None


def test_the_arithmetic_of_products() -> None:
    assert [f.arithmetic for f in FORMATS.values()] == ["float32", "float16", "int8", "int4", "float16", "float16"]


@pytest.mark.parametrize("format", [W8, W4])
def test_codes_pack_as_the_values_that_they_stand_for(format: Format) -> None:
    codes = codes_of(format, 40, 70)
    assert codes.k == 70 and codes.fit(format) and not codes.fit(W4 if format is W8 else W8)
    np.testing.assert_array_equal(codes.values(), pack.fake_quantize(format, codes.values()))
    packed = pack.pack_rows(format, codes)
    assert [p.size for p in packed] == [r.size for r in pack.packed_layout(format, 40, 70).regions]
    if format is W8:  # quantised again, values give the same codes
        assert all(np.array_equal(a, b) for a, b in zip(packed, pack.pack_rows(format, codes.values()), strict=True))


def test_codes_out_of_a_formats_range_do_not_fit() -> None:
    codes = codes_of(W8)
    for least, fits in ((-128, True), (-129, False)):
        low = Codes(np.where(codes.q == codes.q.min(), least, codes.q.astype(np.int16)), codes.scale, None, codes.k)
        assert low.fit(W8) is fits and (low.held_by(W8) is low) is fits
    wide = Codes(np.full((4, 1, 64), 3, np.int8), np.ones((4, 1), np.float16), None, 64)
    assert not wide.fit(W8), "another group"
    assert not codes.fit(F32)


def test_a_symmetric_grid_is_held_by_an_asymmetric_format() -> None:
    """q = -8 … 7 exactly, by a minimum of -8 scales; other ranges of 16 levels but for the rounding of the minimum."""
    scale = (RNG.random((16, 2)) * 0.01 + 0.001).astype(np.float16)
    for least in (-8, -3, -15, 0):
        q = RNG.integers(least, least + 16, (16, 2, 32)).astype(np.int8)
        q[..., 0], q[..., 1] = least, least + 15
        codes = Codes(q, scale, None, 64)
        held = codes.held_by(W4)
        assert held is not None and held.fit(W4)
        np.testing.assert_array_equal(held.q.astype(int) - (8 if least == -8 else -least), q)
        if least in (-8, 0):
            np.testing.assert_array_equal(held.values(), codes.values())
        np.testing.assert_allclose(held.values(), codes.values(), rtol=0, atol=15 * 2.0**-11 * float(scale.max()))
        assert codes.held_by(W8) is codes
    assert Codes(RNG.integers(-8, 9, (16, 2, 32)).astype(np.int8), scale, None, 64).held_by(W4) is None
    huge = Codes(np.full((1, 1, 32), -8, np.int8), np.full((1, 1), 60000, np.float16), None, 32)
    assert huge.held_by(W4) is None, "the minimum is beyond float16"


def test_an_asymmetric_grid_with_whole_zeros_is_held_by_a_symmetric_format() -> None:
    u = RNG.integers(0, 16, (16, 2, 32)).astype(np.uint8)
    scale = (RNG.integers(1, 50, (16, 2)) / 1024).astype(np.float16)
    zero = RNG.integers(0, 16, (16, 2)).astype(np.float16)
    codes = Codes(u, scale, -zero * scale, 64)
    held = codes.held_by(W8)
    assert held is not None and held.minimum is None and held.fit(W8)
    np.testing.assert_array_equal(held.values(), codes.values())
    assert Codes(u, scale, (-zero - np.float16(0.5)) * scale, 64).held_by(W8) is None
    assert codes.held_by(F32) is None


def test_scales_that_float16_does_not_hold_give_no_codes() -> None:
    q = RNG.integers(-8, 8, (4, 2, 32)).astype(np.int8)
    scale = np.full((4, 2), 0.01, np.float32)
    assert grid_codes(q, scale, None, 64) is not None
    for wrong in (70000.0, np.inf, np.nan):
        broken = scale.copy()
        broken[2, 1] = wrong
        assert grid_codes(q, broken, None, 64) is None and grid_codes(q, scale, broken, 64) is None
    assert grid_codes(q, np.full((4, 2), 1e-7, np.float32), None, 64) is None, "below float16's range"
    small = scale.copy()
    small[:, 1] = 1e-7
    assert grid_codes(q, small, None, 64) is not None, "small beside the rest of its row"


def test_rows_of_codes_are_taken_and_put_together() -> None:
    codes = codes_of(W4)
    both = stack([codes[2:5], codes[5:9]])
    assert both is not None and len(both) == 7
    np.testing.assert_array_equal(both.values(), codes.values()[2:9])
    assert stack([codes, codes_of(W8)]) is None and stack([codes, codes_of(W4, 16, 96)]) is None


def test_the_documentation_and_the_kernels_list_the_same_formats() -> None:
    root = Path(pack.__file__).resolve().parents[1]
    own = [f for f in FORMATS.values() if f.stored is f]
    (enum,) = re.findall(r"enum class Fmt \{ (.*) \};", (root / "kernels/cpu/weights.h").read_text())
    assert enum.split(", ") == [f.name for f in own] == [f.name for f in FORMATS.values() if "cpu" in f.backends]
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([\d.]+) \|$", (root / "docs/kernels.md").read_text(), re.MULTILINE)
    size = {f.name: pack.packed_layout(f, 1024, 1024).size / 1024**2 for f in own}
    assert {name: float(number) for name, number in rows} == size
