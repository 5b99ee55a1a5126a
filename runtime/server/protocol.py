"""The bodies that clients send, field by field.

Types are strict: "5" is no number and 1.0 no integer. Ranges are not checked here but by `SamplingParams`,
which the command line uses as well; the lengths of lists are, as checking many elements takes time. Of other fields
`parameters.py` says which are refused; those that nobody knows are ignored, with a warning in the log. The answers are
plain dictionaries, made where they are sent.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from llmc.runtime.request import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKENS, RequestError
from llmc.runtime.server.parameters import unknown_fields

log = logging.getLogger(__name__)

# OpenAI's limit for inputs, and more turns than a context has room for.
MAX_PROMPTS = 2048
MAX_MESSAGES = 2048
MAX_PARTS = 256
MAX_CACHE_SALT = 1024
MAX_UNKNOWN_FIELDS = 64
_MAX_WARNED = 100
_warned: set[str] = set()


class Body(BaseModel):
    """Strict types, no NaN or infinity, unknown fields kept apart."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


# Names of the alternatives of a union, which are no part of what the client sent.
_TAGS = frozenset({"<text>", "<texts>", "<tokens>", "<token lists>", "<list>", "<none>"})


def _kind(value: object) -> str | None:
    return {str: "<text>", list: "<list>", type(None): "<none>"}.get(type(value))


def _text_or_list(what: str) -> Discriminator:
    """Tells a string from a list, so that an error is about the one that was sent."""
    return Discriminator(
        _kind,
        custom_error_type="text_or_list",
        custom_error_message=f"must be a string or a list of {what}",
    )


class StreamOptions(Body):
    include_usage: bool | None = None


class SamplingBody(Body):
    """What both endpoints take. None is as good as absent."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS, fail_fast=True), Tag("<list>")]
        | Annotated[None, Tag("<none>")],
        _text_or_list("strings"),
    ] = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS)] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_CACHE_SALT)] | None = None

    @property
    def salt(self) -> bytes:
        """Of the prefixes that the request shares."""
        return (self.cache_salt or "").encode("utf-8", "surrogatepass")

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of token counts. Raises RequestError when there is no
        stream.
        """
        if self.stream_options is None:
            return False
        if not self.stream:
            raise RequestError("stream_options needs stream to be true", param="stream_options")
        return bool(self.stream_options.include_usage)


def _prompt_kind(value: object) -> str | None:
    """Which of the four kinds of prompt this is, judged by its first element: so that a long list is read
    once.
    """
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else 0
    return "<texts>" if isinstance(first, str) else "<token lists>" if isinstance(first, list) else "<tokens>"


_Tokens = Annotated[list[int], Field(fail_fast=True)]
Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True), Tag("<texts>")]
    | Annotated[_Tokens, Tag("<tokens>")]
    | Annotated[
        list[_Tokens],
        Field(max_length=MAX_PROMPTS, fail_fast=True),
        Tag("<token lists>"),
    ],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_type",
        custom_error_message="must be a string, a list of strings, a list of token ids or a list of those",
    ),
]


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None


class ContentPart(Body):
    type: str
    text: str | None = None


class Message(Body):
    """One turn. Other fields (name, tool_calls, …) go to the chat template as they are."""

    role: str
    content: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<list>")]
        | Annotated[None, Tag("<none>")],
        _text_or_list("text parts"),
    ] = None


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


BodyType = TypeVar("BodyType", bound=SamplingBody)


def parse(kind: type[BodyType], data: bytes) -> BodyType:
    """A body from JSON. Raises RequestError that names the first wrong field, or one that is not supported."""
    problem: RequestError | None = None
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        problem = _request_error(error)
    if problem is not None:
        # Not from the ValidationError, which holds the whole body: it is freed here and not in the event loop.
        raise problem
    unknown = unknown_fields(body.model_extra or {}, _elsewhere(kind))
    if body.stream_options is not None:
        unknown |= unknown_fields(body.stream_options.model_extra or {}, where="stream_options")
    if len(unknown) > MAX_UNKNOWN_FIELDS:
        raise RequestError(f"the body holds {len(unknown)} unknown fields; this server takes {MAX_UNKNOWN_FIELDS}")
    for name in sorted(unknown - _warned):
        # Bounded, as the names come from outside.
        if len(_warned) < _MAX_WARNED:
            _warned.add(name)
            log.warning("ignoring the unknown request field %r", name[:80])
    return body


def _elsewhere(kind: type[SamplingBody]) -> set[str]:
    """The fields that the other endpoint honours, without those that every request to it has."""
    other = ChatBody if kind is CompletionBody else CompletionBody
    return other.model_fields.keys() - kind.model_fields.keys() - {"messages", "prompt"}


def _request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = [str(part) for part in first["loc"] if part not in _TAGS]
    if not path:
        return RequestError(f"the body is not a JSON object of the expected form: {first['msg']}")
    return RequestError(f"{'.'.join(path)}: {first['msg']}", param=path[0])
