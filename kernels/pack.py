"""Weights into the layouts that the CPU kernels read; `kernels/cpu/weights.h` defines them.

A matrix is packed by blocks of rows, so a huge one is streamed: `packed_layout` says where its regions lie,
`pack_rows` gives the bytes of a block for each region, and those of consecutive blocks follow each other.
`fake_quantize` gives the float32 values that the kernels compute with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

LANES = 16
"""Rows in a tile."""
GROUP = 32
"""Elements along K that share a scale."""
ALIGN = 64
"""Regions start at multiples of this."""
_F16_MAX = 65504.0
_ROWS_AT_ONCE = 1 << 22
"""Elements quantised at once: bounds the memory for temporaries."""


@dataclass(frozen=True)
class Region:
    """One contiguous part of a packed matrix, in bytes. `tile_bytes`: of each 16-row tile."""

    name: Literal["data", "scale", "min"]
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


def _tile_bytes(fmt: str, k: int) -> list[tuple[Literal["data", "scale", "min"], int]]:
    kp = _round_up(k, GROUP)
    scales = kp // GROUP * LANES * 2
    if fmt == "f32":
        return [("data", k * LANES * 4)]
    if fmt == "bf16":
        return [("data", k * LANES * 2)]
    if fmt == "w8":
        return [("data", kp * LANES), ("scale", scales)]
    if fmt == "w4":
        return [("data", kp * LANES // 2), ("scale", scales), ("min", scales)]
    raise ValueError(f"unknown weight format {fmt!r}; known: f32, bf16, w8, w4")


def packed_layout(fmt: str, n: int, k: int, gated: bool = False) -> PackedLayout:
    """The layout of an [n, k] matrix; gated: of two of them, gate and up, in alternating tiles."""
    tiles = _round_up(n, LANES) // LANES * (2 if gated else 1)
    regions, at = [], 0
    for name, tile_bytes in _tile_bytes(fmt, k):
        at = _round_up(at, ALIGN)
        regions.append(Region(name, at, tile_bytes, tiles * tile_bytes))
        at += tiles * tile_bytes
    return PackedLayout(tuple(regions), _round_up(at, ALIGN))


def pack_rows(fmt: str, rows: Array) -> tuple[Bytes, ...]:
    """The bytes of consecutive rows [n, K], one flat uint8 array per region in the order of `packed_layout`.

    n is a multiple of 16 except in the last block of a matrix, which is padded with zero rows. ValueError: a
    weight that a scale in float16 cannot reach.
    """
    n, k = rows.shape
    step = max(LANES, _ROWS_AT_ONCE // max(k, 1) // LANES * LANES)
    blocks = [_pack_block(fmt, rows[i : i + step]) for i in range(0, n, step)]
    if len(blocks) == 1:
        return blocks[0]
    if not blocks:
        return tuple(np.zeros(0, np.uint8) for _ in _tile_bytes(fmt, k))
    return tuple(np.concatenate(parts) for parts in zip(*blocks, strict=True))


def pack_gated_rows(fmt: str, gate: Array, up: Array) -> tuple[Bytes, ...]:
    """`pack_rows` of the same rows of two matrices [n, K] for a gated product: their tiles alternate."""
    if gate.shape != up.shape:
        raise ValueError(f"gate {gate.shape} and up {up.shape} differ in shape")
    k = gate.shape[1]
    parts = zip(_tile_bytes(fmt, k), pack_rows(fmt, gate), pack_rows(fmt, up), strict=True)
    return tuple(np.stack([g.reshape(-1, size), u.reshape(-1, size)], axis=1).reshape(-1) for (_, size), g, u in parts)


def pack(fmt: str, rows: Array, up: Array | None = None) -> bytes:
    """A whole packed matrix as one byte string; with `up`, a gated one. For tests and small matrices."""
    layout = packed_layout(fmt, rows.shape[0], rows.shape[1], gated=up is not None)
    parts = pack_rows(fmt, rows) if up is None else pack_gated_rows(fmt, rows, up)
    out = np.zeros(layout.size, np.uint8)
    for region, part in zip(layout.regions, parts, strict=True):
        out[region.offset : region.offset + region.size] = part
    return out.tobytes()


def fake_quantize(fmt: str, rows: Array) -> Array:
    """The float32 values [n, K] that the kernels use for these rows: rounded to the format and back."""
    rows = np.ascontiguousarray(rows, np.float32)
    if fmt == "f32":
        return rows.copy()
    if fmt == "bf16":
        return (_bf16(rows).astype(np.uint32) << 16).view(np.float32)
    n, k = rows.shape
    groups = _groups(rows)
    if fmt == "w8":
        q, scale = _quantize_w8(groups)
        values = q.astype(np.float32) * scale.astype(np.float32)[..., None]
    elif fmt == "w4":
        u, scale, low = _quantize_w4(groups)
        values = u.astype(np.float32) * scale.astype(np.float32)[..., None]
        values += low.astype(np.float32)[..., None]
    else:
        _tile_bytes(fmt, k)  # raises for an unknown format
    return np.ascontiguousarray(values.reshape(n, -1)[:, :k])


def _pack_block(fmt: str, rows: Array) -> tuple[Bytes, ...]:
    n, k = rows.shape
    tiles = _round_up(n, LANES) // LANES
    padded = np.zeros((tiles * LANES, k), np.float32)
    padded[:n] = rows
    if fmt in ("f32", "bf16"):
        data = padded if fmt == "f32" else _bf16(padded)
        return (_flat(data.reshape(tiles, LANES, k).transpose(0, 2, 1)),)
    groups = _groups(padded)
    if fmt == "w8":
        q, scale = _quantize_w8(groups)
        biased = (q.astype(np.int16) + 128).astype(np.uint8)
        return (_flat(biased.reshape(tiles, LANES, -1, 4).transpose(0, 2, 1, 3)), _per_group(scale, tiles))
    if fmt == "w4":
        u, scale, low = _quantize_w4(groups)
        quads = u.reshape(tiles, LANES, -1, 2, 4, 4)  # tile, lane, group, half, j, i
        both = quads[:, :, :, 0] | quads[:, :, :, 1] << 4
        return (_flat(both.transpose(0, 2, 3, 1, 4)), _per_group(scale, tiles), _per_group(low, tiles))
    _tile_bytes(fmt, k)  # raises for an unknown format
    raise AssertionError(fmt)


def _flat(a: npt.NDArray[np.generic]) -> Bytes:
    return np.ascontiguousarray(a).reshape(-1).view(np.uint8)


def _per_group(values: npt.NDArray[np.float16], tiles: int) -> Bytes:
    """[n, groups] to [tile][group][lane]."""
    return _flat(values.reshape(tiles, LANES, -1).transpose(0, 2, 1))


def _groups(rows: Array) -> Array:
    """[n, K] to [n, Kp/32, 32], padded with zeros."""
    n, k = rows.shape
    kp = _round_up(k, GROUP)
    if kp != k:
        rows = np.concatenate([rows, np.zeros((n, kp - k), np.float32)], axis=1)
    return rows.reshape(n, kp // GROUP, GROUP)


def _bf16(x: Array) -> npt.NDArray[np.uint16]:
    """Round to nearest even; x is finite."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    tie_to_even = bits >> np.uint32(16) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + tie_to_even) >> np.uint32(16)).astype(np.uint16)


