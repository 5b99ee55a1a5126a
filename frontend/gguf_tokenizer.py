"""A `tokenizers.Tokenizer` from GGUF metadata: vocabulary, merges, normalizer and pre-tokenizer intact."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from llmc.errors import UserError
from llmc.frontend.pretokenizers import PRE_TOKENIZERS, PreTokenizer

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type
_SPACE = "▁"  # how sentencepiece spells a space


def gguf_tokenizer(metadata: Mapping[str, Any], path: Path) -> tuple[Tokenizer, bool] | None:
    """(the tokenizer, whether it prepends the start token), or None when the file has no vocabulary.

    Raises UserError for a tokenizer model or pre-tokenizer that is not known: a guess would give other
    tokens.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if kind is None or kind == "none" or not tokens:
        return None
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise UserError(f"{path} lists a token twice in its vocabulary: convert the model again")
    if kind == "gpt2":
        pre = _pre_tokenizer(metadata, path)
        tokenizer, default_bos = _byte_level(metadata, vocab, pre, path), pre.default_bos
    elif kind == "llama":
        tokenizer, default_bos = _sentencepiece(metadata, vocab, path), True
    else:
        raise UserError(f"{path} has a tokenizer of the kind {kind!r}: only gpt2 and llama are supported in GGUF")
    _add_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type") or [])
    return tokenizer, _set_template(tokenizer, metadata, tokens, default_bos)


def token_text(metadata: Mapping[str, Any], name: str) -> str | None:
    """The text of the token that tokenizer.ggml.`name`_token_id points at."""
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    return str(tokens[index]) if isinstance(index, int) and 0 <= index < len(tokens) else None


def _pre_tokenizer(metadata: Mapping[str, Any], path: Path) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        raise UserError(
            f"{path} does not say how its tokenizer splits text (tokenizer.ggml.pre), as files of before May "
            "2024: convert the model again with a current converter"
        )
    if name not in PRE_TOKENIZERS:
        raise UserError(f"{path} splits text by the unknown pre-tokenizer {name!r}: use the model's safetensors")
    return PRE_TOKENIZERS[name]


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int], pre: PreTokenizer, path: Path) -> Tokenizer:
    """BPE over bytes spelled as printable characters, as in GPT-2."""
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges") or []]
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # tokenizers raises a bare Exception
        raise UserError(f"{path} has merges that do not fit its vocabulary ({error}): convert it again") from error
    tokenizer = Tokenizer(model)
    if (normalizer := pre.normalizer()) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], vocab: dict[str, int], path: Path) -> Tokenizer:
    """Sentencepiece's BPE: characters merged by score, bytes for what the vocabulary lacks."""
    scores = metadata.get("tokenizer.ggml.scores")
    kinds = metadata.get("tokenizer.ggml.token_type")
    if scores is None or kinds is None or not len(scores) == len(kinds) == len(vocab):
        raise UserError(f"{path} lacks the scores or types of its sentencepiece tokens: convert the model again")
    model = models.BPE(
        vocab=vocab,
        merges=_merges_by_score(vocab, scores, kinds),
        unk_token=token_text(metadata, "unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spell = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spell]) if prefix else spell
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_by_score(vocab: dict[str, int], scores: list[float], kinds: list[int]) -> list[tuple[str, str]]:
    """Every way to make an ordinary token of two others, the best-scored token first.

    Sentencepiece joins the neighbours whose union scores best; ranking the pairs by that score is the same
    rule.
    """
    normal = {token for token, index in vocab.items() if kinds[index] == _NORMAL}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token in normal:
        index = vocab[token]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                ranked.append((-scores[index], index, cut, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Control tokens are special, user-defined ones are not; both are matched whole, before normalisation."""
    typed = [(token, kind) for token, kind in zip(tokens, kinds, strict=False) if token]
    control = [AddedToken(token, special=True, normalized=False) for token, kind in typed if kind == _CONTROL]
    plain = [AddedToken(token, special=False, normalized=False) for token, kind in typed if kind == _USER_DEFINED]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(plain)


def _set_template(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str], default_bos: bool) -> bool:
    """Has the tokenizer add start and end tokens where the file says so; True when it adds the start."""
    ends = {}
    for name, default in (("bos", default_bos), ("eos", False)):
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if metadata.get(f"tokenizer.ggml.add_{name}_token", default) and index is not None:
            ends[name] = (tokens[index], index)
    if ends:
        pieces = [ends["bos"][0]] if "bos" in ends else []
        pieces += ["$A", *([ends["eos"][0]] if "eos" in ends else [])]
        tokenizer.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=list(ends.values()))
    return "bos" in ends
