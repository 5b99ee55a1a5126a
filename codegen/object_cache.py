"""Objects that a compiler made, kept by all that can change them: one file per key, checked when it is read."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from llmc.cache import cache_dir

_DIGEST_BYTES = 32


def _path(key: str) -> Path:
    return cache_dir() / "objects" / f"{key}.bin"


def load(key: str) -> bytes | None:
    """The object of a key; None where there is none, or where what is there is damaged or cannot be read."""
    try:
        entry = _path(key).read_bytes()
    except OSError:
        return None
    digest, data = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
    return data if hashlib.sha256(data).digest() == digest else None


def store(key: str, data: bytes) -> None:
    """Keeps an object; readers see all of it or nothing. Raises OSError where the cache cannot be written."""
    path = _path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{key[:16]}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(data).digest() + data)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
