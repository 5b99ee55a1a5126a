"""From logits to the likeliest tokens and their log-probabilities."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llmc.runtime.batch import Float32


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
