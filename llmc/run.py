"""`llmc run`: one prompt, streamed to the terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

from llmc.errors import UserError
from llmc.runtime.config import LoadOptions
from llmc.runtime.detokenizer import TextCodec
from llmc.runtime.load import load_engine
from llmc.runtime.plan import Plan
from llmc.runtime.request import Request, RequestError, SamplingParams
from llmc.runtime.server.model import served_model


def run_prompt(
    plan: Plan,
    prompt: str,
    raw: bool,
    max_tokens: int | None,
    seed: int | None,
    overrides: dict[str, Any],
    options: LoadOptions,
) -> None:
    """Streams the answer to stdout and tokens/s to stderr. Raises UserError for a prompt or value out of range."""
    model = served_model(plan, None)
    template = None if raw else model.chat_template
    defaults = model.defaults
    values = {k: getattr(defaults, k) for k in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    values |= {k: v for k, v in overrides.items() if v is not None}
    try:
        if template is not None:
            text = template.render([{"role": "user", "content": prompt}])
            ids = model.codec.encode(text, add_special_tokens=False)
        else:
            ids = model.codec.encode(prompt)
        params = SamplingParams(max_tokens=max_tokens, seed=seed, **values)
        request = Request("run", tuple(ids), params)
        _stream(plan, model.codec, request, options)
    except RequestError as error:
        raise UserError(str(error)) from error


def _stream(plan: Plan, codec: TextCodec, request: Request, options: LoadOptions) -> None:
    engine = load_engine(plan, codec, options)
    engine.start()
    started, first, count = time.perf_counter(), 0.0, 0
    try:
        for output in engine.generate_blocking(request):
            if output.finish_reason == "error":
                raise UserError(f"the engine failed: {output.error}")
            first = first or time.perf_counter()
            count += len(output.token_ids)
            sys.stdout.write(output.text)
            sys.stdout.flush()
    finally:
        engine.close()
    print()
    decode = time.perf_counter() - first
    rate = (count - 1) / decode if count > 1 and decode > 0 else 0.0
    print(
        f"llmc: {len(request.prompt)} prompt tokens in {first - started:.2f} s, {count} tokens at {rate:.1f} tokens/s",
        file=sys.stderr,
    )
