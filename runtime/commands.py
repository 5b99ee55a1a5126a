"""The door of an engine: any thread puts commands in, the engine's own thread takes them and says what has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from llmc.runtime.request import EngineUnavailable, QueueFull

Command = Callable[[], None]


class CommandQueue:
    """Commands in their order, and how many sequences are let in and have not ended: at most `capacity`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        # Guards all below; notified when a command comes and when a sequence ends.
        self._changed = threading.Condition()
        self._commands: list[Command] = []
        self._known: set[str] = set()
        self._unfinished = 0
        self._draining = False
        self._closing = False

    @property
    def is_draining(self) -> bool:
        """No further request is let in."""
        return self._draining or self._closing

    def admit(self, request_ids: Sequence[str], num_sequences: int, begin: Command) -> None:
        """Lets requests in, all or none, and puts the command that begins them.

        Raises EngineUnavailable, QueueFull, or ValueError for ids that are not unique among the unfinished.
        """
        with self._changed:
            if self.is_draining:
                raise EngineUnavailable("the server is shutting down", code="service_unavailable")
            if self._unfinished + num_sequences > self.capacity:
                raise QueueFull("the server's queue is full; try again later", code="rate_limit_exceeded")
            if len(set(request_ids)) != len(request_ids) or not self._known.isdisjoint(request_ids):
                raise ValueError(f"request ids are not unique: {request_ids}")
            self._known.update(request_ids)
            self._unfinished += num_sequences
            self._commands.append(begin)
            self._changed.notify_all()

    def put(self, command: Command) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify_all()

    def take(self, wait: bool) -> list[Command] | None:
        """Commands since the last call, in order; with `wait`, when there is one. None: time to end."""
        with self._changed:
            while wait and not (self._commands or self._closing):
                self._changed.wait()
            if self._closing:
                return None
            return self._take()

    def take_rest(self) -> list[Command]:
        """The commands that came together with the end."""
        with self._changed:
            return self._take()

    def _take(self) -> list[Command]:
        commands, self._commands = self._commands, []
        return commands

    def sequence_ended(self, request_id: str, is_last: bool) -> None:
        """is_last: of its request, whose id is free from now on."""
        with self._changed:
            self._unfinished -= 1
            if is_last:
                self._known.discard(request_id)
            self._changed.notify_all()

    def begin_drain(self) -> None:
        """From now on requests get EngineUnavailable."""
        self._draining = True

    def wait_idle(self, timeout: float) -> bool:
        """Blocks until every sequence has ended, at most `timeout` seconds. Returns whether all have."""
        with self._changed:
            return self._changed.wait_for(lambda: self._unfinished == 0, timeout)

    def close(self) -> bool:
        """Tells the engine's thread to end. Returns False if that was done before."""
        with self._changed:
            was_closing, self._closing = self._closing, True
            self._changed.notify_all()
            return not was_closing
