"""What both endpoints serve with: the engine, the model, and a way to keep work off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request as HttpRequest

from llmc.runtime.engine import Engine
from llmc.runtime.server.body_limits import check_size
from llmc.runtime.server.http import NotFound, read_body
from llmc.runtime.server.model import ServedModel
from llmc.runtime.server.protocol import BodyType, parse
from llmc.runtime.template_process import TemplateProcess

T = TypeVar("T")

# A body up to this many bytes takes a few milliseconds at most to parse, whatever is in it.
PARSE_INLINE = 4096
# Texts up to this many characters take less time to encode than a change of thread; a text of its own takes as long as
# so many characters.
ENCODE_INLINE = 4096
CHARACTERS_PER_TEXT = 256


class Service:
    """One model on one engine, as the handlers see it."""

    def __init__(self, engine: Engine, model: ServedModel, max_body_bytes: int) -> None:
        self.engine = engine
        self.model = model
        self.max_body_bytes = max_body_bytes
        # Two threads: a flood of long prompts must not take the cores from the model.
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="llmc-encode")
        self.template = None if model.chat_template is None else TemplateProcess(model.chat_template, model.codec.marks)

    def start(self) -> None:
        """Starts what the first request would else wait for."""
        if self.template is not None:
            self.template.start()

    def close(self) -> None:
        """Ends the threads and the process behind requests."""
        if self.template is not None:
            self.template.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def check_model(self, name: str) -> None:
        """Raises NotFound unless `name` is the served model."""
        if name != self.model.name:
            raise NotFound(
                f"The model `{name[:200]}` does not exist; this server serves `{self.model.name}`.",
                param="model",
                code="model_not_found",
            )

    async def read(self, kind: type[BodyType], http: HttpRequest) -> tuple[BodyType, int]:
        """A request's body and how many bytes of JSON it was. Raises RequestError for whatever is wrong with it."""
        data = await read_body(http, self.max_body_bytes)

        def checked() -> BodyType:
            check_size(data)
            return parse(kind, data)

        body = checked() if len(data) <= PARSE_INLINE else await self.elsewhere(checked)
        self.check_model(body.model)
        return body, len(data)

    async def elsewhere(self, work: Callable[[], T]) -> T:
        """Runs `work` in another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def run(self, characters: int, texts: int, work: Callable[[], T]) -> T:
        """Runs `work`, in another thread unless it deals with few characters and texts."""
        if characters + texts * CHARACTERS_PER_TEXT <= ENCODE_INLINE:
            return work()
        return await self.elsewhere(work)
