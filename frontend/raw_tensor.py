"""Tensors of safetensors files, read as they stand: rows, or columns of a matrix, in the stored type or as float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.errors import UserError
from llmc.frontend.rawfile import RawFile, row_range
from llmc.frontend.safetensors_header import Stored

_TYPES: dict[str, type[np.generic]] = {
    "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I64": np.int64, "I32": np.int32, "I8": np.int8,
    "U8": np.uint8, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8,
}  # fmt: skip
"""What a stored type is read as: types that numpy lacks as their bits."""
FLOATS = ("F32", "F16", "BF16", "F8_E4M3", "F8_E8M0")
"""Those that `widen` knows."""
_WHOLE = 1 << 26
"""Bytes of a matrix that is read whole for some of its columns; of a larger one each row is read for itself."""


@dataclass(frozen=True)
class RawTensor:
    """A tensor of a safetensors file under its name."""

    name: str
    file: RawFile
    stored: Stored

    @property
    def dtype(self) -> str:
        return self.stored.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    def __str__(self) -> str:
        return f"tensor {self.name[:200]} in {self.file.path}"

    def rows(self, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """Rows start:stop along the first dimension in the stored type; of a scalar [] the value."""
        kind = np.dtype(_TYPES[self.dtype])
        first, rows, width = row_range(self.name, self.shape, start, stop)
        raw = self.file.read(self.stored.begin + first * width * kind.itemsize, rows * width * kind.itemsize)
        return raw.view(kind).reshape((rows, *self.shape[1:]) if self.shape else ())

    def columns(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Columns start:stop of a matrix in the stored type."""
        rows, width = self.shape
        kind = np.dtype(_TYPES[self.dtype])
        if rows * width * kind.itemsize <= _WHOLE:
            return np.ascontiguousarray(self.rows()[:, start:stop])
        found = np.empty((rows, stop - start), kind)
        for row in range(rows):
            at = self.stored.begin + (row * width + start) * kind.itemsize
            found[row] = self.file.read(at, (stop - start) * kind.itemsize).view(kind)
        return found

    def floats(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.float32]:
        """Rows start:stop as float32. Raises UserError for a type that is none of FLOATS."""
        if self.dtype not in FLOATS:
            raise UserError(f"{self} is stored as {self.dtype}: only F32, F16 and BF16 are supported")
        return widen(self.rows(start, stop), self.dtype)


def widen(raw: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    """Stored values of one of FLOATS as float32."""
    if dtype == "BF16":  # the upper half of the float32 of the same value
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype in _TABLES:
        return _TABLES[dtype][raw]
    return raw.astype(np.float32, copy=False)


def _e4m3() -> npt.NDArray[np.float32]:
    """The values of float8_e4m3fn: no infinity, NaN where all bits but the sign are set."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    values = np.where(exponent > 0, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


def _e8m0() -> npt.NDArray[np.float32]:
    """Powers of two from -127; the last code is NaN."""
    values = np.ldexp(1.0, np.arange(256) - 127)
    values[255] = np.nan
    return values.astype(np.float32)


_TABLES = {"F8_E4M3": _e4m3(), "F8_E8M0": _e8m0()}
