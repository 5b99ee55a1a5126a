"""What both endpoints serve with: the engine, the model and encoding off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from llmc.runtime.engine import Engine
from llmc.runtime.server.http import NotFound
from llmc.runtime.server.model import ServedModel

T = TypeVar("T")

# Texts up to this many characters take less time to encode than a change of thread.
ENCODE_INLINE = 4096


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
