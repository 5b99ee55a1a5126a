"""The tokenizer of a checkpoint, as the plan carries it.

One mechanism adds start and end tokens: the post-processor inside `tokenizer_json` (where a tokenizer.json is
given, its own: add_bos_token in tokenizer_config.json has no say then, as in transformers 5). Encoding with
add_special_tokens=True gives what the model's own tokenizer gives for a plain prompt; a rendered chat
template, which writes those tokens itself, is encoded with add_special_tokens=False.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from llmc.errors import UserError
from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.config import quiet_transformers, read_json
from llmc.frontend.gguf_checkpoint import GgufCheckpoint
from llmc.frontend.gguf_tokenizer import gguf_tokenizer, token_text
from llmc.frontend.safetensors_checkpoint import TEMPLATE_DIRECTORY, SafetensorsCheckpoint

_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# Any of these is enough for transformers to build a tokenizer where there is no tokenizer.json.
_SLOW_FILES = (
    "tokenizer.model",
    "vocab.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.txt",
    "tekken.json",
)
_PIECE_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_PIECE_PACKAGES = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}
"""package -> module; they belong to llmc[build]"""


@dataclass(frozen=True)
class TokenizerAssets:
    """What the runtime needs to turn text into tokens and back.

    `tokenizer_json`: the `tokenizers` JSON, a stable serialisation; truncation and padding are off.
    `add_bos`: whether encoding with special tokens prepends the start token; it says so, the JSON does it.
    `eos_token_ids`: every id that ends a generation, the configured ones first.
    `special_tokens`: what a chat template may name, e.g. {"bos_token": "<s>"}.
    """

    tokenizer_json: bytes
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    special_tokens: Mapping[str, str] = field(default_factory=dict)


def load_tokenizer(ckpt: Checkpoint, tell: Callable[[str], None] = lambda line: None) -> TokenizerAssets | None:
    """The checkpoint's tokenizer, or None when it has none. `tell` gets a line about what is there and not used.

    Raises UserError for one that cannot be used.
    """
    if isinstance(ckpt, GgufCheckpoint):
        return _from_gguf(ckpt)
    if isinstance(ckpt, SafetensorsCheckpoint):
        return _from_directory(ckpt, tell)
    raise TypeError(f"no tokenizer loader for {type(ckpt).__name__}")


def check_vocabulary(assets: TokenizerAssets, rows: int, tell: Callable[[str], None]) -> None:
    """Tells of tokens that the model has no row for, such as an image's in a model of text: prompts with them are
    refused. Raises UserError where ordinary text can have them: such a tokenizer is another model's."""
    tokenizer = Tokenizer.from_str(assets.tokenizer_json.decode())
    added = tokenizer.get_added_tokens_decoder()
    beyond = sorted((index, text) for text, index in tokenizer.get_vocab().items() if index >= rows)
    ordinary = [text for index, text in beyond if index not in added]
    if ordinary:
        raise UserError(
            f"the tokenizer has {len(ordinary)} tokens beyond the model's vocabulary of {rows}, such as "
            f"{ordinary[0][:40]!r}: they do not belong together"
        )
    if beyond:
        shown = ", ".join(text[:40] for _, text in beyond[:3]) + (", …" if len(beyond) > 3 else "")
        tell(f"the model's vocabulary of {rows} has no row for {shown}: prompts with them are refused")


def _from_gguf(ckpt: GgufCheckpoint) -> TokenizerAssets | None:
    built = gguf_tokenizer(ckpt.metadata, ckpt.path)
    if built is None:
        return None
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {role: token_text(ckpt.metadata, name) for role, name in names.items()}
    template = ckpt.metadata.get("tokenizer.chat_template")
    return _assets(ckpt, built[0], {k: v for k, v in special.items() if v is not None}, template, built[1])


def _from_directory(ckpt: SafetensorsCheckpoint, tell: Callable[[str], None]) -> TokenizerAssets | None:
    path = ckpt.path
    settings = _optional(path / "tokenizer_config.json")
    special = _special_tokens({**_optional(path / "special_tokens_map.json"), **settings})
    if (path / "tokenizer.json").is_file():
        tokenizer = read_tokenizer(path / "tokenizer.json")
        _add_configured_tokens(tokenizer, settings, special)
    elif any((path / name).is_file() for name in _SLOW_FILES):
        tokenizer, special = _converted(path)
    else:
        return None
    add_bos = _prepends(tokenizer, special.get("bos_token"))
    return _assets(ckpt, tokenizer, special, _template(path, settings, tell), add_bos)


