"""Incremental text: the pieces add up to the whole, and no piece holds half a character or a stop string."""

from __future__ import annotations

import functools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_fakes import EOS, byte_tokenizer

from llmc.errors import UserError
from llmc.runtime.detokenizer import IncrementalDetokenizer, StopMatcher, TextCodec

REPLACEMENT = "\ufffd"


@functools.cache
def byte_codec() -> TextCodec:
    return TextCodec(byte_tokenizer())


@pytest.fixture
def codec() -> TextCodec:
    return byte_codec()


@pytest.fixture(scope="module")
def spm() -> TextCodec:
    """A SentencePiece-like tokenizer with byte fallback, whose decoder strips the leading space of a text."""
    from tokenizers import Tokenizer, decoders, models

    pieces = ["<unk>", "▁Hello", "▁world", "!"] + [f"<0x{b:02X}>" for b in range(256)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TextCodec(tokenizer.to_str().encode())


def pieces(codec: TextCodec, tokens: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = IncrementalDetokenizer(codec, prompt or [])
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


def test_a_character_comes_whole_with_its_last_byte(codec: TextCodec) -> None:
    assert pieces(codec, list("a€😀b".encode())) == ["a", "", "", "€", "", "", "", "😀", "b", ""]


def test_a_cut_character_is_not_shown(codec: TextCodec) -> None:
    assert pieces(codec, list("a😀".encode())[:-1]) == ["a", "", "", "", ""]


def test_invalid_bytes_in_the_middle_become_replacement_characters(codec: TextCodec) -> None:
    tokens = [*b"a", 0xFF, *b"b"]
    assert "".join(pieces(codec, tokens)) == f"a{REPLACEMENT}b"


def test_a_flood_of_invalid_bytes_is_let_out(codec: TextCodec) -> None:
    detokenizer = IncrementalDetokenizer(codec, [])
    seen = [detokenizer.push(0xFF) for _ in range(50)]
    assert sum(map(len, seen)) >= 40
    assert max(map(len, seen)) <= 8


def test_special_tokens_are_skipped_or_shown(codec: TextCodec) -> None:
    assert "".join(pieces(codec, [*b"a", EOS, *b"b"])) == "ab"
    shown = IncrementalDetokenizer(codec, [], skip_special_tokens=False)
    assert [shown.push(token) for token in (97, EOS)] == ["a", "<eos>"]


def test_a_character_begun_by_the_prompt_is_completed(codec: TextCodec) -> None:
    euro = list("€".encode())
    assert "".join(pieces(codec, [*euro[2:], *b"!"], prompt=[*b"x", *euro[:2]])) == "€!"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=40), st.binary(max_size=10))
def test_pieces_add_up_to_the_decoded_whole(data: bytes, prompt: bytes) -> None:
    codec = byte_codec()
    whole = codec.decode(list(data)).rstrip(REPLACEMENT)
    got = "".join(pieces(codec, list(data)))
    # A flood at the very end may have been let out already.
    assert got.rstrip(REPLACEMENT) == whole
    text = prompt.decode(errors="ignore")
    assert "".join(pieces(codec, list(data), list(text.encode()))).rstrip(REPLACEMENT) == whole


def test_a_leading_space_survives_after_a_prompt_only(spm: TextCodec) -> None:
    assert pieces(spm, [1, 2, 3]) == ["Hello", " world", "!", ""]
    assert pieces(spm, [2, 3], prompt=[1]) == [" world", "!", ""]


def test_byte_fallback_runs(spm: TextCodec) -> None:
    tokens = [4 + b for b in "你好".encode()]
    assert pieces(spm, [1, *tokens, 3]) == ["Hello", "", "", "你", "", "", "好", "!", ""]


def test_token_bytes(codec: TextCodec, spm: TextCodec) -> None:
    assert [codec.token_bytes(b) for b in range(256)] == [bytes([b]) for b in range(256)]
    assert codec.token_bytes(EOS) == b"<eos>"
    assert codec.token_bytes(99_999) == b""
    assert spm.token_bytes(4 + 0xE4) == b"\xe4"
    assert spm.token_bytes(1) == b" Hello"
    assert spm.token_text(4 + 0xE4) == REPLACEMENT


def test_truncation_and_padding_of_the_file_are_ignored() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(byte_tokenizer().decode())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    assert TextCodec(tokenizer.to_str().encode()).encode("abcdef") == list(b"abcdef")


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", json.dumps({"model": 1}).encode()])
def test_what_is_no_tokenizer_is_refused(data: bytes) -> None:
    with pytest.raises(UserError, match="tokenizer does not load"):
        TextCodec(data)


def run_stop(text: str, stops: list[str], cuts: list[int]) -> tuple[str, bool]:
    matcher, out, last = StopMatcher(stops), "", 0
    for cut in [*sorted(cuts), len(text)]:
        piece, hit = matcher.push(text[last:cut])
        out, last = out + piece, max(last, cut)
        if hit:
            return out, True
    return out + matcher.flush(), False


def test_stop_string_across_pieces_is_never_shown() -> None:
    matcher = StopMatcher(["</end>"])
    assert [matcher.push(p) for p in ("a<", "/e", "nx", "</en", "d>b")] == [
        ("a", False),
        ("", False),
        ("</enx", False),
        ("", False),
        ("", True),
    ]


def test_the_first_stop_string_wins() -> None:
    assert StopMatcher(["b", "ab"]).push("xabx") == ("x", True)
    assert StopMatcher(["zz", "y"]).push("ayzz") == ("a", True)


def test_not_armed_lets_everything_out() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.push("xab", armed=False) == ("xab", False)
    assert matcher.push("ab") == ("", True)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.text("ab", max_size=30),
    st.text("ab", min_size=1, max_size=4),
    st.lists(st.integers(0, 30), max_size=10),
)
def test_one_stop_string_cuts_the_same_however_the_text_is_split(text: str, stop: str, cuts: list[int]) -> None:
    before, found, _ = text.partition(stop)
    assert run_stop(text, [stop], [min(c, len(text)) for c in cuts]) == (before, bool(found))


@pytest.mark.parametrize("single", ["<bos> $A", "<bos> $A <eos>", "$A <eos>", "$A"])
def test_a_text_that_begins_with_the_start_token_gets_no_second_one(single: str) -> None:
    codec = TextCodec(byte_tokenizer(single))
    end = [257] if "<eos>" in single else []
    start = [256] if "<bos>" in single else []
    assert codec.encode("ab") == [*start, 97, 98, *end]
    assert codec.encode("<bos>ab") == [256, 97, 98, *end]
    assert codec.encode("<bos><bos>ab") == [256, 256, 97, 98, *end]
    assert codec.encode("a<bos>") == [*start, 97, 256, *end]
    assert codec.encode("") == start + end
    assert codec.encode("<bos>ab", add_special_tokens=False) == [256, 97, 98]
