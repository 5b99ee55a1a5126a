"""A sequence of a request: its tokens, its pages, and how its rows become tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Tokens

import numpy as np

from llmc.runtime.batch import Int32, RowSampling
from llmc.runtime.kv import page_hash, root_hash
from llmc.runtime.request import Request

# Below this a temperature is greedy: dividing float32 logits by it would overflow.
GREEDY_BELOW = 1e-5
# Added to the logits of stop tokens before min_tokens. Finite, so that no kernel meets an infinity.
SUPPRESSED = -1e9


class RowSampler:
    """How the rows of one sequence are sampled: owns all of that which depends on the tokens sampled so far."""

    def __init__(self, request: Request, seed: int, stop_ids: frozenset[int]) -> None:
        """stop_ids: the tokens that end the sequence, and may not come before min_tokens."""
        self._request, self._seed, self._stop_ids = request, seed, stop_ids
        self._num_output = 0
        # How often each id occurs in the output: what the penalties need, kept so as not to count anew each step.
        self._counts: dict[int, int] = {}
        # Once it is the same for all rows that follow.
        self._steady: RowSampling | None = None

    def accept(self, token: int) -> None:
        """Takes the sequence's next token."""
        self._num_output += 1
        self._counts[token] = self._counts.get(token, 0) + 1

    def row(self, position: int = 0, drafts: Tokens[int] = ()) -> RowSampling:
        """How a row is sampled that follows the accepted tokens and the first `position` of `drafts`, tokens that are
        only guessed. See RowSampling for the meaning of each field."""
        if self._steady is not None:
            return self._steady
        params = self._request.params
        penalty_tokens, penalty_counts = self._penalties(drafts[:position])
        bias = dict(params.logit_bias)
        too_short = self._num_output + position < params.min_tokens
        if too_short:
            bias.update(dict.fromkeys(sorted(self._stop_ids), SUPPRESSED))
        row = RowSampling(
            temperature=params.temperature if params.temperature >= GREEDY_BELOW else 0.0,
            top_k=max(params.top_k, 0),
            top_p=max(params.top_p, 1e-6),
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seed=self._seed,
            penalty_tokens=penalty_tokens,
            penalty_counts=penalty_counts,
            bias_tokens=np.fromiter(bias, np.int32, len(bias)) if bias else None,
            bias_values=np.fromiter(bias.values(), np.float32, len(bias)) if bias else None,
            want_logprob=params.logprobs is not None,
        )
        if self._num_output >= params.min_tokens and penalty_tokens is None:
            self._steady = row
        return row

    def _penalties(self, drafts: Tokens[int]) -> tuple[Int32 | None, Int32 | None]:
        params = self._request.params
        if params.repetition_penalty == 1.0 and params.presence_penalty == 0.0 and params.frequency_penalty == 0.0:
            return None, None
        counts: dict[int, int] = {}
        if params.repetition_penalty != 1.0:  # the only penalty that looks at the prompt
            counts = dict.fromkeys(self._request.prompt, 0)
        counts.update(self._counts)
        for token in drafts:
            counts[token] = counts.get(token, 0) + 1
        return np.fromiter(counts, np.int32, len(counts)), np.fromiter(counts.values(), np.int32, len(counts))


class Sequence:
    """One of the `n` sequences of a request. tokens: prompt and output; num_computed: positions in the KV pool.
    stop_ids: the tokens that end it."""

    def __init__(
        self, seq_id: int, request: Request, index: int, seed: int, max_tokens: int,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self.seq_id = seq_id
        self.request = request
        self.index = index
        self.seed = seed
        self.max_tokens = max_tokens
        self.stop_ids = stop_ids
        self.sampler = RowSampler(request, seed, stop_ids)
        self.tokens = array("i", request.prompt)
        self.num_prompt = len(request.prompt)
        self.num_computed = 0
        self.num_announced = 0
        """Tokens that it had when it began to run."""
        self.pages = array("i")
        self.num_cached: int | None = None
        """Positions that were found computed when it first ran."""
        self._page_hashes: list[bytes] = []
        self.running = False
        self.service_key: tuple[int, ...] = (seq_id,)
        """Its place in the order of service."""

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens known but not yet computed. At least 1."""
        return len(self.tokens) - self.num_computed

    @property
    def at_length(self) -> bool:
        return self.num_output >= self.max_tokens

    def page_hash(self, index: int, size: int) -> bytes:
        """Of the content of its page of that index, in pages of `size` positions, all of whose tokens are known."""
        known = self._page_hashes
        while len(known) <= index:
            start = len(known) * size
            before = known[-1] if known else root_hash(self.request.cache_salt)
            known.append(page_hash(before, self.tokens[start : start + size]))
        return known[index]

    def append(self, token: int) -> None:
        """Adds a sampled token."""
        self.tokens.append(token)
        self.sampler.accept(token)
