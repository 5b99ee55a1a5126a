"""A tokenizer in which special tokens are written as marks, and their own texts are text like any other."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from tokenizers import AddedToken, Encoding, Tokenizer

from llmc.runtime.special_text import Marks

_FIRST, _COUNT = 0x100000, 0xFFFE  # private use: no text that people write


class MarkedTokenizer:
    """Encodes prompts marked with its `marks`. Shares the model with the tokenizer that it is made from, so it costs
    nothing to have."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = shared = Tokenizer(tokenizer.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if (value := getattr(tokenizer, part)) is not None:
                setattr(shared, part, value)
        added = sorted(tokenizer.get_added_tokens_decoder().items())
        special = [(i, token) for i, token in added if token.special and token.content]
        others = [(i, token) for i, token in added if not token.special]
        nonce = "".join(chr(_FIRST + secrets.randbelow(_COUNT)) for _ in range(4))  # unguessable from outside
        names = [nonce + "".join(chr(_FIRST + digit) for digit in divmod(i, _COUNT)) for i in range(len(special) + 1)]
        shared.add_tokens([token for _, token in others])
        shared.add_tokens([_mark_of(token, name) for (_, token), name in zip(special, names[1:], strict=True)])
        shared.add_tokens([AddedToken(names[0], normalized=False, special=False)])
        self.marks = Marks({token.content: name for (_, token), name in zip(special, names[1:], strict=True)}, names[0])
        self._made_by_model = frozenset(i for i, token in special if shared.token_to_id(token.content) == i)
        self._cut_id = shared.token_to_id(names[0])
        self._ids = {shared.token_to_id(token.content): i for i, token in others}
        self._ids |= {shared.token_to_id(self.marks.of[token.content]): i for i, token in special}

    def encode(self, text: str, add_special_tokens: bool, check_length: Callable[[int], object] | None) -> list[int]:
        """Ids, as the original tokenizer has them, of a marked text; arguments as those of `encode` below.

        No special token comes from elsewhere than a mark, but for unknown characters' and what the tokenizer adds.
        """
        encoding = self._encode(text.replace(self.marks.cut, ""), check_length)
        if not self._made_by_model.isdisjoint(encoding.ids):
            # The model itself knows the text of a special token as a piece: it is not to see it whole.
            encoding = self._encode(text, check_length)
        if not add_special_tokens:
            return [self._ids.get(i, i) for i in encoding.ids if i != self._cut_id]
        encoding = self._tokenizer.post_process(encoding)
        # What the post-processor adds has its original id already.
        pairs = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return [i if is_added else self._ids.get(i, i) for i, is_added in pairs if is_added or i != self._cut_id]

    def _encode(self, text: str, check_length: Callable[[int], object] | None) -> Encoding:
        return encode(self._tokenizer, text, False, check_length)


def encode(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, check_length: Callable[[int], object] | None
) -> Encoding:
    """What the tokenizer makes of a text. Other threads run meanwhile. check_length: called with the number of tokens;
    may raise."""
    # The batch form releases the interpreter's lock, the single form does not.
    encoding = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    if check_length is not None:
        try:
            check_length(len(encoding))
        except BaseException:
            # Or the error's traceback takes it to whoever handles that; freeing millions of tokens takes a while.
            del encoding
            raise
    return encoding


def _mark_of(token: AddedToken, name: str) -> AddedToken:
    """The mark takes what the token takes of the white space around it."""
    return AddedToken(
        name, normalized=token.normalized, lstrip=token.lstrip, rstrip=token.rstrip, single_word=token.single_word,
        special=False,
    )  # fmt: skip
