"""Values as columns of buffers: what views and slices of a lowered graph come to, in every backend."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

B = TypeVar("B")


@dataclass(frozen=True)
class Value(Generic[B]):
    """Columns of a buffer: `column` and `width` in float32 elements; `shape` without the row dimension."""

    buffer: B
    column: int
    shape: tuple[int, ...]

    @property
    def width(self) -> int:
        return math.prod(self.shape)

    def viewed(self, shape: tuple[int, ...]) -> Value[B]:
        """The same columns in another shape."""
        return Value(self.buffer, self.column, shape)

    def sliced(self, start: int, stop: int) -> Value[B]:
        """Entries start … stop of the first dimension of `shape`: columns that lie together."""
        inner = math.prod(self.shape[1:])
        return Value(self.buffer, self.column + start * inner, (stop - start, *self.shape[1:]))
