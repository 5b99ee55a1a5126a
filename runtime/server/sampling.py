"""From the fields of a body to `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping

from llmc.runtime.request import RequestError, SamplingParams
from llmc.runtime.server.model import SamplingDefaults
from llmc.runtime.server.protocol import SamplingBody


def sampling_params(
    body: SamplingBody,
    defaults: SamplingDefaults,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    names: Mapping[str, str] | None = None,
) -> SamplingParams:
    """Raises RequestError on a value out of range. names: what the client calls a parameter, where that differs."""
    try:
        return _sampling_params(body, defaults, max_tokens, logprobs)
    except RequestError as error:
        raise renamed(error, names or {}) from error


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The error with its parameter, which its message begins with, called by the client's name for it."""
    name = names.get(error.param or "")
    if name is None:
        return error
    return RequestError(error.message.replace(error.param or "", name), param=name, code=error.code)


def _sampling_params(
    body: SamplingBody, defaults: SamplingDefaults, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:

    def either(value: float | None, default: float) -> float:
        return default if value is None else value

    return SamplingParams(
        temperature=either(body.temperature, defaults.temperature),
        top_p=either(body.top_p, defaults.top_p),
        top_k=defaults.top_k if body.top_k is None else body.top_k,
        min_p=either(body.min_p, defaults.min_p),
        repetition_penalty=either(body.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=either(body.presence_penalty, 0.0),
        frequency_penalty=either(body.frequency_penalty, 0.0),
        seed=body.seed,
        stop=_stops(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        logit_bias=_logit_bias(body.logit_bias or {}),
        n=1 if body.n is None else body.n,
        logprobs=logprobs,
        skip_special_tokens=body.skip_special_tokens is not False,
    )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _logit_bias(bias: dict[str, float]) -> dict[int, float]:
    result = {}
    for key, value in bias.items():
        # Nine digits are more than any vocabulary needs, and int() of a longer text could be slow.
        if not (key.isascii() and key.isdigit() and len(key) <= 9):
            raise RequestError(f"logit_bias: {key[:40]!r} is not a token id", param="logit_bias")
        result[int(key)] = value
    return result
