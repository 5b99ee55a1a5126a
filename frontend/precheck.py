"""What can be told of a model on this machine before torch is imported, which takes seconds: a bad one is refused
first. Whatever passes is opened, with all its checks, by `open.py`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

from llmc.errors import UserError
from llmc.frontend.config import read_json
from llmc.frontend.config_check import check_config
from llmc.frontend.gguf_header import read_gguf_header
from llmc.frontend.rawfile import RawFile
from llmc.frontend.safetensors_checkpoint import find_weights
from llmc.frontend.safetensors_header import read_header
from llmc.frontend.source import find_local
from llmc.frontend.tokenizer import read_tokenizer


def check_local(model: str) -> None:
    """Raises UserError for a model that is not there, and for one on this machine whose configuration, headers or
    tokenizer are broken. Says nothing of one that has to be fetched."""
    source = find_local(model)
    if source is None:
        return
    if source.kind == "gguf":
        with closing(RawFile(source.path)) as file:
            read_gguf_header(file)
    elif (source.path / "config.json").is_file():
        _check_directory(source.path)


def _check_directory(path: Path) -> None:
    where = path / "config.json"
    raw = read_json(where)
    if not isinstance(raw.get("model_type"), str):
        raise UserError(f"{where} has no model_type: it is not the configuration of a Hugging Face model")
    try:
        check_config(SimpleNamespace(**(raw | {"to_dict": lambda: raw})), str(where))
    except RecursionError as error:
        raise UserError(f"{where} is nested too deeply: fetch the file again") from error
    for shard in find_weights(path):
        with closing(RawFile(path / shard)) as file:
            read_header(file)
    if (path / "tokenizer.json").is_file():
        read_tokenizer(path / "tokenizer.json")
