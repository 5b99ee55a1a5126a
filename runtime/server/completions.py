"""POST /v1/completions: text or tokens in, text out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from llmc.runtime.request import Request, RequestError, RequestOutput, TokenLogprob
from llmc.runtime.server.http import EventStream, error_object, json_response, read_body, until_disconnect
from llmc.runtime.server.protocol import CompletionBody, parse
from llmc.runtime.server.sampling import sampling_params
from llmc.runtime.server.service import Envelope, Service, Usage, logprob, new_id, raise_failure
from llmc.runtime.stream import AsyncStream

DEFAULT_MAX_TOKENS = 16


async def completions(service: Service, http: HttpRequest) -> Response:
    """Answers one call. Raises RequestError for whatever cannot be served."""
    body = parse(CompletionBody, await read_body(http, service.max_body_bytes))
    service.check_model(body.model)
    _refuse_unsupported(body)
    include_usage = body.include_usage
    prompts = await _encode(service, body)
    requests = [_request(service, body, prompt) for prompt in prompts]
    echo = [service.model.codec.decode(prompt) for prompt in prompts] if body.echo else None
    answer = _Answer(service, requests, echo, body.logprobs)
    stream = service.engine.open_stream(requests)
    if body.stream:
        return EventStream(answer.events(stream, include_usage), stream.close)
    try:
        return json_response(await until_disconnect(http, answer.collect(stream)))
    finally:
        stream.close()


def _refuse_unsupported(body: CompletionBody) -> None:
    if body.suffix:
        raise RequestError("suffix is not supported", param="suffix")
    if body.best_of is not None and body.best_of != (1 if body.n is None else body.n):
        raise RequestError("best_of is not supported; use n", param="best_of")
    if body.echo and body.logprobs is not None:
        raise RequestError("logprobs of an echoed prompt are not supported", param="logprobs")


async def _encode(service: Service, body: CompletionBody) -> list[tuple[int, ...]]:
    """The prompts as token ids, in order."""
    prompt, codec = body.prompt, service.model.codec
    if isinstance(prompt, str):
        prompt = [prompt]
    if not prompt:
        raise RequestError("prompt must not be empty", param="prompt")
    if isinstance(prompt[0], int):
        return [tuple(prompt)]
    prompts = []
    for item in prompt:
        if isinstance(item, str):
            ids = await service.run(len(item), partial(codec.encode, item))
            prompts.append(tuple(ids))
        elif isinstance(item, list):
            prompts.append(tuple(item))
    return prompts


def _request(service: Service, body: CompletionBody, prompt: tuple[int, ...]) -> Request:
    max_tokens = body.max_tokens
    if max_tokens is None:
        # At least 1, so that a prompt which fills the context is refused as too long.
        max_tokens = max(1, min(DEFAULT_MAX_TOKENS, service.engine.max_model_len - len(prompt)))
        max_tokens = max(max_tokens, body.min_tokens or 0)
    params = sampling_params(body, service.model.defaults, max_tokens=max_tokens, logprobs=body.logprobs)
    return Request(new_id("req"), prompt, params)


class _Answer:
    """One response under way: choice i*n + j is sequence j of prompt i."""

    def __init__(self, service: Service, requests: list[Request], echo: list[str] | None, logprobs: int | None) -> None:
        self._codec = service.model.codec
        self._envelope = Envelope(new_id("cmpl"), "text_completion", service.model.name)
        self._n = requests[0].params.n
        self._first_choice = {request.request_id: i * self._n for i, request in enumerate(requests)}
        self._num_choices = self._n * len(requests)
        self._echo = echo
        self._logprobs = logprobs
        self._usage = Usage([request.prompt for request in requests])
        self._offsets = [0] * self._num_choices

    async def collect(self, stream: AsyncStream) -> dict[str, Any]:
        """The whole response, when all sequences have ended."""
        gathered: list[RequestOutput | None] = [None] * self._num_choices
        async for output in stream:
            raise_failure(output)
            self._usage.add(output)
            choice = self._choice_of(output)
            before = gathered[choice]
            gathered[choice] = output if before is None else before.merge(output)
        choices = [
            self._choice(i, self._echoed(i) + output.text, output)
            for i, output in enumerate(gathered)
            if output is not None
        ]
        return self._envelope.wrap(choices, usage=self._usage.as_dict())

    async def events(self, stream: AsyncStream, include_usage: bool) -> AsyncIterator[dict[str, Any]]:
        """The response in chunks. A failure is a last chunk with an error, as the status is long sent."""
        more: dict[str, Any] = {"usage": None} if include_usage else {}
        if self._echo is not None:
            for i in range(self._num_choices):
                yield self._envelope.wrap([self._choice(i, self._echoed(i), None)], **more)
        try:
            async for output in stream:
                raise_failure(output)
                self._usage.add(output)
                if output.text or output.logprobs or output.finish_reason:
                    choice = self._choice(self._choice_of(output), output.text, output)
                    yield self._envelope.wrap([choice], **more)
        except RequestError as error:
            yield error_object(error)
            return
        if include_usage:
            yield self._envelope.wrap([], usage=self._usage.as_dict())

    def _choice_of(self, output: RequestOutput) -> int:
        return self._first_choice[output.request_id] + output.index

    def _echoed(self, choice: int) -> str:
        return "" if self._echo is None else self._echo[choice // self._n]

    def _choice(self, index: int, text: str, output: RequestOutput | None) -> dict[str, Any]:
        logprobs = None
        if self._logprobs is not None and output is not None:
            logprobs = self._logprob_lists(index, output.logprobs)
        reason = None if output is None else output.finish_reason
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprob_lists(self, choice: int, entries: tuple[TokenLogprob, ...]) -> dict[str, Any]:
        tokens = [self._token(entry.token) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(token)
        top = None
        if self._logprobs:
            # The sampled token is listed even when it is not among the likeliest.
            top = [
                {self._token(i): logprob(p) for i, p in (*entry.top, (entry.token, entry.logprob))} for entry in entries
            ]
        return {
            "tokens": tokens,
            "token_logprobs": [logprob(entry.logprob) for entry in entries],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _token(self, token: int) -> str:
        """The token's text, or its bytes spelled out when they are only part of a character: keys must
        differ.
        """
        data = self._codec.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
