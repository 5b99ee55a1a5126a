"""What both endpoints share: the engine, the model, encoding off the event loop, ids, token counts and the
failures that reach a client."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from llmc.runtime.engine import Engine
from llmc.runtime.request import EngineUnavailable, RequestOutput
from llmc.runtime.server.http import InternalError, NotFound
from llmc.runtime.server.model import ServedModel

T = TypeVar("T")

# Texts up to this many characters take less time to encode than a change of thread.
ENCODE_INLINE = 4096
# JSON has no infinity; OpenAI sends this for a token that could not be.
LOWEST_LOGPROB = -9999.0


class Service:
    """One model on one engine, as the handlers see it."""

    def __init__(self, engine: Engine, model: ServedModel, max_body_bytes: int) -> None:
        self.engine = engine
        self.model = model
        self.max_body_bytes = max_body_bytes
        # Two threads: a flood of long prompts must not take the cores from the model.
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="llmc-encode")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def check_model(self, name: str) -> None:
        """Raises NotFound unless `name` is the served model."""
        if name != self.model.name:
            raise NotFound(
                f"The model `{name[:200]}` does not exist; this server serves `{self.model.name}`.",
                param="model",
                code="model_not_found",
            )

    async def run(self, characters: int, work: Callable[[], T]) -> T:
        """Runs `work`, in another thread when it has many characters to deal with."""
        if characters <= ENCODE_INLINE:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


@dataclass(frozen=True)
class Envelope:
    """The fields that every object and chunk of one response repeats."""

    id: str
    kind: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """A response or chunk with these choices."""
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
            **more,
        }


def new_id(prefix: str) -> str:
    """A fresh id for a response, such as "cmpl-…"."""
    return f"{prefix}-{uuid.uuid4().hex}"


class Usage:
    """Token counts over all sequences of a response."""

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        self.prompt_tokens = sum(len(prompt) for prompt in prompts)
        self.completion_tokens = 0

    def add(self, output: RequestOutput) -> None:
        self.completion_tokens += len(output.token_ids)

    def as_dict(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


def raise_failure(output: RequestOutput) -> None:
    """Raises what a client is told when its request did not end by itself; does nothing otherwise."""
    if output.finish_reason == "error":
        raise InternalError(output.error or "internal error", code="internal_error")
    if output.finish_reason == "abort":
        raise EngineUnavailable(output.error or "the request was aborted", code="service_unavailable")


def logprob(value: float) -> float:
    """A log-probability as JSON can hold it."""
    return max(value, LOWEST_LOGPROB) if value == value else LOWEST_LOGPROB
