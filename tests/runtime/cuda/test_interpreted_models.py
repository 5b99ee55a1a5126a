"""Whole tiny models on the interpreted GPU behind Executor.step: the tokens of the CPU target, whatever the batch."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from interpreted_gpu import InterpretedGpu
from interpreted_models import gpu_executor, reference_logits
from tiny_engines import Sequences, executor

from llmc.runtime.batch import Batch, Executor, RowSampling

_PROMPTS = [[11, 7, 3, 150, 9, 2, 77, 31, 5], [42, 8, 199]]


def _run(target: Executor, steps: list[dict[int, int]], decode: int) -> Sequences:
    sequences = Sequences(target, copy.deepcopy(_PROMPTS))
    last: dict[int, int] = {}
    for chunks in steps:
        last |= sequences.step(chunks)
    sequences.decode(last, decode)
    return sequences


_CHUNKED = [{0: 5, 1: 3}, {0: 4}]


_OTHERS = [pytest.param(family, marks=pytest.mark.slow) for family in ("qwen3", "gemma2", "gpt2", "phi3")]


@pytest.mark.parametrize("family", ["llama", *_OTHERS])
def test_float32_gives_the_tokens_of_the_cpu_target(family: str) -> None:
    """Prompt chunks, a batch of both kinds, then decoding through captured graphs."""
    gpu, cpu = _run(gpu_executor(family), _CHUNKED, 3), _run(executor(family, pages=24), _CHUNKED, 3)
    assert gpu.tokens == cpu.tokens
    for sequence in (0, 1):
        expected = cpu.rows(sequence)
        assert np.abs(gpu.rows(sequence) - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("precision", ["int8, float32 KV", pytest.param("int4, float32 KV", marks=pytest.mark.slow)])
def test_quantised_products_are_those_of_the_cpu_target(precision: str) -> None:
    """The same integers and scales: what is left is the rounding of float32 sums, now and then across a quantisation
    step of an activation."""
    gpu, cpu = (
        _run(gpu_executor("llama", precision), _CHUNKED, 2),
        _run(executor("llama", precision, pages=24), _CHUNKED, 2),
    )
    assert gpu.tokens == cpu.tokens
    for sequence in (0, 1):
        difference = np.abs(gpu.rows(sequence) - cpu.rows(sequence))
        assert np.median(difference) <= 1e-4 and difference.max() <= 0.1


@pytest.mark.parametrize(
    "precision", ["bf16", pytest.param("int8 weight-only", marks=pytest.mark.slow), "int4 weight-only"]
)
def test_other_precisions_are_the_dialect_s_reference(precision: str) -> None:
    """What is left: operands of products in float16, and keys and values."""
    prompt = _PROMPTS[0]
    sequences = Sequences(gpu_executor("llama", precision), [list(prompt)])
    sequences.step({0: len(prompt)})
    expected = reference_logits("llama", precision, prompt)
    assert np.abs(sequences.rows(0) - expected).max() <= 0.005 * np.abs(expected).max()


def test_int8_keys_and_values_follow_the_reference() -> None:
    prompt = _PROMPTS[0]
    sequences = Sequences(gpu_executor("llama", "int8, int8 KV"), [list(prompt)])
    sequences.step({0: len(prompt)})
    expected = reference_logits("llama", "int8, int8 KV", prompt)
    assert np.abs(sequences.rows(0) - expected).max() <= 0.06 * np.abs(expected).max()


@pytest.mark.slow
def test_a_row_has_the_same_bits_whatever_the_batch_and_the_chunks(device_sums: None) -> None:
    """Alone or with another, in one chunk or token by token (prompt kernel or decode kernels), few or many programs."""
    chunked = _run(gpu_executor("llama", "int8"), _CHUNKED, 1)
    together = _run(gpu_executor("llama", "int8", multiprocessors=3), [{0: 9, 1: 3}], 1)
    single = _run(gpu_executor("llama", "int8"), [{0: 6}, {0: 1}, {0: 1, 1: 1}, {0: 1, 1: 1}, {1: 1}], 1)
    for sequence in (0, 1):
        expected = chunked.rows(sequence)
        assert (together.rows(sequence) == expected).all()
        assert (single.rows(sequence) == expected).all()


def test_the_host_works_while_the_device_does() -> None:
    """`meanwhile` is called once, when everything of the step is launched and before anybody waits for it."""
    executor = gpu_executor()
    device = executor.device
    assert isinstance(device, InterpretedGpu)
    seen: list[str] = []
    batch = Batch(
        np.array([5], np.int32), np.zeros(1, np.int32), np.array([0, 1], np.int32), np.zeros((1, 1), np.int32),
        np.zeros(1, np.int32), (RowSampling(temperature=0.0),),
    )  # fmt: skip
    synchronize = device.synchronize
    device.synchronize = lambda: (seen.append("wait"), synchronize())[1]  # type: ignore[method-assign]
    executor.step(batch, lambda: seen.append(device.launched[-1]))
    assert seen == ["sampling.sample_rows", "wait"]
