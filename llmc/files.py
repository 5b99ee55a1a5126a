"""Files that appear whole or not at all, and never in the place of what they are made from."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from llmc.errors import UserError, shortened


def check_output(path: Path, flag: str, inputs: Iterable[Path] = ()) -> Path:
    """Where a file that is asked for by `flag` really goes: `path`, or what it links to. Raises UserError when no file
    can be made there, or must not: better before a long run than after it.

    inputs: files and directories that the run reads. The output may be none of them, by another name or link neither,
    and lie in none of the directories.
    """
    try:
        target = path.resolve() if path.is_symlink() else path
        _check_place(path, target, flag)
        for source in inputs:
            _check_input(path, target, flag, source)
    except (OSError, RuntimeError) as error:  # a name that is too long, a loop of links
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"{flag} {shortened(path)}: {reason}; give another name") from error
    return target


def _check_place(path: Path, target: Path, flag: str) -> None:
    if str(path) == "-":
        raise UserError(f"{flag} -: a file is written under a name of its own, not to standard output; give a name")
    if target.is_dir():
        raise UserError(f"{flag} {path}: is a directory; give a file name such as {path}/engine.plan")
    if target.exists() and not target.is_file():
        raise UserError(f"{flag} {path}: is not an ordinary file; give another name")
    parent = target.absolute().parent
    if not parent.is_dir():
        raise UserError(f"{flag} {shortened(path)}: there is no directory {shortened(parent)}; make it first")


def _check_input(path: Path, target: Path, flag: str, source: Path) -> None:
    if source.is_dir():
        if source.resolve() in target.resolve().parents:
            raise UserError(f"{flag} {path}: lies in {source}, which is read; give a name elsewhere")
        files: Iterable[Path] = (file for file in source.iterdir() if file.is_file())
    else:
        files = (source,) if source.exists() else ()
    if target.exists() and any(target.samefile(file) for file in files):
        raise UserError(f"{flag} {path}: is a file that is read, and would be lost; give another name")


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file under a temporary name beside its own, syncs it and renames it. Raises UserError when it cannot."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error
