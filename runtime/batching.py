"""From scheduled chunks to the arrays of a `Batch`.

The one place between scheduler and executor that knows numpy. Everything is recomputed each step from the
sequences, so preemption and abort leave nothing behind here.
"""

from __future__ import annotations

from array import array

import numpy as np

from llmc.runtime.batch import Batch, Int32, RowSampling
from llmc.runtime.scheduler import Chunk, Sequence

# Below this a temperature is greedy: dividing float32 logits by it would overflow.
GREEDY_BELOW = 1e-5
# Added to the logits of stop tokens before min_tokens. Finite, so that no kernel meets an infinity.
SUPPRESSED = -1e9


def build_batch(chunks: list[Chunk], eos_token_ids: frozenset[int]) -> Batch:
    """The ragged batch of a step; rows are the last tokens of the chunks that sample, in the order of the
    chunks.
    """
    tokens, positions = array("i"), array("i")
    query_start, rows = [0], []
    tables: Int32 = np.zeros((len(chunks), max(len(chunk.sequence.pages) for chunk in chunks)), np.int32)
    sampling: list[RowSampling] = []
    for table, chunk in zip(tables, chunks, strict=True):
        sequence, end = chunk.sequence, chunk.start + chunk.count
        tokens.extend(sequence.tokens[chunk.start : end])
        positions.extend(range(chunk.start, end))
        # The view on the pages ends with the statement: it does not block a later append.
        table[: len(sequence.pages)] = np.frombuffer(sequence.pages, np.int32)
        query_start.append(len(tokens))
        if chunk.samples:
            rows.append(len(tokens) - 1)
            sampling.append(sequence.row_sampling or row_sampling(sequence, eos_token_ids))
    want_logits = any(chunk.samples and chunk.sequence.request.params.logprobs for chunk in chunks)
    return Batch(
        np.frombuffer(tokens, np.int32), np.frombuffer(positions, np.int32), np.array(query_start, np.int32), tables,
        np.array(rows, np.int32), tuple(sampling), want_logits,
    )  # fmt: skip


def row_sampling(sequence: Sequence, eos_token_ids: frozenset[int]) -> RowSampling:
    """How the next token of `sequence` is sampled; see RowSampling for the meaning of each field."""
    params = sequence.request.params
    penalty_tokens, penalty_counts = _penalties(sequence)
    bias = dict(params.logit_bias)
    too_short = sequence.num_output < params.min_tokens
    if too_short:
        stops = set(params.stop_token_ids) if params.ignore_eos else eos_token_ids.union(params.stop_token_ids)
        bias.update(dict.fromkeys(sorted(stops), SUPPRESSED))
    row = RowSampling(
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
        want_logprob=params.logprobs is not None,
    )
    if not too_short and penalty_tokens is None:
        sequence.row_sampling = row
    return row


def _penalties(sequence: Sequence) -> tuple[Int32 | None, Int32 | None]:
    params = sequence.request.params
    if params.repetition_penalty == 1.0 and params.presence_penalty == 0.0 and params.frequency_penalty == 0.0:
        return None, None
    counts: dict[int, int] = {}
    if params.repetition_penalty != 1.0:  # the only penalty that looks at the prompt
        counts = dict.fromkeys(sequence.request.prompt, 0)
    counts.update(sequence.output_counts)
    return np.fromiter(counts, np.int32, len(counts)), np.fromiter(counts.values(), np.int32, len(counts))
