"""The plan file: format, opening and verification.

Layout (little endian):
  0     8 bytes  magic "LLMCPLAN"
  8     u32      ABI version
  12    u32      0
  16    u64      offset of the manifest
  24    u64      size of the manifest
  32    32 bytes sha256 of the manifest; in hex it is the engine id
  64    zeros up to 4096
  4096  segments, each at a multiple of 4096 and padded to one with zeros (the padding is part of the digest)
  …     the manifest, canonical JSON, up to the end of the file

The manifest stands last so that a plan is written as a stream. It names every segment with its offset, size and the
sha256 of each 16 MiB of it; digests in chunks let several threads verify one large segment. Every byte of the file
is covered: by the header's fixed values, a segment digest, or the manifest's. No pickle, no paths, no timestamps.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.errors import UserError

MAGIC = b"LLMCPLAN"
ABI_VERSION = 5
"""Equal to kAbiVersion in kernels/cpu/abi.h."""
PAGE = 4096
CHUNK = 16 << 20
HEADER = struct.Struct("<8sIIQQ32s")
_MAX_MANIFEST = 64 << 20


@dataclass(frozen=True)
class Segment:
    """A named byte range. `size` is what was written; the digests cover it padded to a multiple of 4096."""

    name: str
    offset: int
    size: int
    chunks: tuple[str, ...]

    @property
    def padded_size(self) -> int:
        return -(-self.size // PAGE) * PAGE


def canonical_json(value: Any) -> bytes:
    """The one way a manifest is written: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


class Plan:
    """An open plan. Read-only; weights are mapped, so that processes on one machine share them."""

    def __init__(self, path: Path, data: mmap.mmap, manifest: dict[str, Any], engine_id: str) -> None:
        self.path, self._data, self.manifest, self.engine_id = path, data, manifest, engine_id
        self.segments = {s.name: s for s in _segments(path, manifest, HEADER.unpack_from(data)[3])}

    @classmethod
    def open(cls, path: str | os.PathLike[str], verify: bool = True) -> Plan:
        """Opens a plan; with `verify` (always, before anything of it is executed) checks every digest.

        Raises UserError for a file that is missing, not a plan, of another ABI version, truncated or altered.
        """
        path = Path(path)
        data = _map(path)
        if len(data) < PAGE or data[:8] != MAGIC:
            raise UserError(f"{path}: not an llmc plan (build one with llmc build)")
        _, abi, zero, offset, size, digest = HEADER.unpack_from(data)
        if abi != ABI_VERSION:
            raise UserError(
                f"{path}: plan of ABI version {abi}, this llmc runs {ABI_VERSION}; rebuild it with llmc build"
            )
        if zero or any(data[HEADER.size : PAGE]):
            raise UserError(f"{path}: the header was altered; rebuild the plan")
        if size > _MAX_MANIFEST or offset < PAGE or offset + size > len(data):
            raise UserError(
                f"{path}: truncated: the manifest should end at byte {offset + size}, the file has {len(data)}"
            )
        if offset + size != len(data):
            raise UserError(f"{path}: {len(data) - offset - size} bytes too long; rebuild the plan")
        text = data[offset : offset + size]
        if hashlib.sha256(text).digest() != digest:
            raise UserError(f"{path}: the manifest was altered (sha256 does not match); rebuild the plan")
        try:
            manifest = json.loads(text)
            if manifest["abi"] != abi:
                raise UserError(f"{path}: header and manifest name different ABI versions; rebuild the plan")
            plan = cls(path, data, manifest, digest.hex())
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise UserError(f"{path}: damaged manifest: {error}; rebuild the plan") from error
        if verify:
            plan.verify()
        return plan

    def verify(self) -> None:
        """Checks the digest of every segment, on several threads. Raises UserError naming the first altered one."""
        tasks = [(s, i) for s in self.segments.values() for i in range(len(s.chunks))]
        view = memoryview(self._data)

        def altered(task: tuple[Segment, int]) -> str | None:
            segment, index = task
            start = segment.offset + index * CHUNK
            stop = min(start + CHUNK, segment.offset + segment.padded_size)
            good = hashlib.sha256(view[start:stop]).hexdigest() == segment.chunks[index]
            return None if good else segment.name

        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            bad = next((name for name in pool.map(altered, tasks) if name is not None), None)
        view.release()
        if bad is not None:
            raise UserError(f"{self.path}: segment {bad} was altered (sha256 does not match); rebuild the plan")

    def segment(self, name: str) -> memoryview:
        """The bytes of a segment, without a copy."""
        found = self.segments[name]
        return memoryview(self._data)[found.offset : found.offset + found.size]

    def text(self, name: str) -> str | None:
        """A segment as UTF-8 text, or None when the plan has none of that name."""
        return str(self.segment(name), "utf-8") if name in self.segments else None


@contextmanager
def manifest_fields(path: str | os.PathLike[str]) -> Iterator[None]:
    """Around code that reads a manifest: a field that is missing or of another type means another llmc wrote it."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: the manifest lacks {error}: another llmc wrote it; rebuild the plan") from error


def _map(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise UserError(f"{path}: empty file, not an llmc plan")
            return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file (build it with llmc build MODEL -o {path})") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _segments(path: Path, manifest: dict[str, Any], end: int) -> Iterable[Segment]:
    """The segments, contiguous from 4096 on, so that no byte stands outside all of them."""
    at, names = PAGE, set()
    for entry in manifest["segments"]:
        segment = Segment(str(entry["name"]), int(entry["offset"]), int(entry["size"]), tuple(entry["sha256"]))
        wanted = -(-segment.padded_size // CHUNK)
        fits = segment.size >= 0 and segment.offset == at and at + segment.padded_size <= end
        if not fits or len(segment.chunks) != wanted or segment.name in names:
            raise UserError(f"{path}: segment {segment.name} does not lie where the manifest says; rebuild the plan")
        names.add(segment.name)
        at += segment.padded_size
        yield segment
    if at != end:
        raise UserError(f"{path}: bytes that no segment covers; rebuild the plan")
