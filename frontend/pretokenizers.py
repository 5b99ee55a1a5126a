"""How byte-level BPE vocabularies split text before merging, by the name a GGUF gives (tokenizer.ggml.pre).

A GGUF holds no tokenizer.json, only this name; the splits behind the names are the public ones of each
model's tokenizer.json, listed together in llama.cpp's llama-vocab. Each pattern splits what the patterns
before it left.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

# GPT-2: contractions, then words, numbers and punctuation with one leading space, then runs of white space.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# cl100k and its relatives differ in how many digits stay together.
_CL100K = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# o200k and Tekken split words where the case changes.
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
    rf"|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_CJK_HANGUL, _CJK_KANA = "[一-龥ࠀ-一가-퟿]+", "[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_NO_PUNCTUATION = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True)
class PreTokenizer:
    """Splits in order; whether text is put into NFC first; whether a piece that is itself a token skips the
    merges; whether the start token is added when the file does not say."""

    splits: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    default_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The splits, then every byte spelled as a printable character."""
        steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.splits]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_KINDS: dict[tuple[str, ...], PreTokenizer] = {
    (
        "gpt-2",
        "default",
        "phi-2",
        "gigachat",
        "a.x-4.0",
        "mellum",
        "exaone4",
        "jais",
        "trillion",
    ): PreTokenizer((_GPT2,)),
    ("mpt", "olmo"): PreTokenizer((_GPT2,), nfc=True),
    ("smollm", "starcoder", "refact", "codeshell", "minerva-7b"): PreTokenizer((r"\p{N}", _GPT2)),
    ("command-r", "exaone"): PreTokenizer((r"\p{N}", _GPT2), nfc=True),
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"): PreTokenizer(
        (_CL100K % "{1,3}",), ignore_merges=True, default_bos=True
    ),
    ("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"): PreTokenizer((_CL100K % "{1,3}",)),
    ("qwen2", "deepseek-r1-qwen", "megrez"): PreTokenizer((_CL100K % "",), nfc=True),
    ("stablelm2", "hunyuan"): PreTokenizer((_CL100K % "",)),
    ("tekken",): PreTokenizer((_CASED % ("", "", ""),), ignore_merges=True, default_bos=True),
    ("gpt-4o", "llama4"): PreTokenizer((_CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?", "{1,3}"),)),
    ("deepseek-llm",): PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"\s+$", _CJK_HANGUL, r"\p{N}+")),
    ("deepseek-coder",): PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_HANGUL, r"\p{N}")),
    ("deepseek-v3", "hunyuan-dense"): PreTokenizer((r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK_V3)),
    ("falcon",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    ("poro-chat", "bloom", "gpt3-finnish"): PreTokenizer((_NO_PUNCTUATION,)),
    ("viking",): PreTokenizer((_NO_PUNCTUATION, r"\p{N}")),
}


def _by_name() -> dict[str, PreTokenizer]:
    table: dict[str, PreTokenizer] = {}
    for names, kind in _KINDS.items():
        for name in names:
            if name in table:
                raise ValueError(f"pre-tokenizer {name!r} is listed twice")
            table[name] = kind
    return table


PRE_TOKENIZERS = _by_name()
