"""The batch as kernels read it: derived arrays, and the one buffer in which they travel to the device.

The buffer has the bounded arrays at fixed offsets, then a tail: the block tables and, behind them, the penalties,
biases and masks of the rows (`extra`). Both are addressed from the tail's start: what is copied is what is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from llmc.kv_page import PAGE_SIZE
from llmc.runtime.batch import Batch, Int32
from llmc.runtime.cuda.devices import Bytes
from llmc.runtime.sampling_rows import ROW_SAMPLING, pack_sampling

META_WORDS = 16
BLOCK = 64
"""Positions of one work item of split attention."""
_EXTRA = ("penalty_tokens", "penalty_counts", "bias_tokens", "bias_values", "allowed")
_EXTRA_META = 9
_SAMPLING_WORDS = ROW_SAMPLING.itemsize // 4
_ALIGNMENT = 64


@dataclass(frozen=True)
class Step:
    """One batch, ready to be written. `arrays`: the bounded arrays by name, int32, meta among them. `tail`: words.

    sizes: T, R, S, D (sequences of exactly one token) and tiles0… by their names in a launch list. items: work items
    of split attention. adjusted: a row has penalties, biases or a mask. decode: every sequence has one token and
    samples it.
    """

    arrays: dict[str, Int32]
    tail: Int32
    sizes: dict[str, int]
    items: int
    adjusted: bool
    decode: bool


def derive_step(batch: Batch, tile_tokens: tuple[int, ...]) -> Step:
    """From a checked batch. Raises ValueError for sampling rows whose arrays differ in length."""
    starts, tokens = batch.query_start, len(batch.tokens)
    counts = np.diff(starts)
    seqs, rows = len(counts), len(batch.rows)
    lens = batch.positions[starts[1:] - 1] + 1
    decode_seqs = np.flatnonzero(counts == 1).astype(np.int32)
    blocks = np.zeros(len(decode_seqs) + 1, np.int32)
    np.cumsum(-(-lens[decode_seqs] // BLOCK), out=blocks[1:])
    tiles = {f"tiles{i}": _tiles(counts, size) for i, size in enumerate(tile_tokens)}
    sampling, flat = pack_sampling(batch.sampling)
    tail, stride, extra = _tail(batch.block_tables, int(lens.max()), flat)
    sizes = {"T": tokens, "R": rows, "S": seqs, "D": len(decode_seqs)} | {n: len(t) for n, t in tiles.items()}
    meta = np.zeros(META_WORDS, np.int32)
    meta[:6] = tokens, rows, seqs, len(decode_seqs), blocks[-1], stride
    meta[6 : 6 + len(tiles)] = [len(t) for t in tiles.values()]
    meta[_EXTRA_META : _EXTRA_META + len(_EXTRA)] = extra
    arrays = {
        "meta": meta, "tokens": batch.tokens, "positions": batch.positions,
        "seqs": np.repeat(np.arange(seqs, dtype=np.int32), counts), "starts": starts,
        "rows": batch.rows, "decode_seqs": decode_seqs, "decode_blocks": blocks, **tiles,
        "sampling": sampling.view(np.int32).reshape(rows, _SAMPLING_WORDS),
    }  # fmt: skip
    adjusted = any(array is not None for array in flat.values())
    decode = tokens == seqs == rows and bool((batch.rows == np.arange(tokens)).all())
    return Step(arrays, tail, sizes, int(blocks[-1]), adjusted, decode)


def _tiles(counts: Int32, size: int) -> Int32:
    """[N, 2]: each tile of `size` tokens of the sequences with more than one token, as (sequence, first token)."""
    seqs = np.flatnonzero(counts > 1)
    if not len(seqs):  # every decode step, whose time on the host counts
        return np.zeros((0, 2), np.int32)
    per_seq = -(-counts[seqs] // size)
    first = np.cumsum(per_seq) - per_seq
    index = np.arange(per_seq.sum()) - np.repeat(first, per_seq)
    return np.stack((np.repeat(seqs, per_seq), index * size), axis=1).astype(np.int32)


def _tail(tables: Int32, longest: int, flat: dict[str, Any]) -> tuple[Int32, int, list[int]]:
    """The tail's words; the stride of the tables (their used columns); where each array of `extra` starts."""
    stride = -(-longest // PAGE_SIZE)
    parts, at, extra = [tables[:, :stride].ravel()], tables.shape[0] * stride, []
    for name in _EXTRA:
        extra.append(at)
        if (array := flat[name]) is not None:
            parts.append(array.view(np.int32))
            at += len(array)
    return np.concatenate(parts), stride, extra


class BatchLayout:
    """Byte offsets of the arrays in the buffer, for steps of at most max_tokens tokens (a multiple of 16), max_seqs
    sequences and max_rows rows. `offsets` holds "tables" and "extra" too: the tail, at the end of the bounded part."""

    def __init__(self, max_tokens: int, max_seqs: int, max_rows: int, tile_tokens: tuple[int, ...]) -> None:
        tokens = (max_tokens,)
        self.shapes: dict[str, tuple[int, ...]] = {
            "meta": (META_WORDS,), "tokens": tokens, "positions": tokens, "seqs": tokens, "starts": (max_seqs + 1,),
            "rows": (max_rows,), "decode_seqs": (max_seqs,), "decode_blocks": (max_seqs + 1,),
            **{f"tiles{i}": (max_tokens // size + max_seqs, 2) for i, size in enumerate(tile_tokens)},
            "sampling": (max_rows, _SAMPLING_WORDS),
        }  # fmt: skip
        self.offsets: dict[str, int] = {}
        at = 0
        for name, shape in self.shapes.items():
            self.offsets[name] = at
            at += -(-4 * int(np.prod(shape)) // _ALIGNMENT) * _ALIGNMENT
        self.offsets["tables"] = self.offsets["extra"] = self.tail = at

    def size(self, tail_words: int) -> int:
        """Bytes of a buffer whose tail holds that many words."""
        return self.tail + 4 * tail_words


class BatchBuffer:
    """A host buffer of `layout.size(tail_words)` bytes, with a view of each array."""

    def __init__(self, layout: BatchLayout, memory: Bytes) -> None:
        words = memory.view(np.int32)
        self._memory, self._tail_at = memory, layout.tail
        self._views = {
            name: words[layout.offsets[name] // 4 :][: int(np.prod(shape))].reshape(shape)
            for name, shape in layout.shapes.items()
        }
        self._tail = words[layout.tail // 4 :]
        self.tail_words = len(self._tail)

    def write(self, step: Step) -> Bytes:
        """Writes a step that fits; returns the part of the buffer to copy. What a step leaves out keeps old values:
        kernels read as far as `meta` says."""
        for name, array in step.arrays.items():
            self._views[name][: len(array)] = array
        self._tail[: len(step.tail)] = step.tail
        return self._memory[: self._tail_at + 4 * len(step.tail)]
