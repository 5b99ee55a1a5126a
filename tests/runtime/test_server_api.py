"""The server as OpenAI's own client sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from runtime_fakes import FakeExecutor, byte_tokenizer, solo_tokens
from server_harness import CODEC, PRINTABLE, Running, running_server

from llmc.runtime.detokenizer import TextCodec

MODEL = "org/toy"
HELLO: Any = [{"role": "user", "content": "hello"}]
HELLO_TOKENS = list(b"[user]hello[assistant]")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server() as running:
        yield running


@pytest.fixture(autouse=True)
def no_page_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").wait_for("kv_cache_usage", 0.0)


def test_models(server: Running) -> None:
    (card,) = server.client.models.list().data
    assert (card.id, card.object, card.created, card.owned_by) == (MODEL, "model", 1, "llmc")
    assert server.client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("other")


def test_health_and_metrics(server: Running) -> None:
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/health/ready").status_code == 200
    for path in ("/health", "/health/ready"):
        head = server.http.head(path)
        assert head.status_code == 200 and head.content == b""
    before = server.metric("generation_tokens_total")
    server.client.completions.create(model=MODEL, prompt="abc", max_tokens=5, extra_body={"ignore_eos": True})
    assert server.metric("generation_tokens_total") - before == 5
    text = server.http.get("/metrics").text
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage", "prompt_tokens_total",
        "time_to_first_token_seconds_bucket", "time_per_output_token_seconds_sum", "num_preemptions_total",
        "prefix_cache_queries_total", "prefix_cache_hits_total",
        "e2e_request_latency_seconds_count",
        'request_success_total{finished_reason="length",model_name="org/toy"}',
    ):  # fmt: skip
        assert f"llmc:{name}" in text


def test_completion(server: Running) -> None:
    answer = server.client.completions.create(
        model=MODEL, prompt="abc", max_tokens=12, seed=5, extra_body={"ignore_eos": True}
    )
    expected = CODEC.decode(solo_tokens(list(b"abc"), 12, 5)).rstrip("\ufffd")
    (choice,) = answer.choices
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == MODEL
    assert (choice.text, choice.index, choice.finish_reason, choice.logprobs) == (expected, 0, "length", None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        3,
        12,
        15,
    )


def test_what_was_found_computed_is_told_and_a_salt_keeps_it_apart(server: Running) -> None:
    def cached(**more: Any) -> int:
        body = {"model": MODEL, "prompt": list(range(100, 150)), "max_tokens": 1, **more}
        return int(
            server.http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        )

    assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="a"), cached(cache_salt="")] == [
        0,
        48,
        0,
        48,
        48,
    ]
    assert server.metric("prefix_cache_hits_total") >= 144
    prompts = [list(range(100, 150)), list(range(150, 200))]
    assert cached(prompt=prompts, n=2) == 48  # of both prompts, each counted once
    body = {"model": MODEL, "prompt": "a", "cache_salt": "a" * 1025}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"


def test_completion_defaults_to_16_tokens(server: Running) -> None:
    answer = server.client.completions.create(model=MODEL, prompt=[1, 2], extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.completion_tokens == 16
    answer = server.client.completions.create(model=MODEL, prompt=[1] * 505, extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.completion_tokens == 7


def test_completion_of_several_prompts_with_n_and_echo(server: Running) -> None:
    prompts: list[Any] = [["ab", "c"], [[97, 98], [99]]]
    for prompt in prompts:
        for stream in (False, True):
            texts = [""] * 4
            arguments: dict[str, Any] = {
                "model": MODEL, "prompt": prompt, "max_tokens": 6, "n": 2, "echo": True, "seed": 1,
                "logit_bias": PRINTABLE,
            }  # fmt: skip
            if stream:
                for chunk in server.client.completions.create(**arguments, stream=True):
                    for choice in chunk.choices:
                        texts[choice.index] += choice.text
            else:
                answer = server.client.completions.create(**arguments)
                assert answer.usage is not None and answer.usage.prompt_tokens == 3
                assert answer.usage.completion_tokens == 24
                texts = [choice.text for choice in answer.choices]
            assert [len(text) for text in texts] == [8, 8, 7, 7]
            assert [text[:-6] for text in texts] == ["ab", "ab", "c", "c"]
            assert len(set(texts)) == 4


def test_completion_stream(server: Running) -> None:
    arguments: dict[str, Any] = {
        "model": MODEL, "prompt": "abc", "max_tokens": 12, "seed": 5, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = server.client.completions.create(**arguments).choices[0].text
    chunks = list(server.client.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "length"
    assert {c.choices[0].finish_reason for c in chunks[:-2]} <= {None}
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12
    assert len({c.id for c in chunks}) == 1


def test_completion_logprobs(server: Running) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 4, "temperature": 0}
    answer = server.client.completions.create(**arguments, logprobs=2, logit_bias=PRINTABLE)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset == [0, 1, 2, 3]
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.top_logprobs is not None and logprobs.token_logprobs is not None
    for token, value, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert 2 <= len(top) <= 3 and top[token] == pytest.approx(value, abs=1e-5)
    answer = server.client.completions.create(**arguments, logprobs=0)
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.top_logprobs is None


def test_chat(server: Running) -> None:
    answer = server.client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=9, seed=2, extra_body={"ignore_eos": True}
    )
    (choice,) = answer.choices
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert choice.message.content == CODEC.decode(solo_tokens(HELLO_TOKENS, 9, 2)).rstrip("\ufffd")
    assert answer.usage is not None and answer.usage.prompt_tokens == len(HELLO_TOKENS)


def test_chat_stream(server: Running) -> None:
    arguments: dict[str, Any] = {
        "model": MODEL, "messages": HELLO, "max_completion_tokens": 9, "seed": 2, "n": 2,
        "logit_bias": PRINTABLE,
    }  # fmt: skip
    whole = [c.message.content for c in server.client.chat.completions.create(**arguments).choices]
    chunks = list(
        server.client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
    )
    texts = ["", ""]
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    for chunk in chunks[2:-1]:
        assert chunk.object == "chat.completion.chunk" and chunk.usage is None
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == whole and len(set(texts)) == 2
    assert [c.choices[0].finish_reason for c in chunks[:-1]].count("length") == 2
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 18


def test_chat_logprobs(server: Running) -> None:
    for stream in (False, True):
        arguments: dict[str, Any] = {
            "model": MODEL, "messages": HELLO, "max_tokens": 5, "temperature": 0, "logprobs": True,
            "top_logprobs": 2,
        }  # fmt: skip
        if stream:
            entries = [
                entry
                for chunk in server.client.chat.completions.create(**arguments, stream=True)
                for choice in chunk.choices
                if choice.logprobs is not None
                for entry in choice.logprobs.content or []
            ]
        else:
            logprobs = server.client.chat.completions.create(**arguments).choices[0].logprobs
            assert logprobs is not None and logprobs.content is not None
            entries = logprobs.content
        tokens = solo_tokens(HELLO_TOKENS, 5, temperature=0)
        assert [bytes(e.bytes or []) for e in entries] == [CODEC.token_bytes(token) for token in tokens]
        assert [e.token for e in entries] == [CODEC.token_text(token) for token in tokens]
        assert all(len(e.top_logprobs) == 2 and e.top_logprobs[0].logprob == e.logprob for e in entries)


def test_content_parts_and_roles(server: Running) -> None:
    def tokens(message: Any) -> int:
        answer = server.client.chat.completions.create(model=MODEL, messages=[message], max_tokens=1)
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert tokens({"role": "user", "content": parts}) == len(HELLO_TOKENS) + 1
    assert tokens({"role": "developer", "content": "x"}) == tokens({"role": "system", "content": "x"})
    assert tokens({"role": "assistant", "content": None}) == len("[assistant][assistant]")


def test_stop_and_raw_wire_format(server: Running) -> None:
    body = {
        "model": MODEL, "prompt": "x", "temperature": 0, "logit_bias": {"97": 100}, "stop": "aaa",
        "max_tokens": 9, "stream": True,
    }  # fmt: skip
    response = server.post("/v1/completions", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert all(event.startswith("data: {") for event in events[:-2])
    assert events[-2:] == ["data: [DONE]", ""]
    assert '"finish_reason":"stop"' in events[-3] and '"text":""' in events[-3]
    body |= {"stream": False, "stop": ["zz", "aaab"], "an_unknown_field": 1}
    assert server.post("/v1/completions", body).json()["choices"][0]["text"] == "a" * 9


def test_start_tokens_are_added_once_and_as_asked_for() -> None:
    chat: Any = {"messages": [{"role": "user", "content": "hello"}]}
    with running_server(codec=TextCodec(byte_tokenizer("<bos> $A"))) as server:
        for path, body, count in (
            ("/v1/completions", {"prompt": "abc"}, 4),
            ("/v1/completions", {"prompt": "<bos>abc"}, 4),
            ("/v1/completions", {"prompt": "abc", "add_special_tokens": False}, 3),
            ("/v1/completions", {"prompt": ["<bos>abc"], "add_special_tokens": False}, 4),
            ("/v1/chat/completions", chat, len(HELLO_TOKENS)),
            ("/v1/chat/completions", chat | {"add_special_tokens": True}, len(HELLO_TOKENS) + 1),
        ):
            answer = server.post(path, {"model": MODEL, "max_tokens": 1} | body).json()
            assert answer["usage"]["prompt_tokens"] == count, (path, body)


def test_temperature_zero_is_greedy_whatever_top_p_says(server: Running) -> None:
    texts = {
        server.client.completions.create(
            model=MODEL, prompt="abc", temperature=0, top_p=p, seed=s, logit_bias=PRINTABLE
        )
        .choices[0]
        .text
        for p, s in ((1.0, 1), (0.1, 2))
    }
    assert len(texts) == 1


def test_32_requests_of_mixed_lengths_share_batches() -> None:
    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        arguments: dict[str, Any] = {
            "model": MODEL, "prompt": [i + 1] * (1 + 5 * i % 90), "max_tokens": 3 + i, "seed": i,
            "logit_bias": PRINTABLE,
        }  # fmt: skip
        if i % 2:
            return str((await client.completions.create(**arguments)).choices[0].text)
        return "".join([c.choices[0].text async for c in await client.completions.create(**arguments, stream=True)])

    async def together(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(one(client, i) for i in range(32)))

    async def alone(url: str) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            return [await one(client, i) for i in range(32)]

    with running_server(FakeExecutor(num_pages=40, delay=0.001)) as server:
        texts = asyncio.run(together(server.url))
        assert max(server.executor.sequences_per_step) >= 8
        server.wait_for("kv_cache_usage", 0.0)
        assert texts == asyncio.run(alone(server.url))
        assert [len(text) for text in texts] == [3 + i for i in range(32)]
