"""codegen/weights.py: streamed blocks are the packed whole, byte for byte, and nothing is stored twice."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from llmc.codegen import weights
from llmc.codegen.weights import WeightTable
from llmc.errors import UserError
from llmc.kernels import pack
from llmc.kernels.formats import F32, W4, W8, find_format
from llmc.kernels.weights import Affine, Stored, Transposed, concat

K = 50  # no multiple of a group of 32
_RNG = np.random.default_rng(0)
TENSORS = {
    "a": _RNG.standard_normal((104, K)).astype(np.float32),  # no multiple of a tile of 16
    "b": _RNG.standard_normal((104, K)).astype(np.float32),
    "t": _RNG.standard_normal((K, 40)).astype(np.float32),
    "v": _RNG.standard_normal(77).astype(np.float32),
    "huge": np.full((16, K), 1e9, np.float32),
}
A, B = Stored((104, K), "a"), Stored((104, K), "b")


class _Reader:
    """Reads TENSORS and remembers how many rows of a matrix were asked for at once."""

    def __init__(self) -> None:
        self.most = 0

    def __call__(self, name: str, start: int, stop: int) -> Any:
        if TENSORS[name].ndim == 2:
            self.most = max(self.most, stop - start)
        return TENSORS[name][start:stop]


def _assemble(table: WeightTable, reader: Any) -> tuple[bytes, np.ndarray[Any, Any]]:
    """The segment, and how often each of its bytes was written."""
    data, times = np.zeros(table.size, np.uint8), np.zeros(table.size, np.uint8)
    for offset, block in table.blocks(reader):
        data[offset : offset + len(block)] = np.frombuffer(block, np.uint8)
        times[offset : offset + len(block)] += 1
    return data.tobytes(), times


@pytest.mark.parametrize("format", ["f32", "bf16", "w8", "w4"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows_at_once", [16, 48, 1 << 20])
def test_blocks_are_the_packed_whole(monkeypatch: Any, format: str, gated: bool, rows_at_once: int) -> None:
    monkeypatch.setattr(weights, "_BLOCK_ELEMENTS", rows_at_once * K)
    table, reader = WeightTable(), _Reader()
    table.vector(Stored((77,), "v"))  # so that the matrix does not start at 0
    entry = table.matrix(concat((A, B)) if gated else A, find_format(format), gated)
    data, times = _assemble(table, reader)

    whole = pack.pack(find_format(format), TENSORS["a"], TENSORS["b"] if gated else None)
    assert data[entry.offset : entry.offset + entry.size] == whole
    assert data[: 77 * 4] == TENSORS["v"].tobytes()
    wanted = np.zeros(table.size, np.uint8)
    wanted[: 77 * 4] = 1
    for region in entry.layout.regions:
        at = entry.region(region.name)
        assert at == entry.offset + region.offset and at % pack.ALIGN == 0
        wanted[at : at + region.size] = 1
    np.testing.assert_array_equal(times, wanted)
    assert reader.most <= min(rows_at_once, 104)


def test_a_block_never_has_fewer_rows_than_a_tile(monkeypatch: Any) -> None:
    monkeypatch.setattr(weights, "_BLOCK_ELEMENTS", 1)
    table, reader = WeightTable(), _Reader()
    entry = table.matrix(A, W8, False)
    assert _assemble(table, reader)[0][: entry.size] == pack.pack(W8, TENSORS["a"])
    assert reader.most == pack.LANES


def test_a_recipe_is_evaluated_in_blocks(monkeypatch: Any) -> None:
    monkeypatch.setattr(weights, "_BLOCK_ELEMENTS", 16 * K)
    table = WeightTable()
    entry = table.matrix(Affine((40, K), Transposed((40, K), Stored((K, 40), "t")), 1.0, 1.0), F32, False)
    assert _assemble(table, _Reader())[0][: entry.size] == pack.pack(F32, TENSORS["t"].T + np.float32(1))


def test_equal_recipes_are_stored_once() -> None:
    table = WeightTable()
    embedding, head = table.matrix(Stored((104, K), "a"), W8, False), table.matrix(A, W8, False)
    assert embedding is head and len(table.entries) == 1
    both = concat((A, B))
    variants = ((A, W4, False), (both, W8, True), (both, W8, False), (B, W8, False))
    others = [table.matrix(*variant) for variant in variants]
    assert len({id(e) for e in (head, *others)}) == 5 == len(table.entries)
    vector = table.vector(Stored((77,), "v"))
    assert vector is table.vector(Stored((77,), "v")) and vector.format is F32
    one = table.constant(torch.arange(3.0))
    assert one is table.constant(torch.arange(3.0)) is not table.constant(torch.arange(4.0))
    spans = sorted((e.offset, e.offset + e.size) for e in table.entries)
    assert all(lo % pack.ALIGN == 0 for lo, _ in spans) and spans[-1][1] <= table.size
    assert all(end <= lo for (_, end), (lo, _) in pairwise(spans))


def test_a_constant_is_float32() -> None:
    table = WeightTable()
    entry = table.constant(torch.arange(5, dtype=torch.float64))
    data, _ = _assemble(table, _Reader())
    np.testing.assert_array_equal(np.frombuffer(data[: entry.size], np.float32), np.arange(5, dtype=np.float32))


def test_a_region_that_the_format_lacks_is_none() -> None:
    table = WeightTable()
    assert [table.matrix(A, W8, False).region(n) is None for n in ("data", "scale", "min")] == [False, False, True]


@pytest.mark.parametrize("format", ["w8", "w4"])
def test_what_does_not_fit_names_the_weight(format: str) -> None:
    table = WeightTable()
    table.matrix(Stored((16, K), "huge"), find_format(format), False)
    with pytest.raises(UserError, match=r"weight huge: .* does not fit int[84].*--bf16"):
        list(table.blocks(_Reader()))
