"""Mixtures of experts in machine code of tiny models: the graph's logits, bits that depend on the sequence alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from families import VOCAB
from tiny_engines import Sequences, check_schedule, executor, lowered

from llmc.kernels.interpret import run_graph

_RNG = np.random.default_rng(7)
PROMPT = _RNG.integers(0, VOCAB, 41).tolist()
OTHERS = [_RNG.integers(0, VOCAB, n).tolist() for n in (3, 60, 1)]
ENGINES = [("qwen2_moe", "fp32"), ("qwen2_moe", "int8, float32 KV"), ("glm4_moe", "int4, float32 KV")]
"""A shared expert with a gate; groups, corrections and a dense first layer."""


def _run(engine: tuple[str, str], drive: Callable[[Sequences], Any], prompts: list[list[int]], threads: int) -> Any:
    made = executor(*engine, threads=threads, tokens=128)
    try:
        sequences = Sequences(made, [list(p) for p in prompts], shuffle=threads)
        drive(sequences)
        return sequences.rows(0)
    finally:
        made.close()


def _whole(s: Sequences) -> None:
    s.decode(s.step({0: len(PROMPT)}), 5)


def _chunks(s: Sequences) -> None:
    last = {}
    for size in (1, 4, 2, 34):
        last = s.step({0: size})
    s.decode(last, 5)


def _ragged(s: Sequences) -> None:
    s.step({2: 40, 0: 20, 1: 3})
    last = s.step({3: 1, 0: 21, 2: 20})
    s.decode(last, 5)


@pytest.mark.parametrize("engine", ENGINES)
def test_logits_are_those_of_the_graph(engine: tuple[str, str]) -> None:
    """As in test_executor.py; a choice between experts of nearly equal scores may fall otherwise, too."""
    model = lowered(*engine)
    check_schedule(model.program)
    positions = torch.arange(len(PROMPT))
    inputs = {"tokens": torch.tensor(PROMPT), "positions": positions, "rows": positions}
    wanted = run_graph(model.graph, inputs | {"query_start": torch.tensor([0, len(PROMPT)])}, model.reader).numpy()
    found = _run(engine, lambda s: s.step({0: len(PROMPT)}), [PROMPT], 2)
    errors = np.sqrt(((found - wanted) ** 2).mean(-1) / (wanted**2).mean(-1))
    assert np.quantile(errors, 0.8) <= 1e-5 and errors.max() <= (1e-5 if engine[1] == "fp32" else 0.1)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sequence_has_the_same_bits_however_it_is_run(engine: tuple[str, str]) -> None:
    """One thread or several, whole, in chunks, among others; a step of one token is private to each of its threads."""
    wanted = _run(engine, _whole, [PROMPT], 1)
    for threads, drive, prompts in [
        (2, _whole, [PROMPT]), (3, _chunks, [PROMPT]), (1, _chunks, [PROMPT]), (7, _ragged, [PROMPT, *OTHERS]),
        (2, _ragged, [PROMPT, *OTHERS]),
    ]:  # fmt: skip
        assert _run(engine, drive, prompts, threads).tobytes() == wanted.tobytes()
