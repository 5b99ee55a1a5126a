"""Requests that are made to stop a server: each is refused or served, and nobody else waits for it meanwhile."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from server_harness import Running, running_server
from starlette.requests import Request
from starlette.responses import Response

from llmc.runtime.request import RequestError
from llmc.runtime.server.body_limits import MAX_CONTAINERS, MAX_FIELDS, MAX_VALUES, check_size

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": ""}
MAX_BUSY = 0.06
"""Seconds of CPU time. What is aimed at is 0.02; the rest is for slow machines."""
MAX_PAUSE = 0.5
"""Seconds of wall time, in which any other program may run as well."""


class Watch:
    """Watches the server's event loop from now on, by a task in it."""

    def __init__(self, server: Running) -> None:
        self._busy = self._pause = 0.0
        self._task: asyncio.Future[None] | None = None
        server.app.add_route("/watch", self._begin)
        server.http.get("/watch")

    def take(self) -> tuple[float, float]:
        """The longest time between two turns of the loop since the last call: what its thread computed, and what passed
        on the clock."""
        seen = self._busy, self._pause
        self._busy = self._pause = 0.0
        return seen

    async def _begin(self, _: Request) -> Response:
        self._task = asyncio.ensure_future(self._run())
        return Response()

    async def _run(self) -> None:
        while True:
            cpu, clock = time.thread_time(), time.perf_counter()
            await asyncio.sleep(0.002)
            self._busy = max(self._busy, time.thread_time() - cpu)
            self._pause = max(self._pause, time.perf_counter() - clock - 0.002)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(max_body_bytes=8 * 2**20) as running:
        yield running
        answer = running.post(COMPLETIONS, {"model": "org/toy", "prompt": "a"})
        assert answer.status_code == 200
        assert running.metric("kv_cache_usage") == 0.0


def _body(name: str, value: Any) -> bytes:
    return json.dumps({"model": "org/toy", "prompt": "a", "messages": [USER], name: value}).encode()


HOSTILE: dict[str, tuple[str, bytes]] = {
    "200,000 prompts": (COMPLETIONS, _body("prompt", ["a"] * 200_000)),
    "1.5 million prompts": (COMPLETIONS, _body("prompt", ["a"] * 1_500_000)),
    "as many prompts as may be": (COMPLETIONS, _body("prompt", ["a b c"] * 2048)),
    "prompts that fill the queue": (COMPLETIONS, _body("prompt", ["a" * 600] * 320)),
    "empty token lists": (COMPLETIONS, _body("prompt", [[]] * 500_000)),
    "millions of token ids": (COMPLETIONS, _body("prompt", [1] * 2_500_000)),
    "as many token ids as may be": (COMPLETIONS, _body("prompt", [1] * 260_000)),
    "a text of 8 MB": (COMPLETIONS, _body("prompt", "a" * 8_000_000)),
    "a text of 8 MB to echo": (COMPLETIONS, _body("prompt", ["a" * 8_000_000])[:-1] + b',"echo":true}'),
    "230,000 empty messages": (CHAT, _body("messages", [USER] * 230_000)),
    "as many messages as may be": (CHAT, _body("messages", [USER] * 2048)),
    "messages without a role": (CHAT, _body("messages", [{}] * 500_000)),
    "many small messages": (CHAT, _body("messages", [{}] * 5_000)),
    "content parts": (CHAT, _body("messages", [{"role": "user", "content": [{"type": "text"}] * 300_000}])),
    "unknown fields": (CHAT, b'{"model":"org/toy",' + b",".join(b'"f%d":1' % i for i in range(500_000)) + b"}"),
    "fewer unknown fields": (CHAT, _body("x", 1)[:-1] + b"".join(b',"f%d":1' % i for i in range(16_000)) + b"}"),
    "biases": (CHAT, _body("logit_bias", {str(i): 1 for i in range(15_000)})),
    "biases that are no numbers": (CHAT, _body("logit_bias", {str(i): "a" for i in range(15_000)})),
    "stop strings": (CHAT, _body("stop", [""] * 200_000)),
    "stop tokens": (CHAT, _body("stop_token_ids", ["a"] * 200_000)),
    "nested lists": (CHAT, b"[" * 8_000_000),
    "digits": (CHAT, b'{"model":' + b"9" * 8_000_000 + b"}"),
    "escapes": (COMPLETIONS, b'{"model":"org/toy","prompt":"' + b"\\n" * 4_000_000 + b'"}'),
    "template arguments": (CHAT, _body("chat_template_kwargs", {f"a{i}": 1 for i in range(15_000)})),
}  # fmt: skip


def test_nobody_waits_for_a_hostile_request(server: Running) -> None:
    gc.freeze()  # as `llmc serve` does: the objects of the tests are not looked through in the server's time
    watch = Watch(server)
    seen: dict[str, tuple[float, float]] = {}
    for name, (path, body) in HOSTILE.items():
        watch.take()
        response = server.http.post(path, content=body)
        assert response.status_code in (200, 400), (name, response.text[:300])
        if response.status_code == 400:
            assert len(response.content) < 500 and response.json()["error"]["type"] == "invalid_request_error", name
        seen[name] = watch.take()
    assert not {name: both for name, both in seen.items() if both[0] > MAX_BUSY or both[1] > MAX_PAUSE}


@pytest.mark.parametrize(
    "unit, count", [(b"1,", MAX_VALUES), (b"[],", MAX_CONTAINERS), (b'{"a":1},', MAX_CONTAINERS)]
)  # fmt: skip
def test_what_a_body_may_hold(unit: bytes, count: int) -> None:
    padding = b" " * 2**15
    check_size(padding + b"[" + unit * (count - 1) + b"1]")
    with pytest.raises(RequestError, match="the body holds more than"):
        check_size(padding + b"[" + unit * (count + 1) + b"1]")


def test_what_is_within_strings_is_not_counted() -> None:
    text = json.dumps('[{,:"\\]}' * 2 * MAX_VALUES).encode()
    check_size(text)
    check_size(b'["\\\\",' + text + b',"\\""]')
    with pytest.raises(RequestError, match=f"{MAX_FIELDS} fields"):
        check_size(b'["\\\\",' + text + b"," + b'"\\"":0,' * (MAX_FIELDS + 1) + b"0]")
