"""Weights as recipes. A weight never passes through the graph: the graph carries a `WeightRef`, passes extend the
recipe (transpose, concatenate, add, reorder), and the plan writer evaluates it a block of rows at a time, so that
building needs memory for a block, not for the model.

Recipes are frozen, compare by value and can be hashed: two uses of one weight (tied embedding and head) are equal and
are stored once. `read` gives float32; `codes` gives what a quantised checkpoint holds, exactly, where it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.kernels.codes import Codes, stack

Array = npt.NDArray[np.float32]
Reader = Callable[[str, int, int], Array]
"""(checkpoint tensor name, first row, end row) -> float32 rows."""
CodeReader = Callable[[str, int, int], Codes | None]
"""The same -> the rows as the checkpoint has them quantised, or None where it has not, or in a way of its own."""


_LISTED = 8
"""Parts that a description names one by one."""


@dataclass(frozen=True)
class WeightRef:
    """A weight of the given shape. Subclasses say how its rows come about."""

    shape: tuple[int, ...]

    def read(self, reader: Reader, start: int = 0, stop: int | None = None) -> Array:
        """Rows start:stop along the first dimension, float32."""
        raise NotImplementedError(type(self).__name__)

    def codes(self, reader: CodeReader, start: int = 0, stop: int | None = None) -> Codes | None:
        """The same rows of a matrix as exact codes, or None where the recipe computes with values."""
        return None

    def tensors(self) -> tuple[str, ...]:
        """The names of the checkpoint's tensors that it comes from."""
        return ()

    def describe(self) -> str:
        """The recipe in one line, for the manifest and for IR dumps."""
        raise NotImplementedError(type(self).__name__)


@dataclass(frozen=True)
class Stored(WeightRef):
    """A tensor of the checkpoint, as it stands there."""

    name: str

    def read(self, reader: Reader, start: int = 0, stop: int | None = None) -> Array:
        return reader(self.name, start, self.shape[0] if stop is None else stop)

    def codes(self, reader: CodeReader, start: int = 0, stop: int | None = None) -> Codes | None:
        return reader(self.name, start, self.shape[0] if stop is None else stop)

    def tensors(self) -> tuple[str, ...]:
        return (self.name,)

    def describe(self) -> str:
        return self.name


@dataclass(frozen=True)
class Zeros(WeightRef):
    """All zeros: the bias of a linear without one, when it is merged with linears that have one."""

    def read(self, reader: Reader, start: int = 0, stop: int | None = None) -> Array:
        rows = len(range(*slice(start, stop).indices(self.shape[0])))
        return np.zeros((rows, *self.shape[1:]), np.float32)

    def describe(self) -> str:
        return "zeros"


@dataclass(frozen=True)
class Transposed(WeightRef):
    """The transpose of a 2-D weight (GPT-2 stores its linears as [in, out]). Reads the whole source."""

    of: WeightRef

    def read(self, reader: Reader, start: int = 0, stop: int | None = None) -> Array:
        return np.ascontiguousarray(self.of.read(reader)[:, start:stop].T)

    def tensors(self) -> tuple[str, ...]:
        return self.of.tensors()

    def describe(self) -> str:
        return f"transpose({self.of.describe()})"


@dataclass(frozen=True)
class Affine(WeightRef):
    """of * scale + shift, elementwise (Gemma's norms multiply by 1 + weight)."""

    of: WeightRef
    scale: float
    shift: float

    def read(self, reader: Reader, start: int = 0, stop: int | None = None) -> Array:
        rows = self.of.read(reader, start, stop)
        return rows * np.float32(self.scale) + np.float32(self.shift)

    def tensors(self) -> tuple[str, ...]:
        return self.of.tensors()

    def describe(self) -> str:
        return f"affine({self.of.describe()}, {self.scale!r}, {self.shift!r})"


@dataclass(frozen=True)
class Concat(WeightRef):
    """Parts one after the other along the first dimension (merged QKV, merged gate and up)."""

    parts: tuple[WeightRef, ...]

    def read(self, reader: Reader, start: int = 0, stop: int | None = None) -> Array:
        pieces = [part.read(reader, lo, hi) for part, lo, hi in self._pieces(start, stop)]
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.zeros((0, *self.shape[1:]), np.float32)

    def codes(self, reader: CodeReader, start: int = 0, stop: int | None = None) -> Codes | None:
        pieces = []
        for part, lo, hi in self._pieces(start, stop):
            found = part.codes(reader, lo, hi)
            if found is None:
                return None
            pieces.append(found)
        return stack(pieces) if pieces else None

    def _pieces(self, start: int, stop: int | None) -> Iterator[tuple[WeightRef, int, int]]:
        """The parts that the rows start:stop lie in, and which of their rows these are."""
        base, stop = 0, self.shape[0] if stop is None else stop
        for part in self.parts:
            lo, hi = max(start - base, 0), min(stop - base, part.shape[0])
            if lo < hi:
                yield part, lo, hi
            base += part.shape[0]

    def tensors(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.tensors())

    def describe(self) -> str:
        return f"concat({_listed(self.parts)})"


