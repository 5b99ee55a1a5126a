"""Small files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from llmc.errors import UserError


def check_output(path: Path, flag: str) -> None:
    """Raises UserError when no file can be made at `path`: better before a long run than after it."""
    if path.is_dir():
        raise UserError(f"{flag} {path}: is a directory; name a file")
    if not path.absolute().parent.is_dir():
        raise UserError(f"{flag} {path}: there is no directory {path.absolute().parent}")


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
