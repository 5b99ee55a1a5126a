"""POST /v1/chat/completions: a conversation in, its next turn out."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from llmc.runtime.detokenizer import TextCodec
from llmc.runtime.request import Request, RequestError, RequestOutput, SamplingParams, TokenLogprob, check_length
from llmc.runtime.server.answer import logprob, new_id, respond
from llmc.runtime.server.protocol import ChatBody, Message
from llmc.runtime.server.sampling import renamed, sampling_params
from llmc.runtime.server.service import Service

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


async def chat_completions(service: Service, http: HttpRequest) -> Response:
    """Answers one call. Raises RequestError for whatever cannot be served."""
    body, _ = await service.read(ChatBody, http)
    _refuse_unsupported(body)
    include_usage = body.include_usage
    params = _sampling(body, service)
    prompt = await service.elsewhere(lambda: _prompt(service, body, params))
    request = Request(new_id("req"), prompt, params, cache_salt=body.salt)
    choices = _Choices(service.model.codec, params.logprobs is not None)
    return await respond(service, http, [request], choices, stream=bool(body.stream), include_usage=include_usage)


def _refuse_unsupported(body: ChatBody) -> None:
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if not body.messages:
        raise RequestError("messages must hold at least one message", param="messages")


def _sampling(body: ChatBody, service: Service) -> SamplingParams:
    """Raises RequestError in the words of this endpoint, whose names for two of the parameters are its own."""
    return sampling_params(
        body,
        service.model.defaults,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        names=_names(body),
    )


def _names(body: ChatBody) -> dict[str, str]:
    """What the client calls parameters that `SamplingParams` calls otherwise."""
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return {"logprobs": "top_logprobs", "max_tokens": limit}


def _prompt(service: Service, body: ChatBody, params: SamplingParams) -> tuple[int, ...]:
    """The conversation as token ids."""
    template = service.model.chat_template
    if template is None or service.template is None:
        raise RequestError("this model has no chat template; use /v1/completions", param="messages")
    messages = [_template_message(m, i, template.knows_developer) for i, m in enumerate(body.messages)]
    prompt = service.template.render(messages, body.add_generation_prompt is not False, None, body.chat_template_kwargs)

    def check(length: int) -> None:
        try:
            check_length(length, params.max_tokens, service.engine.max_model_len)
        except RequestError as error:
            raise renamed(error, _names(body)) from error

    # The template has written the special tokens already, unless the client says otherwise.
    return tuple(service.model.codec.encode_prompt(prompt, body.add_special_tokens is True, check))


def _template_message(message: Message, index: int, knows_developer: bool) -> dict[str, Any]:
    """A message as templates expect it: its content one string."""
    param = f"messages.{index}"
    role, content = message.role, message.content
    if role not in ROLES:
        raise RequestError(f"{param}.role: unknown role {role[:40]!r}", param="messages")
    if role == "developer" and not knows_developer:
        role = "system"
    if content is None:
        if role != "assistant":
            raise RequestError(f"{param}.content: must be a string or a list of text parts", param="messages")
        content = ""
    if not isinstance(content, str):
        texts = []
        for part in content:
            if part.type != "text" or part.text is None:
                raise RequestError(f"{param}.content: only text parts are supported", param="messages")
            texts.append(part.text)
        content = "\n".join(texts)
    return {**(message.model_extra or {}), "role": role, "content": content}


class _Choices:
    """The choices of one response. Its chunks: the roles, the text, for each choice an empty one with its finish
    reason."""

    id_prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, codec: TextCodec, with_logprobs: bool) -> None:
        self._codec, self._with_logprobs = codec, with_logprobs

    def whole(self, index: int, output: RequestOutput) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": self._logprobs(output.logprobs),
            "finish_reason": output.finish_reason,
        }

    def first(self, index: int) -> dict[str, Any]:
        return _delta(index, {"role": "assistant", "content": ""})

    def next(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        deltas = []
        if output.text or output.logprobs:
            deltas.append(_delta(index, {"content": output.text}, self._logprobs(output.logprobs)))
        if output.finish_reason is not None:
            deltas.append(_delta(index, {}, reason=output.finish_reason))
        return deltas

    def _logprobs(self, entries: tuple[TokenLogprob, ...]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        content = [
            {
                **self._token(entry.token, entry.logprob),
                "top_logprobs": [self._token(token, value) for token, value in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, value: float) -> dict[str, Any]:
        data = self._codec.token_bytes(token)
        return {"token": data.decode(errors="replace"), "logprob": logprob(value), "bytes": list(data)}


def _delta(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