@dataclass(frozen=True)
class Rows(WeightRef):
    """The rows start : start + shape[0] of another weight."""

    of: WeightRef
    start: int

    def read(self, reader: Reader, start: int = 0, stop: int | None = None) -> Array:
        stop = self.shape[0] if stop is None else stop
        return self.of.read(reader, self.start + start, self.start + stop)

    def codes(self, reader: CodeReader, start: int = 0, stop: int | None = None) -> Codes | None:
        stop = self.shape[0] if stop is None else stop
        return self.of.codes(reader, self.start + start, self.start + stop)

    def tensors(self) -> tuple[str, ...]:
        return self.of.tensors()

    def describe(self) -> str:
        return f"rows({self.of.describe()}, {self.start}, {self.start + self.shape[0]})"


@dataclass(frozen=True)
class Stack(WeightRef):
    """Weights of one shape as one with a dimension more (the matrices of all experts)."""

    parts: tuple[WeightRef, ...]

    def read(self, reader: Reader, start: int = 0, stop: int | None = None) -> Array:
        return np.stack([part.read(reader) for part in self.parts[start:stop]])

    def tensors(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.tensors())

    def describe(self) -> str:
        return f"stack({_listed(self.parts)})"


@dataclass(frozen=True)
class Item(WeightRef):
    """One entry along the first dimension of another weight. Reads the whole entry."""

    of: WeightRef
    index: int

    def read(self, reader: Reader, start: int = 0, stop: int | None = None) -> Array:
        return self.of.read(reader, self.index, self.index + 1)[0][start:stop]

    def tensors(self) -> tuple[str, ...]:
        return self.of.tensors()

    def describe(self) -> str:
        return f"item({self.of.describe()}, {self.index})"


def transposed(ref: WeightRef) -> WeightRef:
    """The transpose of a 2-D weight; that of a transpose is the weight itself."""
    return ref.of if isinstance(ref, Transposed) else Transposed((ref.shape[1], ref.shape[0]), ref)


def weight_name(ref: WeightRef) -> str:
    """What the graph calls the placeholder of a recipe; not unique."""
    return "w_" + "".join(c if c.isalnum() else "_" for c in ref.describe())[:80]


def _listed(parts: tuple[WeightRef, ...]) -> str:
    """The parts by name; of many the first and the last."""
    names = [p.describe() for p in (parts if len(parts) <= _LISTED else (parts[0], parts[-1]))]
    return ", ".join(names) if len(parts) <= _LISTED else f"{names[0]}, … {len(parts)} in all …, {names[1]}"


def stacked(parts: tuple[WeightRef, ...]) -> WeightRef:
    """The stack of weights of one shape."""
    return Stack((len(parts), *parts[0].shape), parts)


def item(ref: WeightRef, index: int) -> WeightRef:
    """Entry `index` along the first dimension."""
    return ref.parts[index] if isinstance(ref, Stack) else Item(ref.shape[1:], ref, index)


def rows(ref: WeightRef, start: int, stop: int) -> WeightRef:
    """The rows start:stop; whole parts of a concatenation are these parts."""
    if (start, stop) == (0, ref.shape[0]):
        return ref
    base = 0
    for part in ref.parts if isinstance(ref, Concat) else ():
        if base <= start and stop <= base + part.shape[0]:
            return rows(part, start - base, stop - base)
        base += part.shape[0]
    return Rows((stop - start, *ref.shape[1:]), ref, start)


def concat(parts: tuple[WeightRef, ...]) -> WeightRef:
    """Concatenation along the first dimension; one part is itself."""
    if len(parts) == 1:
        return parts[0]
    rows = sum(p.shape[0] for p in parts)
    return Concat((rows, *parts[0].shape[1:]), parts)


def unzip_heads(ref: WeightRef, heads: int, pieces: tuple[tuple[int, int], ...]) -> WeightRef:
    """Reorders rows laid out head by head, each head holding several pieces (GPT-NeoX: q, k, v of head 0, q, k, v of
    head 1, …), so that every piece becomes one block over all heads: all q, all k, all v. `pieces` are
    (first row, end row) within a head."""
    per_head = ref.shape[0] // heads
    parts = tuple(Rows((hi - lo, *ref.shape[1:]), ref, h * per_head + lo) for lo, hi in pieces for h in range(heads))
    return concat(parts)
