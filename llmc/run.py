"""One person at a terminal: `llmc run` answers a prompt, `llmc chat` has a dialogue."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmc.errors import UserError
from llmc.runtime.config import LoadOptions
from llmc.runtime.load import load_engine
from llmc.runtime.plan import Plan
from llmc.runtime.request import Request, RequestError, SamplingParams
from llmc.runtime.server.model import served_model
from llmc.terminal import write

_HELP = "/reset forgets the conversation, /exit (or Ctrl-D) ends; Ctrl-C stops an answer."


@dataclass(frozen=True)
class Answer:
    """text: all of it, or as far as it came. prompt, count: tokens. first, rest: seconds to the first token, and after
    it. stopped: by Ctrl-C."""

    text: str
    prompt: int
    count: int
    first: float
    rest: float
    stopped: bool = False


class Session:
    """An engine over a plan, with how to sample; use as a context manager."""

    def __init__(self, plan: Plan, options: LoadOptions, max_tokens: int | None, seed: int | None,
                 overrides: dict[str, Any]) -> None:  # fmt: skip
        """overrides: sampling parameters that differ from the checkpoint's, None for those that do not.

        Raises UserError for a value out of range and a plan that cannot be served."""
        self.model = served_model(plan, None)
        defaults = self.model.defaults
        values = {k: getattr(defaults, k) for k in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
        values |= {k: v for k, v in overrides.items() if v is not None}
        self.params = SamplingParams(max_tokens=max_tokens, seed=seed, **values)
        self._plan, self._options, self._requests = plan, options, 0

    def __enter__(self) -> Session:
        self._engine = load_engine(self._plan, self.model.codec, self._options)
        self._engine.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.close()

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        """A conversation by the model's chat template. Raises UserError for a plan without one."""
        template = self.model.chat_template
        if template is None:
            raise UserError("the plan has no chat template: the model only completes text (llmc run --raw)")
        codec = self.model.codec
        return codec.encode_prompt(template.render(messages, marks=codec.marks), add_special_tokens=False)

    def answer(self, ids: list[int]) -> Answer:
        """Streams the answer to standard output. Ctrl-C stops it, and nothing else."""
        self._requests += 1
        request = Request(f"terminal-{self._requests}", tuple(ids), self.params)
        started, first, count, pieces, stopped = time.perf_counter(), 0.0, 0, [], False
        stream = self._engine.generate_blocking(request)
        try:
            for output in stream:
                if output.finish_reason == "error":
                    raise UserError(f"the engine failed: {output.error}")
                first = first or time.perf_counter()
                count += len(output.token_ids)
                pieces.append(output.text)
                write(output.text)
        except KeyboardInterrupt:
            stopped = True
        finally:
            stream.close()
        write("\n")
        end = time.perf_counter()
        return Answer("".join(pieces), len(ids), count, (first or end) - started, end - (first or end), stopped)


def run_prompt(session: Session, prompt: str, raw: bool) -> None:
    """Streams the answer to stdout, tokens/s to stderr. Raises UserError for a prompt that cannot be answered."""
    is_chat = session.model.chat_template is not None and not raw
    with session:
        ids = session.encode([{"role": "user", "content": prompt}]) if is_chat else session.model.codec.encode(prompt)
        answer = session.answer(ids)
    rate = (answer.count - 1) / answer.rest if answer.count > 1 and answer.rest > 0 else 0.0
    print(
        f"llmc: {answer.prompt} prompt tokens in {answer.first:.2f} s, {answer.count} tokens at {rate:.1f} tokens/s",
        file=sys.stderr,
    )
    if answer.stopped:
        raise KeyboardInterrupt


def run_chat(session: Session, system: str | None, read: Callable[[], str | None], say: Callable[[str], None]) -> None:
    """A dialogue until `read` gives None. What the model answered so far is part of every next turn.

    system: the first message of the conversation. say: for what is not an answer. Raises UserError for a plan without a
    chat template; a turn that cannot be answered is said and left out.
    """
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    with session:
        session.encode([*opening, {"role": "user", "content": "Hello"}])  # a plan without a template is told at once
        say(f"{session.model.name}. {_HELP}")
        while (line := read()) is not None:
            text = line.strip()
            if text in ("/exit", "/quit", "/bye"):
                return
            if text == "/reset":
                messages = list(opening)
                say("The conversation is forgotten.")
            elif text.startswith("/") and " " not in text:
                say(_HELP)
            elif text:
                messages = _turn(session, messages, text, say)


def _turn(
    session: Session, messages: list[dict[str, str]], text: str, say: Callable[[str], None]
) -> list[dict[str, str]]:
    """The conversation after a question; as it was, if the question cannot be answered."""
    asked = [*messages, {"role": "user", "content": text}]
    try:
        answer = session.answer(session.encode(asked))
    except RequestError as error:
        say(f"{error} (/reset forgets the conversation)")
        return messages
    return [*asked, {"role": "assistant", "content": answer.text}]


def read_line() -> str | None:
    """A line from the terminal, with editing and history where there is readline; None at the end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return ""
    except UnicodeDecodeError as error:
        raise UserError("standard input is not UTF-8") from error