def _check_range(amax: Array, limit: float, fmt: str) -> None:
    if amax.size and not float(amax.max()) <= limit:
        largest = float(amax.max())
        raise ValueError(f"a weight of magnitude {largest:g} does not fit {fmt} (at most {limit:g})")


def _quantize_w8(groups: Array) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """q [n, G, 32] in [-127, 127] and scale [n, G]: amax / 127, rounded up so that no q leaves the range."""
    amax = np.abs(groups).max(axis=-1)
    _check_range(amax, 127 * _F16_MAX, "int8")
    exact = amax / np.float32(127)
    scale = exact.astype(np.float16)
    below = scale.astype(np.float32) < exact
    scale[below] = np.nextafter(scale[below], np.float16(np.inf))
    divisor = np.where(scale > 0, scale, 1).astype(np.float32)
    q = np.clip(np.rint(groups / divisor[..., None]), -127, 127).astype(np.int8)
    return q, scale


def _fit_w4(
    groups: Array, scale: npt.NDArray[np.float16], low: npt.NDArray[np.float16]
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
    """The best u [n, G, 32] for a given grid, and the squared error of each group."""
    s, m = scale.astype(np.float32)[..., None], low.astype(np.float32)[..., None]
    u = np.clip(np.rint((groups - m) / np.where(s > 0, s, 1)), 0, 15)
    error = (u * s + m - groups).astype(np.float64)
    return u.astype(np.uint8), (error * error).sum(axis=-1)


def _quantize_w4(
    groups: Array,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """u [n, G, 32] in [0, 15], scale and min [n, G]: min is the least of the group, scale = (max - min) / 15.

    Weights that already lie on such a grid with float16 scale and min (GGUF's Q4_1) are reproduced exactly if
    they use its lowest level: where level 15 is unused, trying fewer levels finds the highest used one.
    """
    least, most = groups.min(axis=-1), groups.max(axis=-1)
    _check_range(np.maximum(np.abs(least), most - least), _F16_MAX, "int4")
    low = least.astype(np.float16)
    span = most - low.astype(np.float32)
    scale = np.maximum(span / np.float32(15), 0).astype(np.float16)
    u, error = _fit_w4(groups, scale, low)
    ordered = np.sort(groups, axis=-1)
    gridlike = (ordered[..., 1:] != ordered[..., :-1]).sum(axis=-1) < 16  # no more than 16 values
    for levels in range(14, 0, -1):
        rough = np.nonzero(gridlike & (error != 0))
        if rough[0].size == 0:
            break
        trial = np.maximum(span[rough] / np.float32(levels), 0).astype(np.float16)
        u_trial, error_trial = _fit_w4(groups[rough], trial, low[rough])
        exact = error_trial == 0
        where = (rough[0][exact], rough[1][exact])
        u[where], scale[where], error[where] = u_trial[exact], trial[exact], 0.0
    return u, scale, low
