"""Machine code trusts its batch, so every index of one is checked here before any executor hands it over."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from llmc.runtime.batch import Batch, Executor, Int32, UInt32

_SHORT = 256


def check_batch(batch: Batch, executor: Executor) -> None:
    """Raises ValueError for a batch that is inconsistent, or larger than the executor's limits."""
    tokens, rows, starts = batch.tokens, batch.rows, batch.query_start
    arrays = (tokens, batch.positions, starts, batch.block_tables, rows)
    if any(a.dtype != np.int32 or not a.flags.c_contiguous for a in arrays):
        raise ValueError("batch arrays must be contiguous int32")
    if batch.block_tables.ndim != 2 or any(a.ndim != 1 for a in arrays if a is not batch.block_tables):
        raise ValueError("block_tables must have two dimensions, the other arrays one")
    count, seqs = len(tokens), len(starts) - 1
    if not (0 < count <= executor.max_num_tokens and 0 <= len(rows) <= executor.max_num_rows):
        raise ValueError(f"a batch of {count} tokens and {len(rows)} rows does not fit the engine")
    if seqs > executor.max_num_seqs:
        raise ValueError(f"a batch of {seqs} sequences does not fit the engine")
    if len(batch.positions) != count or batch.block_tables.shape[0] != seqs or len(batch.sampling) != len(rows):
        raise ValueError("batch arrays differ in length")
    bounds = starts.tolist()
    if bounds[0] != 0 or bounds[-1] != count or any(a >= b for a, b in pairwise(bounds)):
        raise ValueError("query_start does not divide the tokens")
    if len(rows) and _largest(rows) >= count:
        raise ValueError("a row to sample is no token of the batch")
    if _largest(tokens) >= executor.vocab_size:
        raise ValueError("a token id is outside the vocabulary")
    for row in batch.sampling:
        if row.allowed is not None:
            _check_mask(row.allowed, executor.vocab_size)
    _check_pages(batch, executor)


def _check_mask(allowed: UInt32, vocab_size: int) -> None:
    if allowed.dtype != np.uint32 or allowed.shape != (-(-vocab_size // 32),):
        raise ValueError("a mask of allowed tokens has another size than the vocabulary")
    last = allowed[-1] & np.uint32((1 << (vocab_size - 1) % 32 + 1) - 1)
    if not (last or allowed[:-1].any()):
        raise ValueError("a mask allows no token")


def _check_pages(batch: Batch, executor: Executor) -> None:
    tables, starts, positions = batch.block_tables, batch.query_start, batch.positions
    if _largest(positions) // executor.page_size >= tables.shape[1]:
        raise ValueError("a position lies outside its block table")
    if len(positions) > tables.shape[0]:  # else every sequence has one
        steps = np.diff(positions)
        steps[starts[1:-1] - 1] = 1  # from one sequence to the next
        if (steps != 1).any():
            raise ValueError("positions of a sequence are not consecutive")
    if _largest(tables) >= executor.num_pages:
        raise ValueError("a block table names a page outside the pool")


def _largest(a: Int32) -> int:
    """Of the numbers as unsigned ones, so that a negative one is larger than any limit. This runs between two steps,
    when no core does anything else, and out of a cold cache: a call of numpy takes longer there than a short list."""
    unsigned = a.view(np.uint32)
    return max(unsigned.ravel().tolist(), default=0) if a.size <= _SHORT else int(unsigned.max())
