"""A conversation to a prompt, by the checkpoint's own Jinja template.

Gives the template what Hugging Face gives it (trimmed blocks, loop controls, `raise_exception`,
`strftime_now`, `tojson`, the `generation` tag) in Jinja's immutable sandbox. A template that refuses a
conversation is the client's error; one that does not parse is the plan's. What bounds a template's time and memory is
in `template_process.py`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from llmc.errors import UserError
from llmc.runtime.request import RequestError
from llmc.runtime.special_text import Conversation, Marks, Prompt, render_prompt

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
NO_MARKS = Marks()


class TemplateRefusal(RequestError):
    """The template refuses a conversation by `raise_exception`."""


class _Refusal(jinja2.TemplateError):
    """What `raise_exception` raises inside a template."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model wrote, for training; here it is just its
    body.
    """

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which a prompt must not be.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A chat template and the special tokens it may name (`bos_token`, `eos_token`, …)."""

    def __init__(self, template: str, special_tokens: Mapping[str, str]) -> None:
        """Raises UserError when the template does not parse."""
        self._now = datetime.datetime.now()
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: self._now.strftime(pattern)
        try:
            environment.parse(template)
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template does not parse ({error}); rebuild the plan with another") from error
        except (RecursionError, MemoryError) as error:
            raise UserError("the chat template is nested too deeply; rebuild the plan with another") from error
        self._environment = environment
        self.source = template
        self.special_tokens = dict(special_tokens)
        self.knows_developer = "developer" in template
        """Whether the template names the role "developer", the newer name of "system"."""

    @cached_property
    def _template(self) -> jinja2.Template:
        # Not before the first rendering: the compiler evaluates constants such as 'a' * 10**9.
        return self._environment.from_string(self.source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        marks: Marks = NO_MARKS,
    ) -> Prompt:
        """The prompt for a conversation. Raises RequestError for one on which the template fails, TemplateRefusal
        with its words when it refuses.

        messages: role, content and what else the template reads. variables: more names for the template, e.g.
        enable_thinking. marks: of the tokenizer that will encode it.
        """
        self._now = datetime.datetime.now()  # one for all renderings of a conversation
        conversation = Conversation(messages, tools, variables)
        return render_prompt(lambda c: self._text(c, add_generation_prompt), conversation, marks)

    def _text(self, conversation: Conversation, add_generation_prompt: bool) -> str:
        variables = conversation.variables or {}
        if taken := RESERVED & variables.keys():
            raise RequestError(f"chat_template_kwargs may not set {min(taken)}", param="chat_template_kwargs")
        names = {
            **self.special_tokens,
            **variables,
            "messages": list(conversation.messages),
            "tools": conversation.tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(names)
        except jinja2.TemplateError as error:
            raise (TemplateRefusal if isinstance(error, _Refusal) else RequestError)(
                f"the model's chat template refuses this conversation: {error}", param="messages"
            ) from error
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            MemoryError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            # Python errors inside a template come from the shape of the messages or variables that it was
            # given.
            raise RequestError(
                f"the model's chat template fails on this conversation: {type(error).__name__}: {error}",
                param="messages",
            ) from error
