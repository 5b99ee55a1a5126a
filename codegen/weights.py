"""Which weights a plan holds, where, in which layout; and writing them a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from llmc.errors import UserError
from llmc.kernels import pack
from llmc.kernels.weights import Reader, WeightRef

_BLOCK_ELEMENTS = 8 << 20
"""Elements of a weight that are in memory at once while it is packed (32 MiB as float32)."""


@dataclass(frozen=True)
class Entry:
    """One stored weight. offset and size in bytes within the weights segment; 1-D weights are raw float32.

    gated: the rows are gate then up, and are stored in alternating tiles.
    """

    ref: WeightRef | None
    constant: torch.Tensor | None
    format: str
    gated: bool
    offset: int
    size: int

    @property
    def layout(self) -> pack.PackedLayout:
        assert self.ref is not None
        rows = self.ref.shape[0] // (2 if self.gated else 1)
        return pack.packed_layout(self.format, rows, self.ref.shape[1], self.gated)

    def region(self, name: str) -> int | None:
        """Offset of a region of a packed matrix within the segment."""
        return next((self.offset + r.offset for r in self.layout.regions if r.name == name), None)


@dataclass
class WeightTable:
    """The weights segment under construction. Equal recipes in the same layout are stored once."""

    entries: list[Entry] = field(default_factory=list)
    size: int = 0

    def matrix(self, ref: WeightRef, format: str, gated: bool) -> Entry:
        for entry in self.entries:
            if entry.ref == ref and entry.format == format and entry.gated == gated:
                return entry
        rows = ref.shape[0] // (2 if gated else 1)
        layout = pack.packed_layout(format, rows, ref.shape[1], gated)
        return self._add(ref, None, format, gated, layout.size)

    def vector(self, ref: WeightRef) -> Entry:
        for entry in self.entries:
            if entry.ref == ref:
                return entry
        return self._add(ref, None, "f32", False, ref.shape[0] * 4)

    def constant(self, value: torch.Tensor) -> Entry:
        for entry in self.entries:
            if entry.constant is not None and torch.equal(entry.constant, value):
                return entry
        return self._add(None, value, "f32", False, value.numel() * 4)

    def _add(self, ref: WeightRef | None, constant: torch.Tensor | None, format: str, gated: bool, size: int) -> Entry:
        entry = Entry(ref, constant, format, gated, self.size, size)
        self.entries.append(entry)
        self.size += -(-size // pack.ALIGN) * pack.ALIGN
        return entry

    def blocks(self, reader: Reader) -> Iterator[tuple[int, memoryview]]:
        """(offset within the segment, bytes) of everything, weight by weight, in blocks of bounded size.

        Regions of one matrix interleave, so offsets do not only grow. Raises UserError for a weight whose values do
        not fit its format.
        """
        for entry in self.entries:
            if entry.constant is not None:
                yield entry.offset, memoryview(entry.constant.to(torch.float32).numpy().tobytes())
            elif entry.ref is not None and len(entry.ref.shape) == 1:
                yield (
                    entry.offset,
                    memoryview(np.ascontiguousarray(entry.ref.read(reader), np.float32).tobytes()),
                )
            else:
                try:
                    yield from _matrix_blocks(entry, reader)
                except ValueError as error:
                    assert entry.ref is not None
                    raise UserError(f"weight {entry.ref.describe()[:200]}: {error}; build with --bf16") from error


def _matrix_blocks(entry: Entry, reader: Reader) -> Iterator[tuple[int, memoryview]]:
    ref, layout = entry.ref, entry.layout
    assert ref is not None
    rows = ref.shape[0] // (2 if entry.gated else 1)
    step = max(1, _BLOCK_ELEMENTS // ref.shape[1] // pack.LANES) * pack.LANES
    done = [0] * len(layout.regions)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        block = ref.read(reader, start, stop)
        if entry.gated:
            parts = pack.pack_gated_rows(entry.format, block, ref.read(reader, rows + start, rows + stop))
        else:
            parts = pack.pack_rows(entry.format, block)
        for index, (region, part) in enumerate(zip(layout.regions, parts, strict=True)):
            yield entry.offset + region.offset + done[index], memoryview(part.data)
            done[index] += part.nbytes
