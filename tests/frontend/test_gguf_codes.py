"""frontend/gguf_codes.py: what GGUF's blocks hold is taken exactly, and reaches the packed weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frontend_builders import meta_model, tiny_gguf
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from llmc.codegen.weights import WeightTable
from llmc.frontend.gguf_codes import block_codes, grid_format
from llmc.frontend.open import match_parameters, open_checkpoint
from llmc.frontend.source import Source
from llmc.kernels import pack
from llmc.kernels.codes import Codes
from llmc.kernels.formats import W4, W8, Format
from llmc.kernels.weights import Affine, concat

KINDS = {"Q4_0": W4, "Q4_1": W4, "Q4_K": W4, "Q5_0": W8, "Q8_0": W8, "IQ4_NL": W8, "MXFP4": W8}
FLOATS_AT = {"Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q5_0": (0,), "Q8_0": (0,), "IQ4_NL": (0,)}
"""Bytes of a block at which a float16 stands."""
TINY_KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q8_0")
"""Those that the gguf package can write in rows of 64."""


def blocks_of(kind: str, n: int = 6, blocks: int = 3) -> tuple[np.ndarray, np.ndarray, int]:
    """(raw rows of random bits with moderate scales, the values that they stand for, elements of a row)."""
    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (n, blocks, size)).astype(np.uint8)
    for at in FLOATS_AT.get(kind, ()):
        halves = rng.uniform(0.01, 0.1, (n, blocks)).astype(np.float16)
        raw[..., at : at + 2] = halves[..., None].view(np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = rng.integers(112, 140, (n, blocks))
    rows = raw.reshape(n, blocks * size)
    return rows, quants.dequantize(rows, GGMLQuantizationType[kind]), blocks * elements


@pytest.mark.parametrize("kind", KINDS)
def test_codes_stand_for_the_dequantised_values(kind: str) -> None:
    raw, values, k = blocks_of(kind)
    codes = block_codes(kind, raw, k)
    assert codes is not None and codes.fit(KINDS[kind]) and grid_format(kind) is KINDS[kind]
    if kind != "Q4_K":
        np.testing.assert_array_equal(codes.values(), values)
        return
    # The six-bit factors times float16 round to float16; the codes themselves are the file's.
    scale, minimum = (np.abs(x.astype(np.float32)).max() for x in (codes.scale, codes.minimum))
    assert np.abs(codes.values() - values).max() <= 2.0**-11 * (15 * scale + minimum)
    exact = values.reshape(*codes.q.shape)
    spread = exact.max(axis=-1) - exact.min(axis=-1)
    steps = codes.q.max(axis=-1).astype(np.float32) - codes.q.min(axis=-1)
    np.testing.assert_allclose(spread, steps * codes.scale.astype(np.float32), rtol=1e-3)


def test_kinds_without_codes_are_rounded_to_eight_bits() -> None:
    assert {grid_format(kind) for kind in ("Q2_K", "Q3_K", "Q5_1", "Q5_K", "Q6_K", "IQ2_XXS")} == {W8}
    assert {grid_format(kind) for kind in ("F32", "F16", "BF16")} == {None}
    assert block_codes("Q6_K", np.zeros((1, 210), np.uint8), 256) is None


@pytest.mark.parametrize("kind", FLOATS_AT)
def test_a_scale_that_is_not_finite_gives_no_codes(kind: str) -> None:
    raw, _, k = blocks_of(kind)
    raw[2, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    assert block_codes(kind, raw, k) is None


def test_a_minimum_beyond_float16_gives_no_codes() -> None:
    raw, _, k = blocks_of("Q4_0")
    raw[0, :2] = np.frombuffer(np.float16(60000).tobytes(), np.uint8)
    assert block_codes("Q4_0", raw, k) is None


def packed(table: WeightTable, ckpt: Any, coded: bool) -> bytes:
    data = np.zeros(table.size, np.uint8)
    for offset, block in table.blocks(ckpt.read, ckpt.codes if coded else None):
        data[offset : offset + len(block)] = np.frombuffer(block, np.uint8)
    return data.tobytes()


def opened(tmp_path: Path, kind: str) -> tuple[Any, dict[str, Any]]:
    path = tiny_gguf(tmp_path / "m.gguf", kind)
    ckpt = open_checkpoint(Source(path, "gguf", path.name))
    return ckpt, match_parameters(ckpt, meta_model(ckpt))


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_a_tensor_that_fits_is_packed_as_it_is(kind: str, tmp_path: Path) -> None:
    ckpt, recipes = opened(tmp_path, kind)
    down, up = (recipes[f"model.layers.0.mlp.{name}.weight"] for name in ("gate_proj", "up_proj"))
    both = concat((down, up))

    def stored(format: Format, coded: bool = True) -> tuple[bytes, dict[Any, bool]]:
        table = WeightTable()
        table.matrix(both, format, True)
        return packed(table, ckpt, coded), table.kept

    codes = both.codes(ckpt.codes)
    assert codes is not None and codes.fit(KINDS[kind])
    half = len(codes) // 2
    found, kept = stored(KINDS[kind])
    assert found == pack.pack(KINDS[kind], codes[:half], codes[half:])
    assert kept == {(name, KINDS[kind]): True for name in both.tensors()}
    other = W8 if KINDS[kind] is W4 else W4
    found, kept = stored(other)
    if kind == "Q4_0":  # 8 bits hold it, too
        np.testing.assert_array_equal(codes.held_by(W8).values(), codes.values())  # type: ignore[union-attr]
        assert set(kept.values()) == {True}
    else:
        assert found == stored(other, coded=False)[0], "codes of another grid are not used"
        assert set(kept.values()) == {False}
    assert Affine(down.shape, down, 1.0, 1.0).codes(ckpt.codes) is None


@pytest.mark.parametrize("kind", TINY_KINDS)
def test_reordered_rows_keep_their_codes(kind: str, tmp_path: Path) -> None:
    """GGUF interleaves the rotary halves of queries and keys; their rows come back in order, any range of them."""
    ckpt, recipes = opened(tmp_path, kind)
    for name in ("self_attn.q_proj", "self_attn.k_proj"):
        ref = recipes[f"model.layers.1.{name}.weight"]
        codes = ref.codes(ckpt.codes)
        assert codes is not None and ckpt.tensors[ref.tensors()[0]].grid is KINDS[kind]
        np.testing.assert_array_equal(codes.values(), ref.read(ckpt.read))
        part = ref.codes(ckpt.codes, 5, 21)
        assert part is not None
        np.testing.assert_array_equal(part.values(), ref.read(ckpt.read)[5:21])


def test_a_transform_that_changes_values_leaves_no_codes(tmp_path: Path, monkeypatch: Any) -> None:
    from llmc.frontend.gguf_checkpoint import GgufCheckpoint

    plain = GgufCheckpoint._transform

    def doubled(self: Any, sources: Any, arrays: Any) -> dict[str, Any]:
        return {name: np.asarray(x) * 2 if "q_proj" in name else x for name, x in plain(self, sources, arrays).items()}

    monkeypatch.setattr(GgufCheckpoint, "_transform", doubled)
    ckpt, recipes = opened(tmp_path, "Q4_1")
    query, key = (recipes[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qk")
    assert query.codes(ckpt.codes) is None and key.codes(ckpt.codes) is not None
    assert ckpt.tensors[query.tensors()[0]].grid is W8, "values that are on no grid get 8 bits"


def test_parts_with_and_without_codes_are_packed_together(tmp_path: Path) -> None:
    ckpt, recipes = opened(tmp_path, "Q8_0")
    gate, up = (recipes[f"model.layers.0.mlp.{name}.weight"] for name in ("gate_proj", "up_proj"))
    both = concat((gate, up))
    refused = up.tensors()[0]

    def some(name: str, start: int, stop: int) -> Codes | None:
        return None if name == refused else ckpt.codes(name, start, stop)

    table = WeightTable()
    table.matrix(both, W8, False)
    data = b"".join(bytes(block) for _, block in sorted(table.blocks(ckpt.read, some)))
    codes = gate.codes(ckpt.codes)
    assert codes is not None
    own, rounded = pack.pack_rows(W8, codes), pack.pack_rows(W8, up.read(ckpt.read))
    assert data == b"".join(a.tobytes() + b.tobytes() for a, b in zip(own, rounded, strict=True))
    assert table.kept == {(gate.tensors()[0], W8): True, (refused, W8): False}
