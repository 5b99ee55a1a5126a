"""What an engine tells about itself: gauges, counters and durations. How they are published is the server's
affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from llmc.runtime.request import FinishReason


@dataclass(frozen=True)
class EngineStats:
    """Gauges of now and counters since the start. kv_cache_usage is a fraction, 0 to 1; pages that are only kept for
    reuse are free. prefix_queries: prompt tokens that were looked up in the prefix cache, prefix_hits: found there."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    prompt_tokens: int
    generation_tokens: int
    num_preemptions: int
    prefix_queries: int
    prefix_hits: int
    finished: dict[FinishReason, int]


class EngineObserver(Protocol):
    """Durations in seconds, reported on the engine's thread."""

    def first_token(self, seconds: float) -> None: ...
    def next_token(self, seconds: float) -> None: ...
    def finished(self, seconds: float) -> None: ...


class NoObserver:
    """Looks away."""

    def first_token(self, seconds: float) -> None: ...
    def next_token(self, seconds: float) -> None: ...
    def finished(self, seconds: float) -> None: ...
