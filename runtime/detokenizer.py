"""Text to tokens, and tokens back to text while they are still arriving.

`TextCodec` is a `tokenizers.Tokenizer` as the plan holds it. `IncrementalDetokenizer` emits, token by token,
the text that no later token can change: never a part of a character. `StopMatcher` finds stop strings across
tokens and holds back what might become one. Text depends on the tokens alone, not on how they were grouped
into steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property

from tokenizers import Tokenizer

from llmc.errors import UserError
from llmc.runtime.marked_tokenizer import MarkedTokenizer, encode
from llmc.runtime.special_text import Marks, Prompt

REPLACEMENT = "\ufffd"
# Tokens of the prompt that are decoded along with the output, so that a decoder which strips the leading
# space of a text does not strip it from the output.
CONTEXT_TOKENS = 6
# A character has at most 4 bytes, hence at most 4 tokens. When this many tokens still end in U+FFFD, the
# bytes are invalid and no later token will mend them.
MAX_HELD_TOKENS = 8


class TextCodec:
    """A tokenizer from the bytes of its tokenizer.json. Raises UserError when they are not one."""

    def __init__(self, tokenizer_json: bytes) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(tokenizer_json.decode("utf-8"))
            # Of the decoder alone: parsing the whole file again would take longer than the rest of a start.
            found = self._tokenizer.decoder
            decoder = json.loads(found.__getstate__()) if found is not None else None
        except Exception as error:  # tokenizers raises bare Exception
            raise UserError(f"the tokenizer does not load ({error}); rebuild the plan") from error
        # A prompt is never cut or padded behind the user's back, whatever the checkpoint's file says.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._decoder_types = _decoder_types(decoder)
        self._marked = MarkedTokenizer(self._tokenizer)

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(
        self, text: str, add_special_tokens: bool = True, check_length: Callable[[int], object] | None = None
    ) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognised. Other threads run meanwhile.

        add_special_tokens: as the tokenizer does it, but no start token before one that the text begins with.
        check_length: called with their number before the list is made, during which no other thread runs; may raise.
        """
        ids = list(encode(self._tokenizer, text, add_special_tokens, check_length).ids)
        return self._without_second_start(ids) if add_special_tokens else ids

    def encode_prompt(
        self, prompt: Prompt, add_special_tokens: bool, check_length: Callable[[int], object] | None = None
    ) -> list[int]:
        """Token ids of a conversation. Of its special tokens those are real that the template wrote; where the request
        brought any, `prompt` is marked with `marks`. The arguments are those of `encode`."""
        if not prompt.marked:
            return self.encode(prompt.text, add_special_tokens, check_length)
        ids = self._marked.encode(prompt.text, add_special_tokens, check_length)
        return self._without_second_start(ids) if add_special_tokens else ids

    @property
    def marks(self) -> Marks:
        """With which `encode_prompt` wants prompts marked."""
        return self._marked.marks

    def _without_second_start(self, ids: list[int]) -> list[int]:
        return ids[1:] if len(ids) > 1 and ids[0] == ids[1] == self._start_token else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; incomplete or invalid UTF-8 becomes U+FFFD."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_text(self, token: int) -> str:
        """The token as a string for people, special or not; U+FFFD where its bytes are no UTF-8."""
        return self.token_bytes(token).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, which need not be whole characters. Empty for an unknown id."""
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if token not in self._added:
            if "ByteLevel" in self._decoder_types:
                return bytes(_BYTE_OF_CHARACTER[c] for c in piece if c in _BYTE_OF_CHARACTER)
            if "ByteFallback" in self._decoder_types and len(piece) == 6 and piece.startswith("<0x"):
                return bytes.fromhex(piece[3:5])
            if self._decoder_types & {"Metaspace", "Replace"}:
                return str(piece).replace("\u2581", " ").encode()
        return str(piece).encode()

    @cached_property
    def _start_token(self) -> int | None:
        """The token that encoding puts before a text, if any."""
        plain, whole = (self._tokenizer.encode("a", add_special_tokens=added).ids for added in (False, True))
        return int(whole[0]) if len(whole) > len(plain) and whole[:1] != plain[:1] else None

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder())


def _decoder_types(decoder: object) -> frozenset[str]:
    """The types in the "decoder" entry of a tokenizer.json, those of a Sequence included."""
    if not isinstance(decoder, dict):
        return frozenset()
    types = {str(decoder.get("type"))}
    for part in decoder.get("decoders", ()):
        types |= _decoder_types(part)
    return frozenset(types)


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins for bytes in byte-level BPE (GPT-2): printable Latin-1 stands for itself, the
    other bytes for the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


class IncrementalDetokenizer:
    """Text of one output, piece by piece. The pieces add up to the decoded whole, without an incomplete
    character at its end.

    Decodes a short window twice: `ids[prefix:read]`, whose text is out already, and `ids[prefix:]`. The
    difference is new, once it does not end in U+FFFD. The window makes the decoder see the neighbours on
    which spacing depends.
    """

    def __init__(self, codec: TextCodec, prompt: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._codec = codec
        self._skip = skip_special_tokens
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        self._prefix = 0
        self._read = len(self._ids)

    def push(self, token: int) -> str:
        """The text that `token` completes, often "" inside a character."""
        self._ids.append(token)
        text = self._unread()
        if text.endswith(REPLACEMENT) and len(self._ids) - self._read < MAX_HELD_TOKENS:
            return ""
        if text:
            # Only the window is kept: an output of any length costs the same per token.
            del self._ids[: self._read]
            self._prefix, self._read = 0, len(self._ids)
        return text

    def flush(self) -> str:
        """The text still held back when no token will follow, less an incomplete character at its end."""
        text = self._unread().rstrip(REPLACEMENT)
        self._read = len(self._ids)
        return text

    def _unread(self) -> str:
        before = self._codec.decode(self._ids[self._prefix : self._read], self._skip)
        window = self._codec.decode(self._ids[self._prefix :], self._skip)
        if window.startswith(before):
            return window[len(before) :]
        # The window's first text changed: the prompt ended inside a character that is complete now, or a
        # byte-fallback decoder took back a run of bytes. What came before that point is out.
        kept = before.rstrip(REPLACEMENT)
        if window.startswith(kept):
            return window[len(kept) :]
        return self._codec.decode(self._ids[self._read :], self._skip)


class StopMatcher:
    """Cuts a text at the first stop string in it, however the text is split."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str, armed: bool = True) -> tuple[str, bool]:
        """(text that can go out, whether a stop string was found). Not armed, everything goes out
        unexamined.
        """
        text, self._held = self._held + text, ""
        if not self._stops or not armed:
            return text, False
        found = [position for stop in self._stops if (position := text.find(stop)) >= 0]
        if found:
            return text[: min(found)], True
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back, now that no text will follow."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins, less than the whole of it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
