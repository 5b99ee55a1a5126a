"""How rows to sample are laid out for the machine code of every device (RowSampling in kernels/cpu/abi.h)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llmc.runtime.batch import Float32, Int32, RowSampling, UInt32

ROW_SAMPLING = np.dtype(
    [
        ("temperature", "<f4"), ("top_p", "<f4"), ("min_p", "<f4"), ("repetition_penalty", "<f4"),
        ("presence_penalty", "<f4"), ("frequency_penalty", "<f4"), ("top_k", "<i4"), ("num_penalty", "<i4"),
        ("num_bias", "<i4"), ("penalty_offset", "<i4"), ("bias_offset", "<i4"), ("no_logprob", "<i4"),
        ("seed", "<u8"), ("num_allowed", "<i4"), ("allowed_offset", "<i4"),
    ]
)  # fmt: skip
"""64 bytes."""


def pack_sampling(
    sampling: tuple[RowSampling, ...],
) -> tuple[npt.NDArray[np.generic], dict[str, npt.NDArray[np.generic] | None]]:
    """The rows [R] as abi.h lays them out, and the flat penalty, bias and mask arrays that they point into (None:
    empty).

    Raises ValueError for a row whose arrays differ in length.
    """
    table = np.zeros(len(sampling), ROW_SAMPLING)
    penalty_tokens: list[Int32] = []
    penalty_counts: list[Int32] = []
    bias_tokens: list[Int32] = []
    bias_values: list[Float32] = []
    allowed: list[UInt32] = []
    penalty_at = bias_at = allowed_at = 0
    for i, row in enumerate(sampling):
        penalties = 0 if row.penalty_tokens is None else len(row.penalty_tokens)
        biases = 0 if row.bias_tokens is None else len(row.bias_tokens)
        words = 0 if row.allowed is None else len(row.allowed)
        if penalties != (0 if row.penalty_counts is None else len(row.penalty_counts)):
            raise ValueError("penalty_tokens and penalty_counts differ in length")
        if biases != (0 if row.bias_values is None else len(row.bias_values)):
            raise ValueError("bias_tokens and bias_values differ in length")
        table[i] = (
            row.temperature, row.top_p, row.min_p, row.repetition_penalty, row.presence_penalty,
            row.frequency_penalty, row.top_k, penalties, biases, penalty_at, bias_at,
            not row.want_logprob, row.seed, words, allowed_at,
        )  # fmt: skip
        if row.penalty_tokens is not None and row.penalty_counts is not None:
            penalty_tokens.append(row.penalty_tokens)
            penalty_counts.append(row.penalty_counts)
        if row.bias_tokens is not None and row.bias_values is not None:
            bias_tokens.append(row.bias_tokens)
            bias_values.append(row.bias_values)
        if row.allowed is not None:
            allowed.append(row.allowed)
        penalty_at, bias_at, allowed_at = penalty_at + penalties, bias_at + biases, allowed_at + words
    return table, {
        "penalty_tokens": np.concatenate(penalty_tokens).astype(np.int32) if penalty_tokens else None,
        "penalty_counts": np.concatenate(penalty_counts).astype(np.int32) if penalty_counts else None,
        "bias_tokens": np.concatenate(bias_tokens).astype(np.int32) if bias_tokens else None,
        "bias_values": np.concatenate(bias_values).astype(np.float32) if bias_values else None,
        "allowed": np.concatenate(allowed) if allowed else None,
    }
