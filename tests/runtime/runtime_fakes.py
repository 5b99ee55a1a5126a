"""A deterministic pseudo-model over real pages, and a toy byte-level tokenizer, shared by the runtime's
tests.

The next token is a hash of every token of the sequence *as read back through its pages*: a wrong block table,
position, slot or a missed recompute changes the tokens.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable

import numpy as np

from llmc.runtime.batch import Batch, RowSampling, StepOutput, nothing

PAGE_SIZE = 16
EMPTY = -1
VOCAB = 300
EOS = 257


def next_token(history: list[int], sampling: RowSampling, vocab_size: int) -> int:
    """The pseudo-model: depends on all tokens, on the seed unless greedy, and honours logit_bias and masks."""
    key = f"{history}|{sampling.seed if sampling.temperature > 0 else 0}|{len(history)}"
    logits = pseudo_logits(key, vocab_size)
    if sampling.bias_tokens is not None:
        assert sampling.bias_values is not None
        np.add.at(logits, sampling.bias_tokens, sampling.bias_values)
    if sampling.allowed is not None:
        allowed = np.unpackbits(sampling.allowed.view(np.uint8), count=vocab_size, bitorder="little")
        logits[allowed == 0] = -np.inf
    return int(logits.argmax())


def pseudo_logits(key: str, vocab_size: int) -> np.ndarray:
    """Integers in steps of 1e-4 in [0, 6.5536), from a hash."""
    raw = hashlib.shake_128(key.encode()).digest(2 * vocab_size)
    return np.frombuffer(raw, np.uint16).astype(np.float32) / 10000


class FakeExecutor:
    """Stores tokens in pages where a model stores keys and values. `gate`, when given, is acquired before
    each step; `fail_on` is a token at whose sight a step raises."""

    def __init__(
        self, num_pages: int = 64, *, max_num_tokens: int = 64, max_num_rows: int = 64,
        vocab_size: int = VOCAB,
        delay: float = 0.0, gate: threading.Semaphore | None = None, fail_on: int | None = None,
    ) -> None:  # fmt: skip
        self.vocab_size = vocab_size
        self.page_size = PAGE_SIZE
        self.num_pages = num_pages
        self.max_num_tokens = max_num_tokens
        self.max_num_rows = self.max_num_seqs = max_num_rows
        self.steps: list[int] = []
        self.sequences_per_step: list[int] = []
        self.closed = False
        self._delay, self._gate, self._fail_on = delay, gate, fail_on
        self._pool = np.full((num_pages, PAGE_SIZE), EMPTY, np.int64)

    def step(self, batch: Batch, meanwhile: Callable[[], None] = nothing) -> StepOutput:
        meanwhile()
        if self._gate is not None:
            assert self._gate.acquire(timeout=30)
        if self._delay:
            time.sleep(self._delay)
        if self._fail_on is not None and self._fail_on in batch.tokens:
            raise RuntimeError("the fake model broke on purpose")
        self._check(batch)
        self.steps.append(len(batch.tokens))
        self.sequences_per_step.append(len(batch.query_start) - 1)
        self._write(batch)
        out, lps, logits = [], [], []
        for row, sampling in zip(batch.rows, batch.sampling, strict=True):
            history = self._read(batch, int(row))
            out.append(next_token(history, sampling, self.vocab_size))
            key = f"{history}|{sampling.seed if sampling.temperature > 0 else 0}|{len(history)}"
            raw = pseudo_logits(key, self.vocab_size)
            logits.append(raw)
            lps.append(raw[out[-1]] - np.log(np.exp(raw.astype(np.float64)).sum()))
        want = np.array(logits, np.float32) if batch.want_logits else None
        return StepOutput(np.array(out, np.int32), np.array(lps, np.float32), want)

    def close(self) -> None:
        self.closed = True

    def _check(self, batch: Batch) -> None:
        assert 0 < len(batch.tokens) <= self.max_num_tokens
        assert len(batch.rows) <= self.max_num_rows and len(batch.query_start) <= self.max_num_seqs + 1
        assert len(batch.rows) == len(batch.sampling)
        assert batch.query_start[0] == 0 and batch.query_start[-1] == len(batch.tokens)
        assert (np.diff(batch.query_start) > 0).all()
        for array in (batch.tokens, batch.positions, batch.query_start, batch.block_tables, batch.rows):
            assert array.dtype == np.int32 and array.flags.c_contiguous

    def _write(self, batch: Batch) -> None:
        for s in range(len(batch.query_start) - 1):
            for t in range(batch.query_start[s], batch.query_start[s + 1]):
                position = int(batch.positions[t])
                page = batch.block_tables[s, position // PAGE_SIZE]
                self._pool[page, position % PAGE_SIZE] = batch.tokens[t]

    def _read(self, batch: Batch, row: int) -> list[int]:
        s = int(np.searchsorted(batch.query_start, row, side="right")) - 1
        positions = range(int(batch.positions[row]) + 1)
        return [int(self._pool[batch.block_tables[s, p // PAGE_SIZE], p % PAGE_SIZE]) for p in positions]


def solo_tokens(prompt: list[int], count: int, seed: int = 0, temperature: float = 1.0) -> list[int]:
    """What the pseudo-model says to a prompt, computed without any of our code."""
    history = list(prompt)
    sampling = RowSampling(temperature=temperature, seed=seed)
    for _ in range(count):
        history.append(next_token(history, sampling, VOCAB))
    return history[len(prompt) :]


def byte_tokenizer(template: str | None = None) -> bytes:
    """tokenizer.json of a byte-level BPE without merges: ids 0-255 are the bytes, then <bos> 256 and <eos> 257.
    template: which of those it adds to a text, e.g. "<bos> $A".
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    from llmc.runtime.detokenizer import _BYTE_OF_CHARACTER

    tokenizer = Tokenizer(models.BPE(vocab=dict(_BYTE_OF_CHARACTER), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    if template is not None:
        special = [("<bos>", 256), ("<eos>", 257)]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return json.dumps(json.loads(tokenizer.to_str())).encode()
