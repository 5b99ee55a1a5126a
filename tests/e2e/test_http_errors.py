"""Wrong requests to the real server: OpenAI's error object, the right status, and the engine goes on.

Every field is tested over a fake model in tests/runtime; here are those that the real tokenizer, template, context
or vocabulary have a say in, and one of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from e2e_harness import Server, serving

pytestmark = pytest.mark.e2e

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(autouse=True)
def unharmed(int8_server: Server) -> Iterator[None]:
    """After each test the server answers, and holds no page."""
    yield
    response = int8_server.post(COMPLETIONS, prompt="The capital of France is", max_tokens=3, temperature=0)
    assert response.status_code == 200 and response.json()["choices"][0]["text"]
    int8_server.wait_for("kv_cache_usage", 0.0, timeout=5)


def _assert_error(response: httpx.Response, status: int, words: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert words in error["message"] and "\n" not in error["message"] and "Traceback" not in error["message"]
    return error


@pytest.mark.parametrize(
    "path, body, words",
    [
        (COMPLETIONS, {"prompt": "the sea " * 8200}, "maximum context length is 8192"),
        (COMPLETIONS, {"prompt": [1] * 8192, "max_tokens": 1}, "maximum context length is 8192"),
        (COMPLETIONS, {"prompt": [1] * 8000, "max_tokens": 193}, "maximum context length is 8192"),
        (CHAT, {"messages": [{"role": "user", "content": "the sea " * 8200}]}, "maximum context length is 8192"),
        (COMPLETIONS, {"prompt": [49152]}, "between 0 and 49151"),
        (COMPLETIONS, {"prompt": [-1]}, "between 0 and 49151"),
        (COMPLETIONS, {"prompt": ""}, "at least one"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"49152": 1}}, "between 0 and 49151"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 10**9}, "maximum context length"),
        (COMPLETIONS, {"prompt": "a", "temperature": -0.1}, "temperature"),
        (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p"),
        (COMPLETIONS, {"prompt": 7}, "prompt"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
        (CHAT, {"messages": [{"role": "user"}]}, "content"),
        (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, "tools"),
    ],
)
def test_requests_that_cannot_be_served(int8_server: Server, path: str, body: dict[str, Any], words: str) -> None:
    for stream in (False, True):
        error = _assert_error(int8_server.post(path, **body, stream=stream), 400, words)
        assert error["type"] == "invalid_request_error"


def test_the_whole_context_can_be_asked_for(int8_server: Server) -> None:
    """One token less than what is refused above."""
    response = int8_server.post(COMPLETIONS, prompt=[1] * 300, max_tokens=8192 - 300, stop=["\n", " ", "a", "e"])
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'{"model": "\xff"}', b'{"model":"\\ud800"}', b"{" * 5000],
    ids=["nothing", "half", "list", "null", "bad-utf8", "surrogate", "deep"],
)  # fmt: skip
def test_bodies_that_are_no_request(int8_server: Server, content: bytes) -> None:
    for path in (COMPLETIONS, CHAT):
        response = int8_server.http.post(path, content=content)
        assert response.status_code in (400, 404), response.text
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_body_that_is_too_large(int8_server: Server) -> None:
    body = {"model": int8_server.model, "prompt": "x" * (9 * 2**20)}
    _assert_error(int8_server.http.post(COMPLETIONS, json=body), 413, "bytes")


def test_names_that_are_not_served(int8_server: Server) -> None:
    _assert_error(int8_server.post(COMPLETIONS, model="gpt-4", prompt="a"), 404, "gpt-4")
    _assert_error(int8_server.http.get("/v1/embeddings"), 404, "/v1/embeddings")
    _assert_error(int8_server.http.get(COMPLETIONS), 405, COMPLETIONS)


def test_the_client_raises_its_own_errors(int8_server: Server) -> None:
    with int8_server.client() as client:
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt-4", prompt="a")
        with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
            client.completions.create(model=int8_server.model, prompt=[1] * 9000)
        assert caught.value.code == "context_length_exceeded"


def test_greedy_whatever_top_p_says(int8_server: Server) -> None:
    texts = {
        int8_server.post(COMPLETIONS, prompt="Once", max_tokens=8, temperature=0, top_p=p).json()["choices"][0]["text"]
        for p in (1, 0.5, 1e-9)
    }
    assert len(texts) == 1


def test_a_key_a_name_and_a_queue(int8_plan: Any) -> None:
    """The flags that the other servers leave alone, and 429 when more comes than the queue holds."""
    flags = ("--api-key", "s3cret", "--served-model-name", "org/small", "--max-num-seqs", "2", "--max-queue", "2",
             "--max-model-len", "2048", "--kv-cache-memory", "200M", "--threads", "1")  # fmt: skip
    with serving(int8_plan, *flags) as server:
        assert server.model == "org/small"
        _assert_error(server.post(COMPLETIONS, prompt="a"), 401, "API key")
        assert server.http.get("/health").status_code == 200
        server.http.headers["Authorization"] = "Bearer s3cret"
        _assert_error(server.post(COMPLETIONS, prompt=[1] * 2048), 400, "maximum context length is 2048")
        body = {"prompt": ["a"] * 4, "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
        request = server.http.build_request("POST", COMPLETIONS, json={"model": "org/small", "stream": True} | body)
        full = server.http.send(request, stream=True)
        try:
            assert full.status_code == 200
            response = server.post(COMPLETIONS, prompt="a", max_tokens=1)
            _assert_error(response, 429, "queue is full")
            assert int(response.headers["retry-after"]) >= 1
        finally:
            full.close()
        server.wait_for("num_requests_running", 0.0, timeout=5)
        assert server.post(COMPLETIONS, prompt="a", max_tokens=1).status_code == 200
