"""The numbers: the fp32 plan is transformers' model, the quantised ones are as close as they say they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from e2e_engine import executor_over, step_logits
from e2e_harness import Server, llmc, report
from e2e_prompts import PROMPTS
from e2e_reference import Reference

from llmc.runtime.detokenizer import TextCodec
from llmc.runtime.plan import Plan

pytestmark = pytest.mark.e2e

LENGTH = 64
NEAR_TIE = 1e-3
TOLERANCE = 2e-3


def _wire_names(codec: TextCodec) -> dict[str, int]:
    """How /v1/completions writes each token in `logprobs.tokens` -> its id."""
    names: dict[str, int] = {}
    for token in range(codec.vocab_size):
        data = codec.token_bytes(token)
        try:
            name = data.decode()
        except UnicodeDecodeError:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        assert name not in names, f"tokens {names[name]} and {token} look the same on the wire"
        names[name] = token
    return names


@pytest.fixture(scope="module")
def served(fp32_server: Server, reference: Reference) -> list[tuple[list[int], list[int], str]]:
    """(prompt ids, 64 greedy ids, text) of each prompt, asked of the server eight at a time."""
    names = _wire_names(reference.codec)
    prompts = [reference.codec.encode(prompt) for prompt in PROMPTS]

    with fp32_server.client() as client:

        def ask(prompt: list[int]) -> tuple[list[int], list[int], str]:
            answer = client.completions.create(
                model=fp32_server.model, prompt=prompt, max_tokens=LENGTH, temperature=0, logprobs=0,
                extra_body={"ignore_eos": True, "skip_special_tokens": False},
            )  # fmt: skip
            (choice,) = answer.choices
            assert choice.logprobs is not None and choice.logprobs.tokens is not None
            return prompt, [names[token] for token in choice.logprobs.tokens], choice.text

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(ask, prompts))


def test_greedy_tokens_are_those_of_transformers(
    served: list[tuple[list[int], list[int], str]], reference: Reference
) -> None:
    """By induction: given the same tokens so far, transformers would have taken the same next one."""
    assert len(served) == 20
    ties = 0
    for prompt, output, text in served:
        assert len(output) == LENGTH
        logits = reference.logits(prompt + output)[len(prompt) - 1 : -1]
        best = logits.argmax(-1)
        for i in np.flatnonzero(best != output):
            gap = float(logits[i, best[i]] - logits[i, output[i]])
            assert gap < NEAR_TIE, f"token {i} after {prompt}: {output[i]}, transformers takes {best[i]} ({gap})"
            ties += 1
        whole = reference.codec.decode(prompt + output, skip_special_tokens=False)
        start = reference.codec.decode(prompt, skip_special_tokens=False)
        assert (start + text).rstrip("\ufffd") == whole.rstrip("\ufffd")
    report("fp32 greedy tokens that differ from transformers' in a near tie", f"{ties} of {20 * LENGTH}")


def test_fp32_logits_are_those_of_transformers(
    fp32_plan: Path, served: list[tuple[list[int], list[int], str]], reference: Reference
) -> None:
    """Over a prefill in uneven chunks and then token by token."""
    worst = 0.0
    with executor_over(Plan.open(fp32_plan), num_pages=64) as executor:
        for prompt, output, _ in served[::3]:
            tokens = prompt + output
            chunks = [*_chunks(len(tokens) - 8, 37), *[1] * 8]
            ours = np.concatenate(list(step_logits(executor, tokens, chunks)))
            worst = max(worst, float(np.abs(ours - reference.logits(tokens)).max()))
    report("fp32 logits, largest difference from transformers'", f"{worst:.2g}")
    assert worst <= TOLERANCE


def _chunks(total: int, size: int) -> Iterator[int]:
    for start in range(0, total, size):
        yield min(size, total - start)


@pytest.mark.parametrize("precision, max_kl, max_change", [("int8", 0.006, 0.01), ("int4", 0.02, 0.015)])
def test_the_plan_states_its_accuracy(
    precision: str, max_kl: float, max_change: float, request: pytest.FixtureRequest
) -> None:
    plan = request.getfixturevalue(f"{precision}_plan")
    shown = llmc("inspect", plan, "--json")
    assert shown.returncode == 0, shown.stderr
    manifest = json.loads(shown.stdout)
    found = manifest["accuracy"]
    change = found["perplexity"] / found["perplexity_float32"] - 1
    report(f"{precision} accuracy", f"mean KL {found['mean_kl']}, perplexity {change:+.2%}")
    assert manifest["model"]["precision"] == precision
    assert found["tokens"] >= 1800
    assert 0 < found["mean_kl"] <= max_kl
    assert abs(change) <= max_change
    assert found["top1_agreement"] > 0.9
    text = llmc("inspect", plan).stdout
    assert f"mean KL {found['mean_kl']:.4g}" in text and f"{change:+.2%}" in text
