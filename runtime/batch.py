"""What goes through the one door to the machine code: a ragged batch in, sampled tokens out.

`Executor` is a protocol: the CPU executor implements it over a shared object, tests over a few lines of numpy.
Nothing here knows about requests; the scheduler builds a `Batch`, the engine hands it over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
UInt32 = npt.NDArray[np.uint32]
Float32 = npt.NDArray[np.float32]


class ExecutorLost(RuntimeError):
    """The device under an executor is gone: no later step of it can succeed, only a new process helps."""


@dataclass(frozen=True)
class RowSampling:
    """How one row of logits becomes a token. The result depends on these fields and the logits alone.

    temperature: 0 is greedy (lowest id wins a tie) whatever the other fields say. top_k: 0 is off.
    top_p in (0, 1]. min_p in [0, 1). repetition_penalty > 0, 1 is off. seed: 64 bits, keys the Philox generator;
    the counter is the absolute position of the sampled token, so a token never depends on batching or preemption.
    penalty_tokens / penalty_counts: distinct ids seen so far (prompt and output) and how often each occurs in the
    output (0: only in the prompt). bias_tokens / bias_values: `logit_bias`. allowed: a mask of ceil(V / 32) words, of
    which bit i % 32 of word i // 32 says whether id i may be chosen; at least one may. want_logprob: whether anybody
    reads the token's log-probability, which is that of the raw logits; it changes no token.
    Order: allowed, logit_bias, repetition, presence and frequency penalties, temperature, min_p, top_k, top_p.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    penalty_tokens: Int32 | None = None
    penalty_counts: Int32 | None = None
    bias_tokens: Int32 | None = None
    bias_values: Float32 | None = None
    allowed: UInt32 | None = None
    want_logprob: bool = True


@dataclass(frozen=True)
class Batch:
    """One step. S sequences, T tokens in all, R rows to sample; every array is int32 and C-contiguous.

    tokens [T], positions [T] (absolute, consecutive within a sequence), query_start [S+1] (offsets into T),
    block_tables [S, B] (page of positions 16*b .. 16*b+15, unused entries 0), rows [R] (ascending indices into T),
    sampling: R entries. want_logits asks for the raw logits of every row.
    """

    tokens: Int32
    positions: Int32
    query_start: Int32
    block_tables: Int32
    rows: Int32
    sampling: tuple[RowSampling, ...]
    want_logits: bool = False


@dataclass(frozen=True)
class StepOutput:
    """tokens [R] int32; logprobs [R] float32 of the sampled token under softmax of the raw logits, where it was wanted;
    logits [R, V] float32 when the batch asked for them, else None."""

    tokens: Int32
    logprobs: Float32
    logits: Float32 | None = None


def nothing() -> None:
    """No work."""


class Executor(Protocol):
    """The machine code of one plan on one device. `step` is called by one thread at a time."""

    vocab_size: int
    page_size: int
    num_pages: int
    max_num_tokens: int
    """Most tokens T in one batch."""
    max_num_seqs: int
    """Most sequences S in one batch."""
    max_num_rows: int
    """Most rows R in one batch; a sequence may have several."""

    def step(self, batch: Batch, meanwhile: Callable[[], None] = nothing) -> StepOutput:
        """Runs the batch, writes its keys and values into the pages and samples its rows.

        meanwhile: work of the host, called once while the device is busy if it has one of its own, else before.
        """
        ...

    def close(self) -> None: ...
