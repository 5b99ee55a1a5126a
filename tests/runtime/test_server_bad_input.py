"""Bad input gets OpenAI's error object and the right status, and the engine goes on."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from runtime_fakes import FakeExecutor
from server_harness import Running, running_server

from llmc.errors import UserError
from llmc.runtime.server.api_key import usable_key

HELLO = [{"role": "user", "content": "hello"}]
BIG = 10**30


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server() as running:
        yield running
        answer = running.post("/v1/completions", {"model": "org/toy", "prompt": "a"})
        assert answer.status_code == 200
        assert running.metric("kv_cache_usage") == 0.0


def check(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == (param, code)
    assert error["message"] and "\n" not in error["message"]
    return str(error["message"])


@pytest.mark.parametrize(
    "change, param",
    [
        ({"temperature": -1}, "temperature"), ({"temperature": 2.5}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_p": 1.5}, "top_p"),
        ({"top_k": -5}, "top_k"), ({"top_k": 1.5}, "top_k"), ({"top_k": BIG}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"), ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": []}, "frequency_penalty"), ({"n": 0}, "n"), ({"n": 1000}, "n"),
        ({"n": "1"}, "n"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"), ({"min_tokens": 100, "max_tokens": 5}, "min_tokens"),
        ({"seed": BIG}, "seed"), ({"seed": "x"}, "seed"), ({"stop": ""}, "stop"), ({"stop": [1]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"), ({"stop_token_ids": [5000]}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": 5}, "stream_options"),
        ({"logit_bias": {"a": 1}}, "logit_bias"), ({"logit_bias": {"5": 500}}, "logit_bias"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"), ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"\u0661": 1}}, "logit_bias"), ({"model": None}, "model"), ({"model": 5}, "model"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_fields_of_both(server: Running, path: str, change: dict[str, Any], param: str) -> None:
    body = {"model": "org/toy", "prompt": "a", "messages": HELLO} | change
    check(server.post(path, body), 400, param)


@pytest.mark.parametrize(
    "change, param",
    [
        ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": 5}, "prompt"), ({"prompt": None}, "prompt"), ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"), ({"prompt": [[1], "a"]}, "prompt"), ({"prompt": [5000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"), ({"prompt": [BIG]}, "prompt"), ({"prompt": [True]}, "prompt"),
        ({"suffix": "x"}, "suffix"), ({"best_of": 3}, "best_of"), ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"), ({"logprobs": 1, "echo": True}, "logprobs"),
        ({"prompt": ["a"] * 400, "n": 1}, None),
    ],
)  # fmt: skip
def test_completion_fields(server: Running, change: dict[str, Any], param: str | None) -> None:
    check(server.post("/v1/completions", {"model": "org/toy", "prompt": "a"} | change), 400, param)


@pytest.mark.parametrize(
    "change, param",
    [
        ({"messages": []}, "messages"), ({"messages": None}, "messages"), ({"messages": "hi"}, "messages"),
        ({"messages": [{}]}, "messages"), ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages"),  # the template raises
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"), ({"functions": [{}]}, "functions"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": "text"}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"), ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_chat_fields(server: Running, change: dict[str, Any], param: str) -> None:
    check(server.post("/v1/chat/completions", {"model": "org/toy", "messages": HELLO} | change), 400, param)


def test_messages_name_what_the_client_sent(server: Running) -> None:
    sent: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/completions", {"prompt": [["a"]]}, "prompt.0.0: "),
        ("/v1/completions", {"prompt": ["a", 1]}, "prompt.1: "),
        ("/v1/completions", {"prompt": ["a"] * 3000}, "prompt: "),
        ("/v1/completions", {"prompt": "a", "stop": ["a", 1]}, "stop.1: "),
        ("/v1/completions", {"prompt": "a", "stop": 1}, "stop: "),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content: "),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{}]}]}, "messages.0.content.0.type: "),
        ("/v1/chat/completions", {"messages": HELLO, "max_completion_tokens": -1}, "max_completion_tokens must"),
        ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": -1}, "top_logprobs must"),
    ]
    for path, body, words in sent:
        response = server.post(path, {"model": "org/toy"} | body)
        message = check(response, 400, words.partition(":")[0].split(".")[0].split(" ")[0])
        assert message.startswith(words) and "[" not in message
    response = server.post(
        "/v1/chat/completions", {"model": "org/toy", "messages": HELLO, "max_completion_tokens": BIG}
    )
    check(response, 400, "max_completion_tokens", "context_length_exceeded")


def test_length(server: Running) -> None:
    code = "context_length_exceeded"
    body: dict[str, Any] = {"model": "org/toy", "prompt": [1] * 512}
    message = check(server.post("/v1/completions", body), 400, "prompt", code)
    assert "maximum context length is 512 tokens" in message
    check(
        server.post("/v1/completions", body | {"prompt": [1] * 500, "max_tokens": 13}),
        400,
        "max_tokens",
        code,
    )
    check(server.post("/v1/completions", body | {"prompt": [1], "max_tokens": BIG}), 400, "max_tokens", code)
    chat = {"model": "org/toy", "messages": [{"role": "user", "content": "x" * 6000}]}
    check(server.post("/v1/chat/completions", chat), 400, "prompt", code)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"5", b"null", b'"a"', b"\xff\xfe", b'{"model": "org/toy", "prompt": "\xff"}',
        b'{"model": "org/toy", "prompt": "\\ud800"}',
        b'{"model": "org/toy", "prompt": "a", "temperature": NaN}',
        b'{"model": "org/toy", "prompt": "a", "temperature": 1e999}', b"[" * 100_000, b'{"a":' * 50_000,
        b'{"model": "org/toy", "prompt": "a", "seed": ' + b"9" * 100_000 + b"}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bodies_that_are_no_json_of_ours(server: Running, path: str, data: bytes) -> None:
    response = server.http.post(path, content=data, headers={"content-type": "application/json"})
    assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"


def test_text_beyond_ascii_is_served(server: Running) -> None:
    data = json.dumps({"model": "org/toy", "prompt": "\U0001f600\x00\u202e", "echo": True}).encode()
    answer = server.http.post("/v1/completions", content=data).json()
    assert answer["usage"]["prompt_tokens"] == 8
    assert answer["choices"][0]["text"].startswith("\U0001f600\x00\u202e")


def test_unknown_model_route_and_method(server: Running) -> None:
    for path, more in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": HELLO})):
        check(server.post(f"/v1/{path}", {"model": "gpt-4"} | more), 404, "model", "model_not_found")
    check(server.http.get("/v1/models/gpt-4"), 404, "model", "model_not_found")
    check(server.http.get("/v1/nothing"), 404)
    check(server.http.get("/docs"), 404)
    response = server.http.get("/v1/completions")
    check(response, 405)
    assert response.headers["allow"] == "POST"


def test_body_over_the_limit(server: Running) -> None:
    body = {"model": "org/toy", "prompt": "a" * 2**20}
    check(server.post("/v1/completions", body), 413)

    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 2**16

    check(server.http.post("/v1/completions", content=chunks()), 413)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 4611686018427387904\r\n\r\n{")
        assert sock.recv(100).startswith(b"HTTP/1.1 413 ")


def test_api_key() -> None:
    with running_server(api_key="s3cret") as server:
        assert server.client.models.list().data
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic s3cret"}):
            check(server.http.get("/v1/models", headers=headers), 401, code="invalid_api_key")
            response = server.http.post("/v1/completions", content=b"{", headers=headers)
            check(response, 401, code="invalid_api_key")
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/metrics").status_code == 200


@pytest.mark.parametrize("key, sent", [("schlüssel-à", "schlüssel-à"), ("abc\n", "abc"), (" a b ", "a b")])
def test_api_keys_beyond_ascii_and_with_white_space_around(key: str, sent: str) -> None:
    with running_server(api_key=key) as server:
        for token, status in ((sent, 200), (sent + "x", 401), ("\u0142", 401)):
            header = b"Bearer " + token.encode()
            assert server.http.get("/v1/models", headers={b"authorization": header}).status_code == status


@pytest.mark.parametrize("key", ["", " ", "\n", "a\nb", "a\x00", "\udcff"])
def test_api_keys_that_no_client_could_send(key: str) -> None:
    with pytest.raises(UserError, match="API key"):
        usable_key(key)


def test_a_broken_step_is_a_500_and_the_next_request_is_served() -> None:
    with running_server(FakeExecutor(fail_on=299)) as server:
        bad: dict[str, Any] = {"model": "org/toy", "prompt": [299]}
        message = check(server.post("/v1/completions", bad), 500, code="internal_error")
        assert "on purpose" not in message
        events = server.post("/v1/completions", bad | {"stream": True}).text.split("\n\n")
        assert json.loads(events[0].removeprefix("data: "))["error"]["code"] == "internal_error"
        good = {"model": "org/toy", "prompt": [1], "max_tokens": 1}  # a longer answer might sample 299
        assert server.post("/v1/completions", good).status_code == 200
        server.wait_for("kv_cache_usage", 0.0)
