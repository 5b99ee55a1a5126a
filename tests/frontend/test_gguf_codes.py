"""frontend/gguf_codes.py: what GGUF's blocks hold is taken exactly, and reaches the packed weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from frontend_builders import meta_model, tiny_gguf
from gguf import GGMLQuantizationType, quants

from llmc.codegen.weights import WeightTable
from llmc.frontend.gguf_codes import block_codes
from llmc.frontend.open import match_parameters, open_checkpoint
from llmc.frontend.source import Source
from llmc.kernels import pack
from llmc.kernels.formats import W4, W8, Format
from llmc.kernels.weights import Affine, concat

KINDS = {"Q4_0": W4, "Q4_1": W4, "Q8_0": W8}


def quantised(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(raw rows, the values that they stand for)."""
    values = np.random.default_rng(3).standard_normal((6, 96)).astype(np.float32)
    raw = quants.quantize(values, GGMLQuantizationType[kind])
    return raw, quants.dequantize(raw, GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_codes_stand_for_the_dequantised_values(kind: str) -> None:
    raw, values = quantised(kind)
    codes = block_codes(kind, raw, 96)
    assert codes is not None and codes.fit(KINDS[kind])
    np.testing.assert_array_equal(codes.values(), values)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scale_that_is_not_finite_gives_no_codes(kind: str) -> None:
    raw, _ = quantised(kind)
    raw[2, :2] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)
    assert block_codes(kind, raw, 96) is None


def test_a_minimum_beyond_float16_gives_no_codes() -> None:
    raw, _ = quantised("Q4_0")
    raw[0, :2] = np.frombuffer(np.float16(60000).tobytes(), np.uint8)
    assert block_codes("Q4_0", raw, 96) is None


def packed(table: WeightTable, ckpt: object, coded: bool) -> bytes:
    data = np.zeros(table.size, np.uint8)
    blocks = table.blocks(ckpt.read, ckpt.codes) if coded else table.blocks(ckpt.read)  # type: ignore[attr-defined]
    for offset, block in blocks:
        data[offset : offset + len(block)] = np.frombuffer(block, np.uint8)
    return data.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_that_fits_is_packed_as_it_is(kind: str, tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", kind)
    ckpt = open_checkpoint(Source(path, "gguf", path.name))
    recipes = match_parameters(ckpt, meta_model(ckpt))
    down, up, query = (
        recipes[f"model.layers.0.{name}.weight"] for name in ("mlp.gate_proj", "mlp.up_proj", "self_attn.q_proj")
    )
    both = concat((down, up))

    def stored(format: Format) -> bytes:
        table = WeightTable()
        table.matrix(both, format, True)
        return packed(table, ckpt, coded=True)

    codes = both.codes(ckpt.codes)
    assert codes is not None and codes.fit(KINDS[kind])
    half = len(codes) // 2
    parts = pack.pack_gated_rows(KINDS[kind], codes[:half], codes[half:])
    layout = pack.packed_layout(KINDS[kind], half, codes.k, gated=True)
    found = stored(KINDS[kind])
    for region, part in zip(layout.regions, parts, strict=True):
        assert found[region.offset : region.offset + region.size] == part.tobytes()
    other = W8 if KINDS[kind] is W4 else W4
    table = WeightTable()
    table.matrix(both, other, True)
    assert stored(other) == packed(table, ckpt, coded=False), "codes of another grid are not used"
    assert query.codes(ckpt.codes) is None, "its rows are reordered on reading"
    assert Affine(down.shape, down, 1.0, 1.0).codes(ckpt.codes) is None
