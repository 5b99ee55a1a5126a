"""uvicorn's connections with bounds that it lacks: on a request's head, on the time it takes, on their number.

uvicorn's own `h11_max_incomplete_event_size` says nothing to httptools, and its keep-alive timer starts with the first
answer: a client that sends nothing, or half a head, would stay for ever. How long a body may take is in `http.py`.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from llmc.runtime.request import EngineUnavailable, RequestError
from llmc.runtime.server.http import dumps, error_object

MAX_HEAD_BYTES = 2**16
HEAD_TIMEOUT = 30.0


class Connection(HttpToolsProtocol):
    """A connection that is closed when a head is too large (431) or takes too long (408), or when there are too many
    (503); what is no HTTP gets 400. All with OpenAI's error object. HTTP/1.0 gets no chunks."""

    # Within the usual limit of 1,024 open files.
    max_connections: ClassVar[int] = 896

    # What arrived since the parser last gave a whole head or a part of a body. It gives a header when that is whole, so
    # that only this tells of a header, a trailer or a chunk's extension that does not end.
    _unparsed = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            message = "the server has too many connections; try again later"
            self._refuse(503, EngineUnavailable(message, code="service_unavailable"))
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._is_answered() and self._timer is None:
            self._start_timer()  # not anew for every byte
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, RequestError(f"the head of the request has more than {MAX_HEAD_BYTES} bytes"))

    def on_headers_complete(self) -> None:
        self._unparsed = 0
        self._stop_timer()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            _send_unchunked(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, RequestError(msg))

    def _is_answered(self) -> bool:
        """Whether no answer is owed: what comes is a new request, or the rest of one that was answered early."""
        return self.cycle is None or self.cycle.response_complete

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_TIMEOUT, self._timed_out)

    def _timed_out(self) -> None:
        if not self.transport.is_closing():
            message = f"the head of the request did not arrive within {HEAD_TIMEOUT:.0f} seconds"
            self._refuse(408, RequestError(message))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, error: RequestError) -> None:
        """Answers without the application and closes; only closes when an answer to an earlier request is under way."""
        self._stop_timer()
        if self._is_answered():
            body = dumps(error_object(error))
            retry = b"" if error.retry_after is None else b"retry-after: %d\r\n" % error.retry_after
            self.transport.write(
                STATUS_LINE[status]
                + b"content-type: application/json\r\nconnection: close\r\n"
                + retry
                + b"content-length: %d\r\n\r\n" % len(body)
                + body
            )
        self.transport.close()


def _send_unchunked(cycle: RequestResponseCycle) -> None:
    """Lets an answer of unknown length end with the connection: HTTP/1.0 knows no chunks."""
    send, has_length = cycle.send, False

    async def unchunked(message: Any) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length += len(message.get("body", b""))  # it is checked against this
        await send(message)

    cycle.send = unchunked  # type: ignore[method-assign]
