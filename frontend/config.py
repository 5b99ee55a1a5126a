"""The model's configuration: config.json as transformers understands it, whichever version wrote it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmc.errors import UserError
from llmc.frontend.config_check import check_config

# Where a configuration lay, and who wrote it, must not change the plan.
_VOLATILE = ("transformers_version", "_name_or_path", "_model_name_or_path", "_commit_hash")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises UserError when it cannot be read or is something else."""
    try:
        value = json.loads(path.read_bytes(), object_hook=_tagged_float)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}): fetch the file again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def _tagged_float(value: dict[str, Any]) -> Any:
    """{"__float__": "Infinity"}, as transformers writes what JSON has no number for, as the float."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def build_config(raw: dict[str, Any], where: str) -> Any:
    """The transformers PretrainedConfig for the contents of a config.json; remote code is never run.

    `where` names the file in messages. Raises UserError for a model type that transformers does not know and for
    values that the model's configuration class refuses.
    """
    from transformers import CONFIG_MAPPING

    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(f"{where} has no model_type: it is not the configuration of a Hugging Face model")
    if model_type not in CONFIG_MAPPING:
        if raw.get("auto_map"):
            raise UserError(
                f"{where}: model_type {model_type!r} needs code that came with the checkpoint (auto_map), "
                "and remote code is never run; use a model that transformers itself implements"
            )
        raise UserError(
            f"{where}: model_type {model_type!r} is unknown to the installed transformers: "
            "upgrade transformers, or check the name"
        )
    try:
        config = CONFIG_MAPPING[model_type].from_dict(raw)
    except Exception as error:  # every class validates in its own way, and raises what it likes
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{where} is not a valid {model_type} configuration: {reason[:300]}") from error
    check_config(config, where)
    return config


def normalise_config(config: Any) -> dict[str, Any]:
    """A configuration as sorted JSON values, the same whichever transformers version wrote config.json.

    transformers 5 calls them `rope_parameters` and `dtype`, 4 called them `rope_theta`, `rope_scaling` and
    `torch_dtype`; the configuration class reads both and writes the first.
    """
    values = json.loads(json.dumps(config.to_dict(), sort_keys=True, default=str))
    return {name: value for name, value in values.items() if name not in _VOLATILE}


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences transformers' warnings about guesses that are checked here anyway."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
