"""Clients that speak no HTTP, an old one, or nothing at all: what raw sockets get."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from server_harness import Running, running_server

from llmc.runtime.server import connection

GET = b"GET /health HTTP/1.1\r\nHost: a\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server() as running:
        yield running


@pytest.fixture
def impatient(server: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT", 0.3)
    return server


def _connect(server: Running) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=5)


def _all(sock: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65536):
            data += part
    return data


def _error(answer: bytes, status: int) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:300]
    assert b"connection: close" in head and b"content-type: application/json" in head
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    "begin, more",
    [
        (GET + b"X: ", b"a" * 1000),
        (GET, b"X: a\r\n" * 200),
        (b"GET /", b"a" * 1000),
        (CHUNKED + b"1\r\n{\r\n0\r\nX: ", b"a" * 1000),
        (CHUNKED + b"1;", b"a" * 1000),
    ],
    ids=["header", "headers", "url", "trailer", "chunk extension"],
)  # fmt: skip
def test_a_head_without_end_is_cut_off(server: Running, begin: bytes, more: bytes) -> None:
    sent = 0
    with _connect(server) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(begin)
        while sent < 10 * connection.MAX_HEAD_BYTES:
            sock.sendall(more)
            sent += len(more)
            time.sleep(0.0005)
    assert sent < 10 * connection.MAX_HEAD_BYTES


def test_a_head_that_is_too_large_is_told(server: Running) -> None:
    with _connect(server) as sock:
        sock.sendall(GET + b"X: " + b"a" * connection.MAX_HEAD_BYTES)
        _error(_all(sock), 431)


@pytest.mark.parametrize("sent", [b"", b"G", GET, b"\r\n"])
def test_silent_and_half_sent_requests_are_timed_out(impatient: Running, sent: bytes) -> None:
    begun = time.monotonic()
    with _connect(impatient) as sock:
        sock.sendall(sent)
        _error(_all(sock), 408)
    assert time.monotonic() - begun < 3


@pytest.mark.parametrize("begin", [GET, GET + b"Content-Length: 500\r\n\r\n"], ids=["head", "body of an answered one"])
def test_what_drips_is_timed_out(impatient: Running, begin: bytes) -> None:
    begun = time.monotonic()
    with _connect(impatient) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(begin)
        while time.monotonic() - begun < 4:
            time.sleep(0.02)
            sock.sendall(b"a")
    assert time.monotonic() - begun < 4


def test_an_answered_connection_is_kept(impatient: Running) -> None:
    with _connect(impatient) as sock:
        for _ in range(2):
            sock.sendall(GET + b"\r\n")
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")
            time.sleep(0.5)


def test_too_many_connections(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection.Connection, "max_connections", 5)
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(_connect(server))
        time.sleep(0.1)
        answer = _all(stack.enter_context(_connect(server)))
        error = _error(answer, 503)
        assert (error["type"], error["code"]) == ("server_error", "service_unavailable")
        assert b"retry-after: 5\r\n" in answer


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00\x01\x00", b"hello\r\n\r\n", b"GET / HTTP/1.1\r\n\x00: a\r\n\r\n"]
)
def test_what_is_no_http(server: Running, data: bytes) -> None:
    with _connect(server) as sock:
        sock.sendall(data)
        assert _error(_all(sock), 400)["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_gets_no_chunks(server: Running, stream: bool) -> None:
    body = json.dumps({"model": "org/toy", "prompt": "a", "max_tokens": 5, "stream": stream}).encode()
    with _connect(server) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        head, _, rest = _all(sock).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"chunked" not in head.lower()
    if stream:
        assert rest.startswith(b"data: {") and rest.endswith(b"\n\ndata: [DONE]\n\n")
    else:
        assert json.loads(rest)["object"] == "text_completion"
