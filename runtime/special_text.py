"""Which special tokens of a prompt the chat template wrote, and which are text that the request brought.

A template makes one string of everything, and there a special token that somebody typed into a message looks like one
of the template's own: it could end the turn and open another. So where the request holds what special tokens begin or
end with, the conversation is rendered again with those characters exchanged, in all that the request brought, for
private-use ones. If that is the same text but for the exchange, each special token still in it is the template's own.

A template that looks at the characters may render something else. Then only whole special tokens are exchanged, and the
template's own must be the same ones in the same order. What passes neither way is refused: nobody can say whose its
special tokens are.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from llmc.runtime.request import RequestError

UNCLEAR = (
    "a message holds text like a special token's where the model's chat template looks at it; change that text, "
    "or use /v1/completions with the prompt as it should be"
)
_PRIVATE_USE = range(0x100000, 0x10FFFE)


class Prompt(NamedTuple):
    """A rendered conversation. marked: the template's special tokens are written as `Marks`, any other is text."""

    text: str
    marked: bool = False


@dataclass(frozen=True)
class Marks:
    """What stands for special tokens in a marked prompt, which no request can know.

    of: the text of each special token -> its mark. cut: may stand within the text of one that is no token, and is
    nothing by itself.
    """

    of: Mapping[str, str] = field(default_factory=dict)
    cut: str = ""

    @cached_property
    def special(self) -> re.Pattern[str]:
        """Any special token, the longest first, as the tokenizer takes them."""
        return _any_of(self.of)

    @cached_property
    def ends(self) -> frozenset[str]:
        """Characters with which special tokens begin or end, but for letters, digits and white space: those are
        everywhere, and templates look at them."""
        return frozenset(c for text in self.of for c in (text[0], text[-1]) if not (c.isalnum() or c.isspace()))

    @cached_property
    def without_ends(self) -> tuple[str, ...]:
        """Special tokens that do not both begin and end with one of `ends`."""
        return tuple(text for text in self.of if not {text[0], text[-1]} <= self.ends)


