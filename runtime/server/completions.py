"""POST /v1/completions: text or tokens in, text out."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from llmc.runtime.detokenizer import TextCodec
from llmc.runtime.request import Request, RequestError, RequestOutput, TokenLogprob
from llmc.runtime.server.answer import logprob, new_id, respond
from llmc.runtime.server.http import read_body
from llmc.runtime.server.protocol import CompletionBody, parse
from llmc.runtime.server.sampling import sampling_params
from llmc.runtime.server.service import Service

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
    choices = _Choices(service.model.codec, requests[0].params.n, echo, body.logprobs)
    return await respond(service, http, requests, choices, stream=bool(body.stream), include_usage=include_usage)


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


class _Choices:
    """The choices of one response, `n` of every prompt. echo: what stands before them; logprobs: how many to list."""

    id_prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, codec: TextCodec, n: int, echo: list[str] | None, logprobs: int | None) -> None:
        self._codec, self._n, self._echo, self._logprobs = codec, n, echo, logprobs
        self._offsets: Counter[int] = Counter()

    def whole(self, index: int, output: RequestOutput) -> dict[str, Any]:
        return self._choice(index, self._echoed(index) + output.text, output)

    def first(self, index: int) -> dict[str, Any] | None:
        return None if self._echo is None else self._choice(index, self._echoed(index), None)

    def next(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        anything = output.text or output.logprobs or output.finish_reason
        return [self._choice(index, output.text, output)] if anything else []

    def _echoed(self, index: int) -> str:
        return "" if self._echo is None else self._echo[index // self._n]

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
