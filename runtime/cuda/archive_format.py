"""The frame of an archive of GPU code, segment `code/cuda:sm_…` of a plan, for compiler and loader.

Layout: u64 little-endian length of the JSON, the JSON (`runtime.plan.canonical_json`), zeros up to a multiple of
ALIGNMENT from the start of the segment, the kernels' binaries one after another. docs/gpu.md describes the JSON;
`codegen/triton` makes it, `archive.py` checks all of it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from llmc.errors import UserError
from llmc.runtime.plan import canonical_json

VERSION = 3
"""Of the archive, its key "abi": changed with the meaning of anything in it."""
ALIGNMENT = 16
"""Of the binaries in the segment, in bytes."""
_LENGTH = struct.Struct("<Q")


def aligned(size: int) -> int:
    """The least multiple of ALIGNMENT that is at least `size`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def pack_archive(header: Mapping[str, Any], binaries: bytes) -> bytes:
    """The segment of a header, which gets its version here, and of the binaries that its offsets name."""
    text = canonical_json({**header, "abi": VERSION})
    head = _LENGTH.pack(len(text)) + text
    return head.ljust(aligned(len(head)), b"\0") + binaries


def unpack_archive(segment: memoryview) -> tuple[dict[str, Any], memoryview]:
    """Header and binaries of a segment. Call it, and read the header, in `archive_fields`."""
    (length,) = _LENGTH.unpack_from(segment)
    start = aligned(_LENGTH.size + length)
    if start > len(segment):
        raise ValueError("it is truncated")
    header: dict[str, Any] = json.loads(bytes(segment[_LENGTH.size : _LENGTH.size + length]))
    if header["abi"] != VERSION:
        raise ValueError(f"ABI version {header['abi']}, this llmc runs {VERSION}")
    return header, segment[start:]


def read_header(segment: memoryview) -> dict[str, Any]:
    """The JSON of an archive. Raises UserError for what is no archive of this llmc."""
    with archive_fields():
        return unpack_archive(segment)[0]


@contextmanager
def archive_fields() -> Iterator[None]:
    """For whoever reads an archive: what is missing or of another form becomes a UserError. The segment's digest was
    verified before, so that what is refused was written by another llmc."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, struct.error, RecursionError) as error:
        detail = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(f"the plan's GPU code is damaged or of another llmc ({detail}); rebuild the plan") from error
