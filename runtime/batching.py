"""From scheduled chunks to the arrays of a `Batch`, and from the tokens of its rows back to the chunks.

Everything is recomputed each step from the sequences, so preemption and abort leave nothing behind here.
"""

from __future__ import annotations

from array import array

import numpy as np

from llmc.runtime.batch import Batch, Int32, RowSampling
from llmc.runtime.scheduler import Chunk


def build_batch(chunks: list[Chunk]) -> Batch:
    """The ragged batch of a step; its rows are those of the chunks, in their order."""
    tokens, positions = array("i"), array("i")
    query_start, rows = [0], []
    tables: Int32 = np.zeros((len(chunks), max(len(chunk.sequence.pages) for chunk in chunks)), np.int32)
    sampling: list[RowSampling] = []
    for table, chunk in zip(tables, chunks, strict=True):
        sequence, end = chunk.sequence, chunk.start + chunk.count
        first = len(tokens)
        tokens.extend(sequence.tokens[chunk.start : end])
        tokens.extend(chunk.drafts)
        positions.extend(range(chunk.start, end))
        # The view on the pages ends with the statement: it does not block a later append.
        table[: len(sequence.pages)] = np.frombuffer(sequence.pages, np.int32)
        query_start.append(len(tokens))
        for position, index in enumerate(chunk.sampled):
            rows.append(first + index)
            sampling.append(sequence.sampler.row(position, chunk.drafts))
    want_logits = any(chunk.sampled and chunk.sequence.request.params.logprobs for chunk in chunks)
    return Batch(
        np.frombuffer(tokens, np.int32), np.frombuffer(positions, np.int32), np.array(query_start, np.int32), tables,
        np.array(rows, np.int32), tuple(sampling), want_logits,
    )  # fmt: skip


def accepted_tokens(chunks: list[Chunk], rows: list[int]) -> list[list[int]]:
    """What each chunk's sequence gets of the tokens sampled in all rows of a step: those of the chunk's rows up to the
    first that its draft did not foresee. Raises ValueError for another number of rows than the chunks have."""
    if len(rows) != sum(len(chunk.sampled) for chunk in chunks):
        raise ValueError(f"{len(rows)} tokens for the rows of {len(chunks)} chunks")
    found, at = [], 0
    for chunk in chunks:
        mine = rows[at : at + len(chunk.sampled)]
        right = 0
        while right < len(chunk.drafts) and mine[right] == chunk.drafts[right]:
            right += 1
        found.append(mine[: right + 1])
        at += len(mine)
    return found
