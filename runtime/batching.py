"""From scheduled chunks to the arrays of a `Batch`, and from logits to the likeliest tokens.

The one place between scheduler and executor that knows numpy. Everything is recomputed each step from the
sequences, so preemption and abort leave nothing behind here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llmc.runtime.batch import Batch, Float32, Int32, RowSampling
from llmc.runtime.scheduler import Chunk, Sequence

# Below this a temperature is greedy: dividing float32 logits by it would overflow.
GREEDY_BELOW = 1e-5
# Added to the logits of stop tokens before min_tokens. Finite, so that no kernel meets an infinity.
SUPPRESSED = -1e9


def build_batch(chunks: list[Chunk], eos_token_ids: frozenset[int]) -> Batch:
    """The ragged batch of a step; rows are the last tokens of the chunks that sample, in the order of the
    chunks.
    """
    total = sum(chunk.count for chunk in chunks)
    tokens: Int32 = np.empty(total, np.int32)
    positions: Int32 = np.empty(total, np.int32)
    query_start: Int32 = np.zeros(len(chunks) + 1, np.int32)
    tables: Int32 = np.zeros((len(chunks), max(len(chunk.sequence.pages) for chunk in chunks)), np.int32)
    rows: list[int] = []
    sampling: list[RowSampling] = []
    offset = 0
    for i, chunk in enumerate(chunks):
        sequence, end = chunk.sequence, offset + chunk.count
        # The array's slice is a copy, and the view on pages ends with the statement: neither blocks a later
        # append.
        tokens[offset:end] = np.frombuffer(sequence.tokens[chunk.start : chunk.start + chunk.count], np.int32)
        positions[offset:end] = np.arange(chunk.start, chunk.start + chunk.count, dtype=np.int32)
        tables[i, : len(sequence.pages)] = np.frombuffer(sequence.pages, np.int32)
        query_start[i + 1] = offset = end
        if chunk.samples:
            rows.append(end - 1)
            sampling.append(row_sampling(sequence, eos_token_ids))
    want_logits = any(chunk.samples and chunk.sequence.request.params.logprobs for chunk in chunks)
    return Batch(tokens, positions, query_start, tables, np.array(rows, np.int32), tuple(sampling), want_logits)


def row_sampling(sequence: Sequence, eos_token_ids: frozenset[int]) -> RowSampling:
    """How the next token of `sequence` is sampled; see RowSampling for the meaning of each field."""
    params = sequence.request.params
    penalty_tokens, penalty_counts = _penalties(sequence)
    bias = dict(params.logit_bias)
    if sequence.num_output < params.min_tokens:
        stops = set(params.stop_token_ids) if params.ignore_eos else eos_token_ids.union(params.stop_token_ids)
        bias.update(dict.fromkeys(sorted(stops), SUPPRESSED))
    return RowSampling(
        temperature=params.temperature if params.temperature >= GREEDY_BELOW else 0.0,
        top_k=max(params.top_k, 0),
        top_p=max(params.top_p, 1e-6),
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=sequence.seed,
        penalty_tokens=penalty_tokens,
        penalty_counts=penalty_counts,
        bias_tokens=np.fromiter(bias, np.int32, len(bias)) if bias else None,
        bias_values=np.fromiter(bias.values(), np.float32, len(bias)) if bias else None,
    )


def _penalties(sequence: Sequence) -> tuple[Int32 | None, Int32 | None]:
    params = sequence.request.params
    if params.repetition_penalty == 1.0 and params.presence_penalty == 0.0 and params.frequency_penalty == 0.0:
        return None, None
    counts: dict[int, int] = {}
    if params.repetition_penalty != 1.0:  # the only penalty that looks at the prompt
        counts = dict.fromkeys(sequence.request.prompt, 0)
    counts.update(sequence.output_counts)
    return np.fromiter(counts, np.int32, len(counts)), np.fromiter(counts.values(), np.int32, len(counts))


def top_logprobs(logits: Float32, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest tokens of raw logits [V] with their log-probabilities, best first, lowest id
    first in a tie."""
    row: npt.NDArray[np.float64] = logits.astype(np.float64)
    peak = row.max()
    logsum = peak + np.log(np.exp(row - peak).sum())
    count = min(count, row.size)
    # Everything that reaches the count-th best value, so that a tie at the edge is cut by id, not by
    # partition order.
    edge = np.partition(row, row.size - count)[row.size - count]
    candidates = np.flatnonzero(row >= edge)
    best = candidates[np.argsort(-row[candidates], kind="stable")][:count]
    return tuple((int(i), float(row[i] - logsum)) for i in best)
