"""Machine code trusts its batch, so every index of one is checked here before any executor hands it over."""

from __future__ import annotations

import numpy as np

from llmc.runtime.batch import Batch, Executor


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
    if len(batch.positions) != count or batch.block_tables.shape[0] != seqs or len(batch.sampling) != len(rows):
        raise ValueError("batch arrays differ in length")
    if starts[0] != 0 or starts[-1] != count or (starts[1:] <= starts[:-1]).any():
        raise ValueError("query_start does not divide the tokens")
    if len(rows) and (rows.min() < 0 or rows.max() >= count):
        raise ValueError("a row to sample is no token of the batch")
    if tokens.min() < 0 or tokens.max() >= executor.vocab_size:
        raise ValueError("a token id is outside the vocabulary")
    _check_pages(batch, executor)


def _check_pages(batch: Batch, executor: Executor) -> None:
    tables, starts, positions = batch.block_tables, batch.query_start, batch.positions
    if positions.min() < 0 or int(positions.max()) // executor.page_size >= tables.shape[1]:
        raise ValueError("a position lies outside its block table")
    steps = np.diff(positions)
    steps[starts[1:-1] - 1] = 1  # from one sequence to the next
    if (steps != 1).any():
        raise ValueError("positions of a sequence are not consecutive")
    if tables.min() < 0 or tables.max() >= executor.num_pages:
        raise ValueError("a block table names a page outside the pool")
