"""Rows of a matrix as codes on a grid: what a quantised format holds, exactly, before it is packed.

`quantize` finds the codes of float32 values; a checkpoint that is quantised already may have codes of its own
(`WeightRef.codes`), and then they are taken as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.kernels.formats import W4, W8, Format

Array = npt.NDArray[np.float32]
Float16 = npt.NDArray[np.float16]
_Grid = tuple[npt.NDArray[np.integer], Float16, Float16 | None]
_F16_MAX = 65504.0


@dataclass(frozen=True)
class Codes:
    """q [n, G, group]: signed integers on a symmetric grid, else uint8 from 0; K is padded to whole groups with the
    code of zero, or any. scale and minimum [n, G] float16, minimum None where the grid is symmetric.
    value = scale * q + minimum. k: elements of a row without the padding."""

    q: npt.NDArray[np.integer]
    scale: Float16
    minimum: Float16 | None
    k: int

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, elements of a row], as the values have it."""
        return len(self.q), self.k

    def __len__(self) -> int:
        return len(self.q)

    def __getitem__(self, rows: slice) -> Codes:
        return Codes(self.q[rows], self.scale[rows], None if self.minimum is None else self.minimum[rows], self.k)

    def values(self) -> Array:
        """The float32 values [n, K]."""
        found = self.q.astype(np.float32) * self.scale.astype(np.float32)[..., None]
        if self.minimum is not None:
            found += self.minimum.astype(np.float32)[..., None]
        return np.ascontiguousarray(found.reshape(len(self.q), -1)[:, : self.k])

    def fit(self, format: Format) -> bool:
        """Whether a format can hold exactly these codes."""
        if format.group != self.q.shape[-1] or format.symmetric != (self.minimum is None):
            return False
        half = 2 ** (format.bits - 1) if format.symmetric else 0
        return not self.q.size or (-half <= int(self.q.min()) and int(self.q.max()) < 2**format.bits - half)

    def held_by(self, format: Format) -> Codes | None:
        """The same grid in the codes of a format, or None where the format cannot hold it.

        A symmetric grid becomes an asymmetric one by a minimum, which may round in float16 unless it is -8 scales; an
        asymmetric one becomes symmetric where every minimum is a whole number of scales.
        """
        if format.group != self.q.shape[-1]:
            return None
        moved = self if format.symmetric == (self.minimum is None) else self._moved(format)
        return moved if moved is not None and moved.fit(format) else None

    def _moved(self, format: Format) -> Codes | None:
        """From symmetric to asymmetric or back; None where that is not possible."""
        if self.minimum is None:
            half = 2 ** (format.bits - 1)
            least = self.q.min(axis=-1, initial=0)
            least = np.where((least >= -half) & (self.q.max(axis=-1, initial=0) < half), -half, least)
            with np.errstate(over="ignore"):
                minimum = (least * self.scale.astype(np.float32)).astype(np.float16)
            if not np.isfinite(minimum).all():
                return None
            shifted = self.q.astype(np.int16) - least[..., None]
            if shifted.size and int(shifted.max()) > 255:
                return None
            return Codes(shifted.astype(np.uint8), self.scale, minimum, self.k)
        scale, minimum = self.scale.astype(np.float32), self.minimum.astype(np.float32)
        zero = np.clip(np.rint(minimum / np.where(scale != 0, scale, 1)), -256, 256)
        if not (zero * scale == minimum).all():
            return None
        return Codes(self.q.astype(np.int16) + zero.astype(np.int16)[..., None], self.scale, None, self.k)


def grid_codes(q: npt.NDArray[np.integer], scale: Array, minimum: Array | None, k: int) -> Codes | None:
    """Codes of a grid whose scales [n, G], and minima, are float32: rounded to float16, or None where float16 does not
    hold them: one is not finite, or the rounding is more than a thousandth of the row's largest."""
    halves: list[Float16] = []
    if minimum is None:
        scale = np.where((q != 0).any(axis=-1), scale, np.float32(0))  # a group of zeros has any scale
    for values in (scale,) if minimum is None else (scale, minimum):
        with np.errstate(over="ignore", invalid="ignore"):
            half = values.astype(np.float16)
            error = np.abs(half.astype(np.float32) - values)
        largest = np.abs(values).max(axis=-1, keepdims=True, initial=0)
        if not (np.isfinite(half).all() and (error <= largest / 1024).all()):
            return None
        halves.append(half)
    return Codes(q, halves[0], halves[1] if minimum is not None else None, k)


def stack(parts: Sequence[Codes]) -> Codes | None:
    """The rows of all parts, or None where they are not of one kind."""
    first = parts[0]
    if any(
        (p.minimum is None, p.k, p.q.shape[1:]) != (first.minimum is None, first.k, first.q.shape[1:]) for p in parts
    ):
        return None
    minima = [p.minimum for p in parts if p.minimum is not None]
    return Codes(
        np.concatenate([p.q for p in parts]), np.concatenate([p.scale for p in parts]),
        np.concatenate(minima) if minima else None, first.k,
    )  # fmt: skip


def quantize(format: Format, rows: Array) -> Codes:
    """The codes of float32 rows [n, K] in a format with groups.

    Raises ValueError for a weight that a scale in float16 cannot reach.
    """
    q, scale, minimum = _QUANTIZERS[format.stored](_groups(rows, format.group))
    return Codes(q, scale, minimum, rows.shape[1])


def _groups(rows: Array, group: int) -> Array:
    """[n, K] to [n, Kp/group, group], padded with zeros."""
    n, k = rows.shape
    if k % group:
        rows = np.concatenate([rows, np.zeros((n, -k % group), np.float32)], axis=1)
    return rows.reshape(n, -1, group)


def _check_range(amax: Array, limit: float, fmt: str) -> None:
    if amax.size and not float(amax.max()) <= limit:
        largest = float(amax.max())
        raise ValueError(f"a weight of magnitude {largest:g} does not fit {fmt} (at most {limit:g})")


def _quantize_w8(groups: Array) -> _Grid:
    """q [n, G, 32] in [-127, 127] and scale [n, G]: amax / 127, rounded up so that no q leaves the range."""
    amax = np.abs(groups).max(axis=-1)
    _check_range(amax, 127 * _F16_MAX, "int8")
    exact = amax / np.float32(127)
    scale = exact.astype(np.float16)
    below = scale.astype(np.float32) < exact
    scale[below] = np.nextafter(scale[below], np.float16(np.inf))
    divisor = np.where(scale > 0, scale, 1).astype(np.float32)
    q = np.clip(np.rint(groups / divisor[..., None]), -127, 127).astype(np.int8)
    return q, scale, None


def _fit_w4(groups: Array, scale: Float16, low: Float16) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
    """The best u [n, G, 32] for a given grid, and the squared error of each group."""
    s, m = scale.astype(np.float32)[..., None], low.astype(np.float32)[..., None]
    u = np.clip(np.rint((groups - m) / np.where(s > 0, s, 1)), 0, 15)
    error = (u * s + m - groups).astype(np.float64)
    return u.astype(np.uint8), (error * error).sum(axis=-1)


def _quantize_w4(groups: Array) -> _Grid:
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


_QUANTIZERS: dict[Format, Callable[[Array], _Grid]] = {W8: _quantize_w8, W4: _quantize_w4}
