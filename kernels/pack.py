"""Weights into the layouts that the CPU kernels read; `kernels/cpu/weights.h` defines them.

A matrix is packed by blocks of rows, so a huge one is streamed: `packed_layout` says where its regions lie,
`pack_rows` gives the bytes of a block for each region, and those of consecutive blocks follow each other.
`fake_quantize` gives the float32 values that the kernels compute with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from llmc.kernels.codes import Array, Codes, quantize, stack
from llmc.kernels.formats import BF16, F32, W4, W8, Format

Bytes = npt.NDArray[np.uint8]
RegionName = Literal["data", "scale", "min"]

LANES = 16
"""Rows in a tile."""
ALIGN = 64
"""Regions start at multiples of this."""
_ROWS_AT_ONCE = 1 << 18
"""Elements quantised at once: the temporaries of so few stay in the cache."""


@dataclass(frozen=True)
class Region:
    """One contiguous part of a packed matrix, in bytes. `tile_bytes`: of each 16-row tile."""

    name: RegionName
    offset: int
    tile_bytes: int
    size: int


@dataclass(frozen=True)
class PackedLayout:
    """Where the regions of a packed matrix lie, relative to its start; `size` is the whole, in bytes."""

    regions: tuple[Region, ...]
    size: int


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _tile_bytes(format: Format, k: int) -> list[tuple[RegionName, int]]:
    if not format.group:
        return [("data", k * LANES * format.bits // 8)]
    groups = -(-k // format.group)
    scales = groups * LANES * 2
    regions: list[tuple[RegionName, int]] = [("data", groups * format.group * LANES * format.bits // 8)]
    regions.append(("scale", scales))
    return regions if format.symmetric else [*regions, ("min", scales)]


def packed_layout(format: Format, n: int, k: int, gated: bool = False) -> PackedLayout:
    """The layout of an [n, k] matrix; gated: of two of them, gate and up, in alternating tiles."""
    tiles = _round_up(n, LANES) // LANES * (2 if gated else 1)
    regions, at = [], 0
    for name, tile_bytes in _tile_bytes(format, k):
        at = _round_up(at, ALIGN)
        regions.append(Region(name, at, tile_bytes, tiles * tile_bytes))
        at += tiles * tile_bytes
    return PackedLayout(tuple(regions), _round_up(at, ALIGN))


def pack_rows(format: Format, rows: Array | Codes) -> tuple[Bytes, ...]:
    """The bytes of consecutive rows, one flat uint8 array per region in the order of `packed_layout`.

    rows: float32 [n, K], or codes that fit the format. n is a multiple of 16 except in the last block of a matrix,
    which is padded with zero rows. Raises ValueError for a weight that a scale in float16 cannot reach.
    """
    n, k = rows.shape
    step = _rows_at_once(k)
    blocks = [_pack_block(format.stored, rows[i : i + step]) for i in range(0, n, step)]
    if len(blocks) == 1:
        return blocks[0]
    if not blocks:
        return tuple(np.zeros(0, np.uint8) for _ in _tile_bytes(format, k))
    return tuple(np.concatenate(parts) for parts in zip(*blocks, strict=True))


def quantize_rows(format: Format, rows: Array) -> Codes:
    """`quantize` of rows [n, K], as many at once as the cache holds."""
    step = _rows_at_once(rows.shape[1])
    found = stack([quantize(format, rows[i : i + step]) for i in range(0, max(len(rows), 1), step)])
    assert found is not None
    return found


def _rows_at_once(k: int) -> int:
    return max(LANES, _ROWS_AT_ONCE // max(k, 1) // LANES * LANES)


def pack_gated_rows(format: Format, gate: Array | Codes, up: Array | Codes) -> tuple[Bytes, ...]:
    """`pack_rows` of the same rows of two matrices [n, K] for a gated product: their tiles alternate."""
    if gate.shape != up.shape:
        raise ValueError(f"gate {gate.shape} and up {up.shape} differ in shape")
    parts = zip(_tile_bytes(format, gate.shape[1]), pack_rows(format, gate), pack_rows(format, up), strict=True)
    return tuple(np.stack([g.reshape(-1, size), u.reshape(-1, size)], axis=1).reshape(-1) for (_, size), g, u in parts)


def pack(format: Format, rows: Array | Codes, up: Array | Codes | None = None) -> bytes:
    """A whole packed matrix as one byte string; with `up`, a gated one. For tests and small matrices."""
    layout = packed_layout(format, rows.shape[0], rows.shape[1], gated=up is not None)
    parts = pack_rows(format, rows) if up is None else pack_gated_rows(format, rows, up)
    out = np.zeros(layout.size, np.uint8)
    for region, part in zip(layout.regions, parts, strict=True):
        out[region.offset : region.offset + region.size] = part
    return out.tobytes()


def fake_quantize(format: Format, rows: Array) -> Array:
    """The float32 values [n, K] that the kernels use for these rows: rounded to the format and back."""
    rows = np.ascontiguousarray(rows, np.float32)
    if format.group:
        return quantize(format, rows).values()
    return rows.copy() if format is F32 else (_bf16(rows).astype(np.uint32) << 16).view(np.float32)


def _pack_block(format: Format, rows: Array | Codes) -> tuple[Bytes, ...]:
    tiles = _round_up(len(rows), LANES) // LANES
    if not isinstance(rows, Codes):
        rows = _padded(rows, tiles * LANES)
        if not format.group:
            return (_flat(_ELEMENTS[format](rows, tiles)),)
        rows = quantize(format, rows)
    q, scale = _padded(rows.q, tiles * LANES), _padded(rows.scale, tiles * LANES)
    parts = [_flat(_ELEMENTS[format](q, tiles)), _per_group(scale, tiles)]
    if rows.minimum is not None:
        parts.append(_per_group(_padded(rows.minimum, tiles * LANES), tiles))
    return tuple(parts)


def _padded(rows: npt.NDArray[np.generic], n: int) -> npt.NDArray[Any]:
    """Zero rows after the last, up to n."""
    if len(rows) == n:
        return rows
    return np.concatenate([rows, np.zeros((n - len(rows), *rows.shape[1:]), rows.dtype)])


def _flat(a: npt.NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(a).reshape(-1).view(np.uint8)


def _per_group(values: npt.NDArray[np.float16], tiles: int) -> Bytes:
    """[n, groups] to [tile][group][lane]."""
    return _flat(values.reshape(tiles, LANES, -1).transpose(0, 2, 1))


def _bf16(x: Array) -> npt.NDArray[np.uint16]:
    """Round to nearest even; x is finite."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    tie_to_even = bits >> np.uint32(16) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + tie_to_even) >> np.uint32(16)).astype(np.uint16)


