"""The way of a request's outputs from the engine's thread to whoever asked.

A stream never blocks the engine: outputs are appended, and the consumer takes what has gathered, merged, at
its own pace. What can gather is bounded by the request's own max_tokens. One stream may carry several
requests.
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Protocol

from llmc.runtime.request import RequestOutput


class Sink(Protocol):
    """Where the engine puts outputs. `push` is called on the engine's thread and must not block."""

    def push(self, output: RequestOutput) -> None: ...


class AsyncStream:
    """Outputs for a coroutine of the event loop in which this was made. Ends after `num_sequences` last
    outputs.
    """

    def __init__(self, num_sequences: int, on_close: Callable[[], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self._open = num_sequences
        self._on_close = on_close
        self._pending: deque[RequestOutput] = deque()
        self._event = asyncio.Event()

    def push(self, output: RequestOutput) -> None:
        self._pending.append(output)

    def wake(self) -> None:
        """To be called in the event loop after a push."""
        self._event.set()

    def close(self) -> None:
        """Aborts what has not finished. Harmless when all has, and a second time."""
        if self._open:
            self._open = 0
            self._on_close()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if not self._open:
            raise StopAsyncIteration
        while not self._pending:
            self._event.clear()
            # The engine pushes before it wakes: what came between the test above and clear() shows here.
            if not self._pending:
                await self._event.wait()
        output = self._pending.popleft()
        while self._pending and self._follows(output, self._pending[0]):
            output = output.merge(self._pending.popleft())
        if output.finish_reason is not None:
            self._open -= 1
        return output

    @staticmethod
    def _follows(output: RequestOutput, later: RequestOutput) -> bool:
        return output.request_id == later.request_id and output.index == later.index


class BlockingStream:
    """Outputs for an ordinary thread: iterate over it."""

    def __init__(self, num_sequences: int, on_close: Callable[[], None]) -> None:
        self._open = num_sequences
        self._on_close = on_close
        self._queue: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()

    def push(self, output: RequestOutput) -> None:
        self._queue.put(output)

    def close(self) -> None:
        """Aborts what has not finished. Harmless when all has, and a second time."""
        if self._open:
            self._open = 0
            self._on_close()

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        if not self._open:
            raise StopIteration
        output = self._queue.get()
        if output.finish_reason is not None:
            self._open -= 1
        return output


def wake_all(sinks: Iterable[Sink]) -> None:
    """Wakes the consumers of the async streams among `sinks`, with one call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[AsyncStream]] = {}
    for sink in sinks:
        if isinstance(sink, AsyncStream):
            by_loop.setdefault(sink.loop, []).append(sink)
    for loop, streams in by_loop.items():
        try:
            loop.call_soon_threadsafe(_wake, streams)
        except RuntimeError:
            # The loop is closed, and with it went every consumer that could have read this.
            continue


def _wake(streams: list[AsyncStream]) -> None:
    for stream in streams:
        stream.wake()
