"""Positioned reads from one open file.

Weights are read, not mapped: pages of a mapping count as resident memory of the build, and a file that
shrinks under a mapping kills the process with SIGBUS. A short read here is an ordinary UserError.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from llmc.errors import UserError

_HASH_CHUNK = 1 << 22


class RawFile:
    """A file held open for reading at any offset; safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        """Opens `path`. Raises UserError when it cannot be opened or is not a regular file."""
        if not path.is_file():
            raise UserError(f"{path} is not a file: check the name")
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        self.path = path
        self.size = os.fstat(self._fd).st_size

    def read(self, offset: int, count: int) -> npt.NDArray[np.uint8]:
        """`count` bytes from `offset`. The range is checked against the file before anything is allocated."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise UserError(
                f"{self.path} is truncated: bytes {offset} to {offset + count} of {self.size} are needed; "
                "fetch the file again"
            )
        buffer = np.empty(count, dtype=np.uint8)
        view = buffer.data
        done = 0
        while done < count:  # one call returns at most 2 GiB
            got = os.preadv(self._fd, [view[done:]], offset + done)
            if got == 0:
                raise UserError(f"{self.path} became shorter while it was read: fetch the file again")
            done += got
        return buffer

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sha256_of(path: Path) -> str:
    """sha256 (hex) of a file's bytes."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return digest.hexdigest()


def check_finite(values: npt.NDArray[np.float32], name: str, path: Path) -> None:
    """Raises UserError naming the tensor when it holds NaN or Inf."""
    # min and max carry NaN through and need no array of flags as large as a quarter of the tensor.
    if values.size and not (np.isfinite(values.min()) and np.isfinite(values.max())):
        raise UserError(
            f"tensor {name} in {path} holds NaN or Inf: the checkpoint is damaged; fetch or export it again"
        )


def row_range(name: str, shape: tuple[int, ...], start: int, stop: int | None) -> tuple[int, int, int]:
    """(first row, number of rows, values in a row) of rows start:stop; a scalar is one row of one value."""
    rows = shape[0] if shape else 1
    end = rows if stop is None else stop
    if not 0 <= start <= end <= rows:
        raise ValueError(f"rows {start}:{end} of {name}, which has {rows}")
    width = 1
    for extent in shape[1:]:
        width *= extent
    return start, end - start, width