# ---- the order of elements in the tiles of each layout


def _by_k(rows: npt.NDArray[Any], tiles: int) -> npt.NDArray[Any]:
    """[n, K] to [tile][k][lane]."""
    return rows.reshape(tiles, LANES, -1).transpose(0, 2, 1)


def _w8_elements(q: npt.NDArray[Any], tiles: int) -> npt.NDArray[Any]:
    """q [n, G, 32] to [tile][k / 4][lane][4], with 128 added."""
    biased = (q.astype(np.int16) + 128).astype(np.uint8)
    return biased.reshape(tiles, LANES, -1, 4).transpose(0, 2, 1, 3)


def _w4_elements(q: npt.NDArray[Any], tiles: int) -> npt.NDArray[Any]:
    """u [n, G, 32] to [tile][group][j][lane][i]: elements 4 j + i and, in the high bits, 16 + 4 j + i."""
    quads = q.astype(np.uint8).reshape(tiles, LANES, -1, 2, 4, 4)  # tile, lane, group, half, j, i
    both = quads[:, :, :, 0] | quads[:, :, :, 1] << 4
    return both.transpose(0, 2, 3, 1, 4)


_ELEMENTS: dict[Format, Callable[[npt.NDArray[Any], int], npt.NDArray[Any]]] = {
    F32: _by_k, BF16: lambda rows, tiles: _by_k(_bf16(rows), tiles), W8: _w8_elements, W4: _w4_elements,
}  # fmt: skip
