"""The server as the `openai` client sees it: answers, streams, choices, stops, seeds, many at once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from e2e_harness import Server
from e2e_prompts import PROMPTS
from e2e_reference import Reference

pytestmark = pytest.mark.e2e

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me about the sea in two sentences."}]


@pytest.fixture
def client(int8_server: Server) -> Iterator[openai.OpenAI]:
    with int8_server.client() as client:
        yield client
    int8_server.wait_for("kv_cache_usage", 0.0, timeout=10)


def test_models(client: openai.OpenAI, int8_server: Server) -> None:
    (model,) = client.models.list().data
    assert model.id == int8_server.model and model.owned_by == "llmc"
    assert client.models.retrieve(int8_server.model).id == model.id
    assert int8_server.http.get("/health").json() == {"status": "ok"}


def test_a_chat_is_answered(client: openai.OpenAI, int8_server: Server, reference: Reference) -> None:
    answer = client.chat.completions.create(model=int8_server.model, messages=MESSAGES, temperature=0, max_tokens=48)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content
    assert "sea" in choice.message.content.lower() or "ocean" in choice.message.content.lower()
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert 1 <= answer.usage.completion_tokens <= 48
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    # The template adds a system message and the tokens of the turns: more than the words alone.
    assert answer.usage.prompt_tokens > len(reference.codec.encode(MESSAGES[0]["content"])) + 6


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_streamed_chat_is_the_same_answer(client: openai.OpenAI, int8_server: Server, temperature: float) -> None:
    body: dict[str, Any] = {
        "model": int8_server.model, "messages": MESSAGES, "temperature": temperature, "seed": 3,
        "max_tokens": 40, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    plain = client.chat.completions.create(**body)
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reasons == [plain.choices[0].finish_reason]
    assert _counts(chunks[-1].usage) == _counts(plain.usage) and not chunks[-1].choices
    assert len(chunks) > 5, "the answer came in one piece"
    streamed = [e for c in chunks for choice in c.choices if choice.logprobs for e in choice.logprobs.content or ()]
    assert plain.choices[0].logprobs is not None
    assert streamed == plain.choices[0].logprobs.content
    if temperature == 0:
        assert all(e.logprob == pytest.approx(e.top_logprobs[0].logprob, abs=1e-5) for e in streamed)


def test_streamed_completions_of_many_prompts(client: openai.OpenAI, int8_server: Server) -> None:
    body: dict[str, Any] = {
        "model": int8_server.model, "prompt": list(PROMPTS[:4]), "n": 2, "seed": 11, "max_tokens": 12,
    }  # fmt: skip
    plain = client.completions.create(**body)
    assert [c.index for c in plain.choices] == list(range(8))
    texts = [""] * 8
    for chunk in client.completions.create(**body, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [c.text for c in plain.choices]
    assert all(texts[i] != texts[i + 1] for i in range(0, 8, 2)), "the two choices of a prompt are the same"


def test_seeds(client: openai.OpenAI, int8_server: Server) -> None:
    def ask(**options: Any) -> str:
        body = {"model": int8_server.model, "prompt": PROMPTS[1], "max_tokens": 24, "temperature": 1.0}
        return client.completions.create(**(body | options)).choices[0].text

    assert ask(seed=1) == ask(seed=1)
    assert len({ask(seed=1), ask(seed=2), ask(), ask()}) == 4
    assert ask(temperature=0, seed=1) == ask(temperature=0, seed=2, top_p=0.1)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client: openai.OpenAI, int8_server: Server, stream: bool) -> None:
    body: dict[str, Any] = {
        "model": int8_server.model, "prompt": PROMPTS[4], "temperature": 0, "max_tokens": 32,
    }  # fmt: skip
    full = client.completions.create(**body).choices[0].text
    stop = full[7:10]  # begins and ends inside tokens, as like as not
    expected = full[: full.index(stop)]
    if stream:
        choices = [c.choices[0] for c in client.completions.create(**body, stop=[stop, "\0"], stream=True)]
        text, reason = "".join(c.text for c in choices), choices[-1].finish_reason
    else:
        choice = client.completions.create(**body, stop=[stop, "\0"]).choices[0]
        text, reason = choice.text, choice.finish_reason
    assert (text, reason) == (expected, "stop")


def test_echo_and_limits_of_length(client: openai.OpenAI, int8_server: Server) -> None:
    answer = client.completions.create(
        model=int8_server.model, prompt=PROMPTS[0], echo=True, max_tokens=1, temperature=0
    )
    assert answer.choices[0].text.startswith(PROMPTS[0]) and answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 1


def _mixed(model: str, reference: Reference) -> list[dict[str, Any]]:
    """32 completions of 1 to 700 prompt tokens and 1 to 64 new ones, greedy and sampled."""
    rng = random.Random(0)
    long = reference.codec.encode("The history of the lighthouse is a long one. " * 80)
    bodies: list[dict[str, Any]] = []
    for i in range(32):
        length = rng.choice((1, 3, 17, 60, 130, 700)) if i else 700
        bodies.append(
            {"model": model, "prompt": long[i : i + length], "max_tokens": rng.choice((1, 2, 9, 30, 64)),
             "temperature": (0, 0.8, 1.2)[i % 3], "seed": i, "extra_body": {"ignore_eos": True}}
        )  # fmt: skip
    return bodies


def _counts(usage: Any) -> tuple[int, int]:
    """Prompt and completion; how much of a prompt was cached depends on who came before."""
    return usage.prompt_tokens, usage.completion_tokens


def test_32_requests_of_mixed_lengths_at_once(client: openai.OpenAI, int8_server: Server, reference: Reference) -> None:
    bodies = _mixed(int8_server.model, reference)
    before = int8_server.metric("generation_tokens_total")

    def ask(item: tuple[int, dict[str, Any]]) -> tuple[str, str | None, tuple[int, int]]:
        index, body = item
        if index % 2 == 0:
            answer = client.completions.create(**body)
            return answer.choices[0].text, answer.choices[0].finish_reason, _counts(answer.usage)
        chunks = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
        choices = [c.choices[0] for c in chunks if c.choices]
        return "".join(c.text for c in choices), choices[-1].finish_reason, _counts(chunks[-1].usage)

    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, enumerate(bodies)))
    for (_, reason, counts), body in zip(answers, bodies, strict=True):
        assert reason == "length"
        assert counts == (len(body["prompt"]), body["max_tokens"])
    asked = sum(body["max_tokens"] for body in bodies)
    assert int8_server.metric("generation_tokens_total") - before == asked
    for index in (0, 1, 5, 14):  # alone, they get the same
        assert ask((index, bodies[index])) == answers[index]