class Conversation(NamedTuple):
    """What a request brings into the template."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] | None = None

    def changed(self, change: Callable[[str], str]) -> Conversation:
        """With every string changed but the roles of messages, which templates compare and callers have checked, and
        keys that are identifiers, by which templates ask."""
        messages = [{k: v if k == "role" else _changed(v, change) for k, v in m.items()} for m in self.messages]
        return Conversation(messages, _changed(self.tools, change), _changed(self.variables, change))

    def strings(self) -> Iterator[str]:
        """All that `changed` changes."""
        found: list[str] = []

        def note(text: str) -> str:
            found.append(text)
            return text

        self.changed(note)
        return iter(found)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {k if k.isidentifier() else change(k): _changed(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(v, change) for v in value]
    return value


def render_prompt(render: Callable[[Conversation], str], conversation: Conversation, marks: Marks) -> Prompt:
    """The prompt, marked if the request brought text of special tokens. render: the template; called up to four times.

    Raises RequestError for a conversation in which it is unclear whose the special tokens are.
    """
    text = render(conversation)
    if not marks.of:
        return Prompt(text)
    brought = list(conversation.strings())
    exchange = _Exchange(marks, brought, text)
    if not exchange.is_needed:
        return Prompt(text)
    strict = None
    for change in (exchange.ends_and_parts, exchange.ends) if exchange.has_parts else (exchange.ends,):
        strict = _rendered(render, conversation.changed(change))
        if strict is not None and exchange.undone(strict) == text:
            return _marked(strict, text, exchange)
    whole = _rendered(render, conversation.changed(exchange.whole))
    if whole is None or strict is None or exchange.undone(whole) != text:
        raise RequestError(UNCLEAR, param="messages")
    if marks.special.findall(whole) != marks.special.findall(strict):
        raise RequestError(UNCLEAR, param="messages")
    return _marked(whole, text, exchange)


def _rendered(render: Callable[[Conversation], str], conversation: Conversation) -> str | None:
    try:
        return render(conversation)
    except RequestError:
        return None  # it looks at what was exchanged, and refuses that


class _Exchange:
    """Exchanges characters of a request's strings for private-use ones that are nowhere else in it, and back."""

    def __init__(self, marks: Marks, brought: Sequence[str], text: str) -> None:
        """brought: the request's strings. text: the prompt."""
        self.marks, self._brought = marks, brought
        seen = set().union(*brought)
        # The tokenizer may make an end of a special token out of them.
        self.variants = {
            c for c in seen if not c.isascii() and set(unicodedata.normalize("NFKC", c)) - {c} & marks.ends
        }
        originals = sorted(set().union(*marks.of) | self.variants)
        seen.update(text)
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in seen)
        self._there = {ord(c): new for c, new in zip(originals, free, strict=False)}
        if len(self._there) < len(originals):
            raise RequestError("the messages hold too many private-use characters", param="messages")
        self._back = {ord(new): chr(old) for old, new in self._there.items()}
        ends = marks.ends | self.variants
        self._ends = {ord(c): self._there[ord(c)] for c in ends}
        self._risky = _any_of([*marks.without_ends, *ends])
        self._specials = "\n".join(marks.of)
        self.has_parts = any(map(self._is_part, brought))

    @property
    def is_needed(self) -> bool:
        return self.has_parts or any(map(self._risky.search, self._brought))

    def ends_and_parts(self, text: str) -> str:
        """Exchanges whatever could begin or end a special token, and all of a string that is a part of one."""
        return text.translate(self._there) if self._is_part(text) else self.ends(text)

    def ends(self, text: str) -> str:
        """Exchanges whatever could begin or end a special token."""
        if self.marks.without_ends:
            return self._risky.sub(self._moved, text)
        return text.translate(self._ends)  # the same, and ten times as fast

    def whole(self, text: str) -> str:
        """Exchanges special tokens, also where the string ends within one or begins within one."""
        text = self.marks.special.sub(self._moved, text)
        longest = max(map(len, self.marks.of))
        for size in range(min(longest - 1, len(text)), 0, -1):
            if any(special.startswith(text[-size:]) for special in self.marks.of):
                text = text[:-size] + text[-size:].translate(self._there)
                break
        for size in range(min(longest - 1, len(text)), 0, -1):
            if any(special.endswith(text[:size]) for special in self.marks.of):
                return text[:size].translate(self._there) + text[size:]
        return text

    def undone(self, text: str) -> str:
        return text.translate(self._back)

    def _is_part(self, text: str) -> bool:
        """Whether the template may write special tokens around it: as in '<|' + name + '|>'."""
        text = text.strip()
        return 0 < len(text) <= 256 and text in self._specials

    def _moved(self, match: re.Match[str]) -> str:
        return match[0].translate(self._there)


def _marked(exchanged: str, text: str, exchange: _Exchange) -> Prompt:
    """exchanged: the prompt, in which all special tokens are the template's own. text: the same with nothing
    exchanged."""
    marks = exchange.marks
    if not exchange.variants and len(marks.special.findall(exchanged)) == len(marks.special.findall(text)):
        return Prompt(text)
    variants = {ord(c): c + marks.cut for c in exchange.variants}
    pieces, end = [], 0
    for own in marks.special.finditer(exchanged):
        pieces += [_cut(exchange.undone(exchanged[end : own.start()]), marks, variants), marks.of[own[0]]]
        end = own.end()
    pieces.append(_cut(exchange.undone(exchanged[end:]), marks, variants))
    return Prompt("".join(pieces), marked=True)


def _cut(text: str, marks: Marks, variants: Mapping[int, str]) -> str:
    cut = marks.special.sub(lambda match: match[0][0] + marks.cut + match[0][1:], text)
    return cut.translate(variants) if variants else cut


def _any_of(texts: Iterator[str] | Sequence[str] | Mapping[str, str] | set[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)")
