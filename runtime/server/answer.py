"""One response under way, whole or in chunks: what both endpoints share; each says in `Choices` how its own look."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from llmc.runtime.request import EngineUnavailable, Request, RequestError, RequestOutput
from llmc.runtime.server.http import EventStream, InternalError, error_object, json_response, until_disconnect
from llmc.runtime.server.service import Service
from llmc.runtime.stream import AsyncStream

# JSON has no infinity; OpenAI sends this for a token that could not be.
LOWEST_LOGPROB = -9999.0


class Choices(Protocol):
    """How an endpoint writes its choices. kind, chunk_kind: the field "object" of a response and of a chunk."""

    id_prefix: str
    kind: str
    chunk_kind: str

    def whole(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """A choice of a response that is sent whole."""
        ...

    def first(self, index: int) -> dict[str, Any] | None:
        """What a chunk says of a choice before it has output; None: nothing."""
        ...

    def next(self, index: int, output: RequestOutput) -> Sequence[dict[str, Any]]:
        """What chunks say of further output, one each."""
        ...


async def respond(
    service: Service,
    http: HttpRequest,
    requests: Sequence[Request],
    choices: Choices,
    *,
    stream: bool,
    include_usage: bool,
) -> Response:
    """Submits the requests and answers with all their sequences: choice i*n + j is sequence j of request i, where n is
    the same for all. Raises RequestError for what the engine refuses, ClientDisconnect when the client leaves."""
    answer = _Answer(service.model.name, requests, choices)
    outputs = service.engine.open_stream(requests)
    if stream:
        return EventStream(answer.events(outputs, include_usage), outputs.close)
    try:
        return json_response(await until_disconnect(http, answer.collect(outputs)))
    finally:
        outputs.close()


class _Answer:
    def __init__(self, model: str, requests: Sequence[Request], choices: Choices) -> None:
        n = requests[0].params.n
        self._first_choice = {request.request_id: i * n for i, request in enumerate(requests)}
        self._num_choices = n * len(requests)
        self._choices = choices
        self._model, self._id = model, new_id(choices.id_prefix)
        self._usage = _Usage(sum(len(request.prompt) for request in requests))

    async def collect(self, stream: AsyncStream) -> dict[str, Any]:
        """The whole response, when all sequences have ended."""
        envelope = _Envelope(self._id, self._choices.kind, self._model)
        gathered: list[RequestOutput | None] = [None] * self._num_choices
        async for output in stream:
            _raise_failure(output)
            self._usage.add(output)
            index = self._index(output)
            before = gathered[index]
            gathered[index] = output if before is None else before.merge(output)
        choices = [self._choices.whole(i, output) for i, output in enumerate(gathered) if output is not None]
        return envelope.wrap(choices, usage=self._usage.as_dict())

    async def events(self, stream: AsyncStream, include_usage: bool) -> AsyncIterator[dict[str, Any]]:
        """The response in chunks. A failure is a last chunk with an error, as the status is long sent."""
        envelope = _Envelope(self._id, self._choices.chunk_kind, self._model)
        more: dict[str, Any] = {"usage": None} if include_usage else {}
        for index in range(self._num_choices):
            first = self._choices.first(index)
            if first is not None:
                yield envelope.wrap([first], **more)
        try:
            async for output in stream:
                _raise_failure(output)
                self._usage.add(output)
                for choice in self._choices.next(self._index(output), output):
                    yield envelope.wrap([choice], **more)
        except RequestError as error:
            yield error_object(error)
            return
        if include_usage:
            yield envelope.wrap([], usage=self._usage.as_dict())

    def _index(self, output: RequestOutput) -> int:
        return self._first_choice[output.request_id] + output.index


@dataclass(frozen=True)
class _Envelope:
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


@dataclass
class _Usage:
    """Token counts over all sequences of a response."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached: dict[str, int] = field(default_factory=dict)
    """Tokens of each request's prompt that its first sequence found computed."""

    def add(self, output: RequestOutput) -> None:
        self.completion_tokens += len(output.token_ids)
        if output.index == 0:
            self.cached[output.request_id] = output.num_cached

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


def _raise_failure(output: RequestOutput) -> None:
    """Raises what a client is told when its request did not end by itself; does nothing otherwise."""
    if output.finish_reason == "error":
        raise InternalError(output.error or "internal error", code="internal_error")
    if output.finish_reason == "abort":
        raise EngineUnavailable(output.error or "the request was aborted", code="service_unavailable")


def logprob(value: float) -> float:
    """A log-probability as JSON can hold it."""
    return max(value, LOWEST_LOGPROB) if value == value else LOWEST_LOGPROB