def read_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer.json. Raises UserError when it is none."""
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises a bare Exception
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} is not a valid tokenizer ({reason}): fetch it again") from error


def _converted(path: Path) -> tuple[Tokenizer, dict[str, str]]:
    """A tokenizer that exists only in an older format, by transformers' converters; no remote code runs."""
    from transformers import AutoTokenizer

    lacking = [name for name, package in _PIECE_PACKAGES.items() if not _is_installed(package)]
    if lacking and any((path / name).is_file() for name in _PIECE_FILES):
        raise UserError(
            f"{path} has no tokenizer.json, and converting its SentencePiece model needs {' and '.join(lacking)}: "
            f"pip install {' '.join(lacking)}"
        )
    try:
        with quiet_transformers():
            loaded = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        tokenizer = Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    except Exception as error:  # converters raise what they like, ImportError for a missing helper included
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path} has no tokenizer.json, and transformers cannot make one of what is there ({reason}): "
            "save the tokenizer again as tokenizer.json"
        ) from error
    return tokenizer, {role: str(text) for role in _ROLES if (text := getattr(loaded, role, None)) is not None}


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _text(value: Any) -> str | None:
    """A token's text: configurations give it bare or as {"content": …}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    found = ((role, _text(settings.get(role))) for role in _ROLES)
    return {role: text for role, text in found if text is not None}


def _add_configured_tokens(tokenizer: Tokenizer, settings: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Tokens that only tokenizer_config.json knows, by their ids, then the named special ones."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    listed = settings.get("added_tokens_decoder") or {}
    if not isinstance(listed, dict) or not all(key.isdecimal() and isinstance(e, dict) for key, e in listed.items()):
        raise UserError("tokenizer_config.json: added_tokens_decoder must give tokens by their numbers: fetch it again")
    for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        text = _text(entry)
        if text and text not in known:
            flags = {k: bool(entry.get(k)) for k in ("single_word", "lstrip", "rstrip", "special")}
            normalized = bool(entry.get("normalized", not flags["special"]))
            tokenizer.add_tokens([AddedToken(text, normalized=normalized, **flags)])
            known.add(text)
    for text in special.values():
        if text not in known:
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _prepends(tokenizer: Tokenizer, bos: str | None) -> bool:
    ids = tokenizer.encode("", add_special_tokens=True).ids
    return bos is not None and bool(ids) and ids[0] == tokenizer.token_to_id(bos)


def _template(path: Path, settings: Mapping[str, Any], tell: Callable[[str], None]) -> str | None:
    """The chat template: its own file comes before tokenizer_config.json. Of several with names, the one called
    default, or the only one; where neither is, none, and `tell` says which there are."""
    template: Any = _template_file(path / "chat_template.jinja")
    if template is None:
        template = _optional(path / "chat_template.json").get("chat_template") or settings.get("chat_template")
    named: dict[str, Any] = {}
    if isinstance(template, list):
        named = {str(item.get("name")): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if isinstance(template, str):
        return template
    for file in sorted((path / TEMPLATE_DIRECTORY).glob("*.jinja")):
        named.setdefault(file.stem, _template_file(file))
    names = ", ".join(sorted(named))[:200]
    if len(named) > 1:
        tell(f"no chat template is used: none of {names} is called default; chats will be refused, completions are raw")
    elif named:
        tell(f"the only chat template, {names}, is used for all chats")
        only = next(iter(named.values()))
        return only if isinstance(only, str) else None
    return None


def _template_file(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise UserError(f"{path} is not UTF-8 text: save it again") from error


def _assets(
    ckpt: Checkpoint, tokenizer: Tokenizer, special: Mapping[str, str], template: str | None, add_bos: bool
) -> TokenizerAssets:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TokenizerAssets(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=template,
        bos_token=special.get("bos_token"),
        eos_token=special.get("eos_token"),
        pad_token=special.get("pad_token"),
        unk_token=special.get("unk_token"),
        eos_token_ids=_stop_ids(ckpt, tokenizer, special.get("eos_token")),
        add_bos=add_bos,
        special_tokens=dict(sorted(special.items())),
    )


def _stop_ids(ckpt: Checkpoint, tokenizer: Tokenizer, eos: str | None) -> tuple[int, ...]:
    """generation_config's ids (else config's), then the tokenizer's own end token."""
    stated = ckpt.generation_config.get("eos_token_id", ckpt.config.get("eos_token_id"))
    ids = [index for index in (stated if isinstance(stated, list) else [stated]) if isinstance(index, int)]
    own = tokenizer.token_to_id(eos) if eos is not None else None
    return tuple(dict.fromkeys([*ids, *([own] if own is not None else [])]))
