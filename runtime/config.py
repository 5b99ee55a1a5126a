"""What an operator sets: the flags of a server that shape its engine, and the engine's limits that come of them."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.errors import UserError
from llmc.runtime.kept_pages import Eviction


@dataclass(frozen=True)
class LoadOptions:
    """The flags of `llmc serve` that shape the engine; None is the default that its help describes."""

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_queue: int = 256
    kv_cache_memory: int | None = None
    threads: int | None = None
    device: str = "auto"
    gpu_memory_utilization: float = 0.9
    prefix_cache: bool = True
    kv_eviction: Eviction = "lru"


@dataclass(frozen=True)
class EngineConfig:
    """Limits of an engine. What the executor or the KV pool cannot give is lowered to what they can.

    max_model_len: prompt and output tokens of a sequence. max_num_seqs: sequences in one step.
    max_num_batched_tokens: tokens in one step. max_queue: sequences that may wait beyond those that run.
    prefix_cache: whether computed prefixes are shared and kept; kv_eviction: which of them go first (kept_pages.py).
    check_integrity: assert the scheduler's invariants after every step (for tests). Raises UserError on a
    number that makes no sense.
    """

    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_queue: int = 256
    eos_token_ids: frozenset[int] = frozenset()
    prefix_cache: bool = True
    kv_eviction: Eviction = "lru"
    check_integrity: bool = False

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_queue < 0:
            raise UserError(f"max_queue is {self.max_queue}; it must not be negative")
