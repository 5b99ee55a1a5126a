"""Ranges of sampling parameters, and how they reach the executor."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from llmc.runtime.logprobs import top_logprobs
from llmc.runtime.request import Request, RequestError, SamplingParams, output_limit, sequence_seed
from llmc.runtime.sequence import SUPPRESSED, Sequence
from llmc.runtime.server.model import SamplingDefaults

NAN = math.nan


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1}, {"temperature": 2.1}, {"temperature": NAN}, {"top_p": 0.0}, {"top_p": 1.1},
        {"top_p": NAN},
        {"top_k": -2}, {"top_k": 2**31}, {"min_p": -0.1}, {"min_p": 1.0}, {"min_p": NAN},
        {"repetition_penalty": 0.0}, {"repetition_penalty": math.inf}, {"presence_penalty": 2.5},
        {"frequency_penalty": -2.5}, {"seed": 2**64}, {"seed": -(2**63) - 1}, {"n": 0}, {"n": 17},
        {"max_tokens": 0},
        {"min_tokens": -1}, {"min_tokens": 3, "max_tokens": 2}, {"logprobs": -1}, {"logprobs": 21},
        {"stop": ("",)},
        {"stop": ("a",) * 17}, {"stop": ("a" * 2000,)}, {"stop_token_ids": (1,) * 129},
        {"logit_bias": {1: 101.0}},
        {"logit_bias": {1: NAN}}, {"logit_bias": dict.fromkeys(range(1025), 1.0)},
    ],
)  # fmt: skip
def test_out_of_range(values: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    assert caught.value.param == next(iter(values))


def test_edges_are_accepted() -> None:
    SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, seed=-(2**63), n=16, max_tokens=1, logprobs=0)
    SamplingParams(temperature=2.0, top_p=1e-9, top_k=1, min_p=0.99, seed=2**64 - 1, logprobs=20)


def sampling_of(prompt: tuple[int, ...], output: list[int], **values: Any) -> Any:
    params = SamplingParams(**values)
    sequence = Sequence(0, Request("r", prompt, params), 0, 7, 10, params.stop_ids(frozenset({99})))
    for token in output:
        sequence.append(token)
    return sequence.sampler.row()


def test_tiny_temperature_is_greedy_and_top_k_off_is_zero() -> None:
    row = sampling_of((1,), [], temperature=1e-30, top_k=-1)
    assert row.temperature == 0.0 and row.top_k == 0 and row.seed == 7
    assert row.penalty_tokens is None and row.bias_tokens is None


def test_penalties_count_output_and_list_the_prompt_for_repetition_only() -> None:
    row = sampling_of((1, 2, 2), [2, 3, 3], repetition_penalty=1.5)
    assert dict(zip(row.penalty_tokens.tolist(), row.penalty_counts.tolist(), strict=True)) == {
        1: 0,
        2: 1,
        3: 2,
    }
    row = sampling_of((1, 2, 2), [2, 3, 3], presence_penalty=0.5)
    assert dict(zip(row.penalty_tokens.tolist(), row.penalty_counts.tolist(), strict=True)) == {2: 1, 3: 2}


def test_stop_tokens_are_suppressed_until_min_tokens() -> None:
    def bias(output: list[int], **more: Any) -> dict[int, float]:
        row = sampling_of((1,), output, min_tokens=2, max_tokens=5, stop_token_ids=(5,), logit_bias={99: 3.0}, **more)
        return dict(zip(row.bias_tokens.tolist(), row.bias_values.tolist(), strict=True))

    assert bias([1]) == {99: SUPPRESSED, 5: SUPPRESSED}
    assert bias([1, 1]) == {99: 3.0}
    assert bias([1], ignore_eos=True) == {99: 3.0, 5: SUPPRESSED}


def test_seeds_of_sequences_differ_and_the_first_is_the_requests() -> None:
    seeds = [sequence_seed(42, i) for i in range(16)]
    assert seeds[0] == 42 and len(set(seeds)) == 16
    assert sequence_seed(-1, 0) == 2**64 - 1
    assert all(0 <= s < 2**64 for s in seeds)


def test_top_logprobs_are_sorted_and_ties_go_to_the_lowest_id() -> None:
    logits = np.array([0.0, 2.0, 1.0, 2.0, 1.0], np.float32)
    top = top_logprobs(logits, 3)
    expected = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert [i for i, _ in top] == [1, 3, 2]
    assert [p for _, p in top] == pytest.approx([expected[1], expected[3], expected[2]])
    assert len(top_logprobs(logits, 20)) == 5
    assert top_logprobs(np.array([1e30, -1e30], np.float32), 1) == ((0, 0.0),)


def test_output_limit() -> None:
    def limit(length: int, **values: Any) -> int:
        return output_limit(Request("r", (1,) * length, SamplingParams(**values)), max_model_len=10, vocab_size=50)

    assert limit(4) == 6
    assert limit(4, max_tokens=6) == 6
    assert limit(9) == 1
    for length, values, code in (
        (4, {"max_tokens": 7}, "context_length_exceeded"),
        (10, {}, "context_length_exceeded"),
        (4, {"max_tokens": 10**30}, "context_length_exceeded"),
        (0, {}, None),
        (4, {"min_tokens": 7}, None),
        (4, {"logit_bias": {50: 1.0}}, None),
        (4, {"stop_token_ids": (-1,)}, None),
    ):
        with pytest.raises(RequestError) as caught:
            limit(length, **values)
        assert caught.value.code == code


def test_defaults_from_a_generation_config() -> None:
    config = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0,
        "min_p": "x",
        "repetition_penalty": True,
        "eos_token_id": 2,
    }
    assert SamplingDefaults.from_generation_config(config) == SamplingDefaults(temperature=0.6, top_k=20)
    assert SamplingDefaults.from_generation_config({"temperature": math.nan, "top_k": math.inf}) == SamplingDefaults()
