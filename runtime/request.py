"""What a client asks for and what it gets back, as plain validated values.

`SamplingParams` refuses every value it cannot honour when it is made, so nothing behind it checks again.
Errors that a client can mend are `RequestError`s and carry what an OpenAI error object needs; the CLI prints
them as any UserError.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from llmc.errors import UserError

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKENS = 128
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20


class RequestError(UserError):
    """A request that cannot be served as it is. `status` is the HTTP status; the rest fills OpenAI's error
    object.
    """

    status = 400
    kind = "invalid_request_error"
    retry_after: int | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class QueueFull(RequestError):
    """The engine holds as many unfinished sequences as it may: try again later (429)."""

    status = 429
    kind = "rate_limit_error"
    retry_after = 1


class EngineUnavailable(RequestError):
    """The engine is draining or has stopped (503)."""

    status = 503
    kind = "server_error"
    retry_after = 5


def _require(ok: bool, param: str, message: str) -> None:
    if not ok:
        raise RequestError(f"{param} {message}", param=param)


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of a request are chosen and when they end. Raises RequestError on a value out of range.

    temperature 0..2, 0 is greedy whatever the rest says; top_p in (0, 1]; top_k >= 1, 0 or -1 is off; min_p
    in [0, 1); repetition_penalty in [0.01, 100], 1 is off; presence and frequency penalty in [-2, 2]; seed:
    64 bits, signed or unsigned, None draws one; stop: strings that end the text (and are not part of it);
    stop_token_ids: tokens that do; max_tokens None means as many as the context holds; min_tokens: no stop
    before that many; logit_bias: token id -> value in [-100, 100]; n: sequences to sample; logprobs: None is
    off, 0 the sampled token's, N > 0 those of the N likeliest tokens too.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n: int = 1
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        # Comparisons are written so that NaN fails them.
        _require(0.0 <= self.temperature <= 2.0, "temperature", "must be between 0 and 2")
        _require(0.0 < self.top_p <= 1.0, "top_p", "must be greater than 0 and at most 1")
        _require(-1 <= self.top_k < 2**31, "top_k", "must be at least 1, or 0 or -1 to turn it off")
        _require(0.0 <= self.min_p < 1.0, "min_p", "must be at least 0 and less than 1")
        _require(0.01 <= self.repetition_penalty <= 100.0, "repetition_penalty", "must be between 0.01 and 100")
        _require(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "must be between -2 and 2")
        _require(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "must be between -2 and 2")
        _require(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "must fit in 64 bits")
        _require(1 <= self.n <= MAX_CHOICES, "n", f"must be between 1 and {MAX_CHOICES}")
        _require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "must be at least 1")
        _require(self.min_tokens >= 0, "min_tokens", "must not be negative")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            "must not be greater than max_tokens",
        )
        _require(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            f"must be between 0 and {MAX_LOGPROBS}",
        )
        self._check_stops()
        _require(len(self.logit_bias) <= MAX_LOGIT_BIAS, "logit_bias", f"holds more than {MAX_LOGIT_BIAS} tokens")
        for value in self.logit_bias.values():
            _require(-100.0 <= value <= 100.0, "logit_bias", "values must be between -100 and 100")

    def stop_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end a sequence, of a model with those end tokens."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else eos_token_ids)

    def _check_stops(self) -> None:
        _require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"holds more than {MAX_STOP_STRINGS} strings")
        for text in self.stop:
            _require(
                0 < len(text) <= MAX_STOP_LENGTH,
                "stop",
                f"strings must have 1 to {MAX_STOP_LENGTH} characters",
            )
        _require(
            len(self.stop_token_ids) <= MAX_STOP_TOKENS,
            "stop_token_ids",
            f"holds more than {MAX_STOP_TOKENS} ids",
        )


@dataclass(frozen=True)
class Request:
    """One prompt (token ids) and its sampling. `arrival` is time.monotonic(); `request_id` is unique in an
    engine. `cache_salt`: computed prefixes are shared only with requests of the same salt.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    arrival: float = field(default_factory=time.monotonic)
    cache_salt: bytes = b""


@dataclass(frozen=True)
class TokenLogprob:
    """An output token, its log-probability under the raw logits, and the likeliest tokens as (id,
    logprob).
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RequestOutput:
    """What is new about sequence `index` of a request since its previous output.

    text may be empty while a character or a possible stop string is incomplete. token_ids includes the token
    that ended the sequence, which is not in text and has no logprob entry. finish_reason is None until the
    last output; with "error", `error` says what failed. num_prompt and num_output count tokens so far.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    num_prompt: int
    num_output: int
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_cached: int = 0
    """Tokens of the prompt that were found computed."""

    def merge(self, later: RequestOutput) -> RequestOutput:
        """This output and the next one of the same sequence as one."""
        return RequestOutput(
            self.request_id,
            self.index,
            self.text + later.text,
            self.token_ids + later.token_ids,
            later.num_prompt,
            later.num_output,
            self.logprobs + later.logprobs,
            later.finish_reason,
            later.error,
            later.num_cached,
        )


def check_length(length: int, max_tokens: int | None, max_model_len: int) -> int:
    """Tokens that may follow a prompt of `length` tokens, as far as the context decides that. Raises RequestError when
    they do not fit."""
    room = max_model_len - length
    wanted = max(room, 1) if max_tokens is None else max_tokens
    if wanted > room:
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{length + wanted} tokens ({length} in the prompt, {wanted} for the completion). Please reduce "
            "the length of the prompt or the completion.",
            param="prompt" if room < 1 else "max_tokens",
            code="context_length_exceeded",
        )
    return wanted


def output_limit(request: Request, *, max_model_len: int, vocab_size: int) -> int:
    """Tokens that a request may produce. Raises RequestError when this model cannot serve it as it is."""
    params, length = request.params, len(request.prompt)
    if length == 0:
        raise RequestError("the prompt holds no token; give at least one", param="prompt")
    wanted = check_length(length, params.max_tokens, max_model_len)
    if not 0 <= min(request.prompt) <= max(request.prompt) < vocab_size:
        raise RequestError(f"prompt: token ids must be between 0 and {vocab_size - 1}", param="prompt")
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise RequestError(f"{name}: token ids must be between 0 and {vocab_size - 1}", param=name)
    if params.min_tokens > wanted:
        raise RequestError(f"min_tokens is {params.min_tokens}, and there is room for {wanted}", param="min_tokens")
    return wanted


def random_seed() -> int:
    """A fresh 64-bit seed for a request that names none."""
    return secrets.randbits(64)


def sequence_seed(seed: int, index: int) -> int:
    """Seed of sequence `index` of a request: the request's own for the first, hashed from both for the
    others.
    """
    seed &= 2**64 - 1
    if index == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
