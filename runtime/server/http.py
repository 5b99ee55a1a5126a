"""What HTTP asks of the handlers: reading bodies within bounds, noticing clients that leave, errors as
OpenAI's clients expect them, and event streams that neither stall nor leak."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmc.runtime.request import RequestError

log = logging.getLogger(__name__)

# A client that takes longer to send its body, or to read what it is sent, is gone.
BODY_TIMEOUT = 60.0
STALL_TIMEOUT = 60.0

T = TypeVar("T")


class BodyTooLarge(RequestError):
    """The body is larger than the server takes (413)."""

    status = 413


class BodyTooSlow(RequestError):
    """The body did not arrive in time (408)."""

    status = 408


class Unauthorized(RequestError):
    """No API key, or a wrong one (401)."""

    status = 401


class NotFound(RequestError):
    """No such model (404)."""

    status = 404


class InternalError(RequestError):
    """Our fault (500). The message is for the client; the cause is in the log."""

    status = 500
    kind = "server_error"


def dumps(value: object) -> bytes:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response with a JSON body."""
    return Response(dumps(value), status, headers, media_type="application/json")


def error_object(error: RequestError) -> dict[str, Any]:
    """OpenAI's error object."""
    # Any text of the client's may be quoted in the message; what cannot be encoded is shown escaped.
    message = error.message.encode("utf-8", "backslashreplace").decode()
    return {"error": {"message": message, "type": error.kind, "param": error.param, "code": error.code}}


def error_response(error: RequestError) -> Response:
    """The response to a request that cannot be served."""
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, BodyTooLarge | BodyTooSlow):
        headers["Connection"] = "close"  # the rest of the body will not be read
    return json_response(error_object(error), error.status, headers)


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises BodyTooLarge before more than `limit` bytes are held, BodyTooSlow,
    ClientDisconnect.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise BodyTooLarge(f"the body has {declared} bytes; this server takes {limit}")
    try:
        return await asyncio.wait_for(_read(request, limit), BODY_TIMEOUT)
    except asyncio.TimeoutError as error:
        raise BodyTooSlow(f"the body did not arrive within {BODY_TIMEOUT:.0f} seconds") from error


async def _read(request: Request, limit: int) -> bytes:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise BodyTooLarge(f"the body has more than the {limit} bytes that this server takes")
        parts.append(part)
    return b"".join(parts)


async def _disconnected(receive: Receive) -> None:
    """Returns when the client is gone. Only to be used after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises ClientDisconnect when the client leaves first."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientDisconnect()
    finally:
        await _cancel(worker, watcher)


class EventStream(Response):
    """Server-sent events from an async iterator of JSON values, with "[DONE]" at the end.

    `on_end` is called once, however it ends: all sent, client gone, client reading nothing for STALL_TIMEOUT,
    or shutdown.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[dict[str, Any]], on_end: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        producer = asyncio.ensure_future(self._produce(send))
        watcher = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({producer, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if producer.cancelled():
                log.warning("a client read nothing for %.0f seconds; its request is aborted", STALL_TIMEOUT)
            elif producer.done():
                producer.result()
        finally:
            self._on_end()
            await _cancel(producer, watcher)

    async def _produce(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await self._send(send, b"data: " + dumps(event) + b"\n\n", True)
        await self._send(send, b"data: [DONE]\n\n", True)
        await self._send(send, b"", False)

    async def _send(self, send: Send, data: bytes, more: bool) -> None:
        task = asyncio.current_task()
        assert task is not None
        # A timer that is cancelled costs a fraction of what wait_for does, and this runs for every token.
        timer = asyncio.get_running_loop().call_later(STALL_TIMEOUT, task.cancel)
        try:
            await send({"type": "http.response.body", "body": data, "more_body": more})
        finally:
            timer.cancel()
