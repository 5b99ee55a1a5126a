"""POST /v1/completions: text or tokens in, text out."""

from __future__ import annotations

from collections import Counter
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from llmc.runtime.detokenizer import TextCodec
from llmc.runtime.request import Request, RequestError, RequestOutput, TokenLogprob, check_length
from llmc.runtime.server.answer import logprob, new_id, respond
from llmc.runtime.server.protocol import CompletionBody
from llmc.runtime.server.sampling import sampling_params
from llmc.runtime.server.service import Service

DEFAULT_MAX_TOKENS = 16


async def completions(service: Service, http: HttpRequest) -> Response:
    """Answers one call. Raises RequestError for whatever cannot be served."""
    body, size = await service.read(CompletionBody, http)
    _refuse_unsupported(body)
    include_usage = body.include_usage
    prompts = _prompts(body)
    service.engine.check_count(len(prompts))
    requests, echo = await service.run(size, len(prompts), lambda: _requests(service, body, prompts))
    choices = _Choices(service.model.codec, requests[0].params.n, echo, body.logprobs)
    return await respond(service, http, requests, choices, stream=bool(body.stream), include_usage=include_usage)


def _refuse_unsupported(body: CompletionBody) -> None:
    if body.suffix:
        raise RequestError("suffix is not supported", param="suffix")
    if body.best_of is not None and body.best_of != (1 if body.n is None else body.n):
        raise RequestError("best_of is not supported; use n", param="best_of")
    if body.echo and body.logprobs is not None:
        raise RequestError("logprobs of an echoed prompt are not supported", param="logprobs")


def _prompts(body: CompletionBody) -> list[str] | list[list[int]]:
    """The prompts in order, as texts or as token ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt must not be empty", param="prompt")
    # The kind of the first is the kind of all: parsing has seen to that.
    return [prompt] if isinstance(prompt[0], int) else prompt


def _requests(
    service: Service, body: CompletionBody, prompts: list[str] | list[list[int]]
) -> tuple[list[Request], list[str] | None]:
    """One request per prompt, and the prompts' texts when they are to be echoed."""
    codec, max_model_len = service.model.codec, service.engine.max_model_len

    def check(length: int) -> None:
        check_length(length, _max_tokens(body, length, max_model_len), max_model_len)

    requests = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = codec.encode(prompt, body.add_special_tokens is not False, check)
        else:
            check(len(prompt))
            ids = prompt
        max_tokens = _max_tokens(body, len(ids), max_model_len)
        params = sampling_params(body, service.model.defaults, max_tokens=max_tokens, logprobs=body.logprobs)
        requests.append(Request(new_id("req"), tuple(ids), params, cache_salt=body.salt))
    return requests, [codec.decode(request.prompt) for request in requests] if body.echo else None


def _max_tokens(body: CompletionBody, prompt_length: int, max_model_len: int) -> int:
    if body.max_tokens is not None:
        return body.max_tokens
    # At least 1, so that a prompt which fills the context is refused as too long.
    return max(1, min(DEFAULT_MAX_TOKENS, max_model_len - prompt_length), body.min_tokens or 0)


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
