"""Which weights a plan holds, where, in which layout; and writing them a block of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from llmc.errors import UserError
from llmc.kernels import pack
from llmc.kernels.codes import Array, Codes
from llmc.kernels.formats import F32, Format
from llmc.kernels.weights import CodeReader, Reader, WeightRef

Quantizer = Callable[[WeightRef, Format, Array], Codes | None]
"""(weight, format, rows of it) -> their codes, or None: those of `kernels.codes.quantize`."""

_BLOCK_ELEMENTS = 2 << 20
"""Elements of a weight that are in memory at once while it is packed (8 MiB as float32)."""


@dataclass(frozen=True)
class Entry:
    """One stored weight. offset and size in bytes within the weights segment; 1-D weights are raw float32.

    gated: the rows are gate then up, and are stored in alternating tiles.
    """

    ref: WeightRef | None
    constant: torch.Tensor | None
    format: Format
    gated: bool
    offset: int
    size: int

    @property
    def is_matrix(self) -> bool:
        """Whether it is packed in tiles."""
        return self.ref is not None and len(self.ref.shape) == 2

    @property
    def layout(self) -> pack.PackedLayout:
        assert self.ref is not None
        rows = self.ref.shape[0] // (2 if self.gated else 1)
        return pack.packed_layout(self.format, rows, self.ref.shape[1], self.gated)

    def region(self, name: str) -> int | None:
        """Offset of a region of a packed matrix within the segment."""
        return next((self.offset + r.offset for r in self.layout.regions if r.name == name), None)


def no_quantizer(ref: WeightRef, format: Format, rows: Array) -> Codes | None:
    """Rounding to the nearest, as `kernels.codes.quantize` does."""
    return None


def quantised_rows(quantizer: Quantizer, ref: WeightRef, format: Format, rows: Array) -> Codes:
    """Rows of a matrix in a format with groups, from their values."""
    return quantizer(ref, format, rows) or pack.quantize_rows(format, rows)


@dataclass
class WeightTable:
    """The weights segment under construction. Equal recipes in the same layout are stored once.

    kept: (tensor of a quantised checkpoint, format it was packed in) -> whether that holds all of the tensor's own
    codes; filled by `blocks`.
    """

    entries: list[Entry] = field(default_factory=list)
    size: int = 0
    kept: dict[tuple[str, Format], bool] = field(default_factory=dict)
    _found: dict[Hashable, Entry] = field(default_factory=dict)

    def matrix(self, ref: WeightRef, format: Format, gated: bool) -> Entry:
        """The entry of a matrix in the layout of a format."""
        rows = ref.shape[0] // (2 if gated else 1)
        size = pack.packed_layout(format, rows, ref.shape[1], gated).size
        return self._entry((ref, format.stored, gated), Entry(ref, None, format.stored, gated, self.size, size))

    def vector(self, ref: WeightRef) -> Entry:
        """The entry of a weight of one dimension, raw float32."""
        return self._entry(ref, Entry(ref, None, F32, False, self.size, ref.shape[0] * 4))

    def constant(self, value: torch.Tensor) -> Entry:
        """The entry of a constant of the model, raw float32."""
        key = (tuple(value.shape), value.dtype, value.contiguous().numpy().tobytes())
        return self._entry(key, Entry(None, value, F32, False, self.size, value.numel() * 4))

    def _entry(self, key: Hashable, new: Entry) -> Entry:
        """The entry of a key; `new`, which begins at the end of the segment, if there is none."""
        if key not in self._found:
            self._found[key] = new
            self.entries.append(new)
            self.size += -(-new.size // pack.ALIGN) * pack.ALIGN
        return self._found[key]

    def blocks(
        self, reader: Reader, coded: CodeReader | None = None, quantizer: Quantizer = no_quantizer
    ) -> Iterator[tuple[int, memoryview]]:
        """(offset within the segment, bytes) of everything, weight by weight, in blocks of bounded size.

        coded: the checkpoint's own codes, which are taken as they are where the format holds them; quantizer: for
        what it does not hold. Regions of one matrix interleave, so offsets do not only grow. Raises UserError for a
        weight whose values do not fit its format.
        """
        for entry in self.entries:
            if entry.constant is not None:
                yield entry.offset, memoryview(entry.constant.to(torch.float32).numpy().tobytes())
            elif entry.ref is not None and not entry.is_matrix:
                yield (
                    entry.offset,
                    memoryview(np.ascontiguousarray(entry.ref.read(reader), np.float32).tobytes()),
                )
            else:
                try:
                    yield from _matrix_blocks(entry, partial(self._rows, entry, reader, coded, quantizer))
                except ValueError as error:
                    assert entry.ref is not None
                    raise UserError(f"weight {entry.ref.describe()[:200]}: {error}; build with --bf16") from error

    def _rows(
        self, entry: Entry, reader: Reader, coded: CodeReader | None, quantizer: Quantizer, start: int, stop: int
    ) -> Array | Codes:
        """Rows of a matrix: values, or codes: with `coded` tensor by tensor the checkpoint's own, else quantised."""
        ref, format = entry.ref, entry.format
        assert ref is not None
        if not format.group:
            return ref.read(reader, start, stop)

        def codes_of(name: str, lo: int, hi: int) -> Codes:
            own = None if coded is None else coded(name, lo, hi)
            held = None if own is None else own.held_by(format)
            self.kept[name, format] = self.kept.get((name, format), True) and held is not None
            return quantised_rows(quantizer, ref, format, reader(name, lo, hi)) if held is None else held

        found = None if coded is None else ref.codes(codes_of, start, stop)
        if found is None:
            if coded is not None:  # the recipe computes with values
                self.kept |= {(name, format): False for name in ref.tensors()}
            return quantised_rows(quantizer, ref, format, ref.read(reader, start, stop))
        return found


Rows = Callable[[int, int], Array | Codes]
"""(first row, end row) -> those rows of a matrix."""


def _matrix_blocks(entry: Entry, read: Rows) -> Iterator[tuple[int, memoryview]]:
    ref, layout = entry.ref, entry.layout
    assert ref is not None
    rows = ref.shape[0] // (2 if entry.gated else 1)
    step = max(1, _BLOCK_ELEMENTS // ref.shape[1] // pack.LANES) * pack.LANES
    done = [0] * len(layout.regions)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        block = read(start, stop)
        if entry.gated:
            parts = pack.pack_gated_rows(entry.format, block, read(rows + start, rows + stop))
        else:
            parts = pack.pack_rows(entry.format, block)
        for index, (region, part) in enumerate(zip(layout.regions, parts, strict=True)):
            yield entry.offset + region.offset + done[index], memoryview(part.data)
            done[index] += part.nbytes
