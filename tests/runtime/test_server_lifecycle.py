"""Clients that leave, queues that fill, signals that end the server."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from runtime_fakes import FakeExecutor
from server_harness import Running, build_app, running_server

from llmc.errors import UserError
from llmc.runtime.server.serve import listen, serve

HERE = Path(__file__).parent
LONG = {"model": "org/toy", "prompt": [1] * 100, "max_tokens": 400, "ignore_eos": True}


@pytest.fixture
def slow() -> Iterator[Running]:
    with running_server(FakeExecutor(num_pages=128, delay=0.02)) as running:
        yield running


def test_a_streaming_client_that_leaves_frees_its_pages(slow: Running) -> None:
    with slow.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        next(response.iter_lines())
        assert slow.metric("kv_cache_usage") > 0
    steps = len(slow.executor.steps)
    slow.wait_for("kv_cache_usage", 0.0)
    assert len(slow.executor.steps) - steps < 30
    assert slow.engine.stats().finished["abort"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_pages_are_free_one_step_after_a_client_left(stream: bool) -> None:
    gate = threading.Semaphore(0)
    with running_server(FakeExecutor(gate=gate)) as server:
        with pytest.raises(httpx.ReadTimeout):
            server.http.post("/v1/completions", json=LONG | {"stream": stream, "n": 2}, timeout=0.3)
        time.sleep(0.1)
        assert server.metric("kv_cache_usage") > 0  # the step is still running
        gate.release(1)
        server.wait_for("kv_cache_usage", 0.0)
        server.wait_for("num_requests_running", 0.0)
        assert len(server.executor.steps) == 1
        assert server.engine.stats().finished["abort"] == 2


def test_leaving_a_chat(slow: Running) -> None:
    body = {"model": "org/toy", "messages": [{"role": "user", "content": "x"}], "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        slow.http.post("/v1/chat/completions", json=body, timeout=0.2)
    slow.wait_for("kv_cache_usage", 0.0)


def test_a_client_that_leaves_within_its_body(slow: Running) -> None:
    host, port = slow.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
    assert slow.post("/v1/completions", LONG | {"max_tokens": 2}).status_code == 200


def test_a_full_queue_is_429_with_retry_after() -> None:
    gate = threading.Semaphore(0)

    async def main(server: Running) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            body = LONG | {"max_tokens": 2}
            tasks = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(7)]
            while sum(task.done() for task in tasks) < 3:
                await asyncio.sleep(0.01)
            gate.release(1000)
            return await asyncio.gather(*tasks)

    with running_server(FakeExecutor(gate=gate), max_num_seqs=2, max_queue=2) as server:
        responses = asyncio.run(main(server))
        refused = [r for r in responses if r.status_code == 429]
        assert len(refused) == 3 and [r.status_code for r in responses].count(200) == 4
        assert all(r.headers["retry-after"] == "1" for r in refused)
        assert refused[0].json()["error"]["code"] == "rate_limit_exceeded"


def test_a_client_that_reads_nothing_is_cut_off(slow: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket fills, the stream's timer fires, the request ends; nobody else notices."""
    import llmc.runtime.server.http as http

    monkeypatch.setattr(http, "STALL_TIMEOUT", 0.3)
    monkeypatch.setattr(http, "dumps", lambda _: b"x" * 2_000_000)
    slow.executor._delay = 0.001
    host, port = slow.url.removeprefix("http://").split(":")
    body = b'{"model":"org/toy","prompt":[1],"max_tokens":300,"ignore_eos":true,"stream":true}'
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        deadline = time.monotonic() + 10
        while sum(slow.engine.stats().finished.values()) == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert slow.http.get("/health").status_code == 200


def test_draining_is_503_with_retry_after(slow: Running) -> None:
    slow.engine.begin_drain()
    response = slow.post("/v1/completions", LONG)
    assert response.status_code == 503 and response.headers["retry-after"]
    assert slow.http.get("/health").status_code == 200
    assert slow.http.get("/health/ready").status_code == 503


def test_a_port_in_use_is_one_line() -> None:
    with listen("127.0.0.1", 0) as sock:
        executor = FakeExecutor()
        with pytest.raises(UserError, match=r"cannot listen on 127\.0\.0\.1:") as caught:
            serve(build_app(executor), "127.0.0.1", sock.getsockname()[1])
        assert "\n" not in str(caught.value) and executor.closed
    for host, port in (("no.such.host.invalid", 1), ("127.0.0.1", 70_000)):
        with pytest.raises(UserError, match="cannot listen"):
            listen(host, port)


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from runtime_fakes import FakeExecutor
from server_harness import build_app
from llmc.runtime.server.serve import serve
app = build_app(FakeExecutor(num_pages=128, delay=float(sys.argv[2])))
ready = lambda url: print(url, flush=True)
serve(app, "127.0.0.1", 0, drain_timeout=float(sys.argv[3]), on_ready=ready)
print("torch" in sys.modules, "transformers" in sys.modules, flush=True)
"""


@pytest.mark.parametrize("delay, timeout, finishes", [(0.005, 20.0, True), (0.05, 1.0, False)])
def test_sigterm_drains_and_exits_with_0(delay: float, timeout: float, finishes: bool) -> None:
    program = [sys.executable, "-c", PROGRAM, str(HERE), str(delay), str(timeout)]
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True, "max_tokens": 200}) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.4)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/health")
            try:
                rest = list(lines)
            except httpx.HTTPError:
                rest = []
        assert ("data: [DONE]" in rest) == finishes
        assert process.wait(timeout=10) == 0
        assert process.stdout.read() == "False False\n"


def test_an_address_in_brackets_as_in_a_url() -> None:
    try:
        listen("::1", 0).close()
    except UserError:
        pytest.skip("this machine has no IPv6")
    with listen("[::1]", 0) as sock:
        assert sock.getsockname()[0] == "::1"
