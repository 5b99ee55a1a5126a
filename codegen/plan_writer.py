"""Writes a plan as a stream: segments as they come, the manifest last, then the header, then the final name.

Everything goes to a temporary file beside the target. Only a complete, synced file is renamed to the final name, so a
full disk or a killed build leaves no plan there and an older plan untouched (unfinished.py has the temporary file).
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from llmc.codegen.unfinished import open_unfinished
from llmc.errors import UserError
from llmc.runtime.plan import ABI_VERSION, CHUNK, HEADER, MAGIC, PAGE, Segment, canonical_json


class PlanWriter:
    """Use as a context manager: leaving it without `finish` removes the temporary file.

    Raises UserError when the directory cannot be written or the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.segments: list[Segment] = []
        self._end = PAGE
        try:
            fd, self._temporary = open_unfinished(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from error
        self._file = os.fdopen(fd, "r+b")

    def __enter__(self) -> PlanWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError as full:  # what is still buffered does not fit either
            error = error or full
        finally:
            if os.path.exists(self._temporary):
                os.unlink(self._temporary)
        if isinstance(error, OSError):
            raise UserError(f"{self.path}: cannot be written: {error.strerror or error}") from error

    def add(self, name: str, data: bytes) -> Segment:
        """Appends a segment."""
        return self.add_blocks(name, len(data), [(0, data)])

    def add_blocks(
        self,
        name: str,
        size: int,
        blocks: Iterable[tuple[int, bytes | memoryview]],
        progress: Callable[[int], None] = lambda done: None,
    ) -> Segment:
        """Appends a segment of `size` bytes from blocks (offset, bytes) in any order; what none covers is zero.

        progress is called with the bytes of each block as it is written.
        """
        if any(s.name == name for s in self.segments):
            raise ValueError(f"segment {name} is there already")
        start = self._end
        padded = -(-size // PAGE) * PAGE
        self._file.truncate(start + padded)
        for offset, data in blocks:
            if offset < 0 or offset + len(data) > size:
                raise ValueError(f"segment {name}: a block outside the segment")
            self._file.seek(start + offset)
            self._file.write(data)
            progress(len(data))
        self._file.flush()
        segment = Segment(name, start, size, self._digests(start, padded))
        self.segments.append(segment)
        self._end = start + padded
        return segment

    def _digests(self, start: int, size: int) -> tuple[str, ...]:
        digests = []
        self._file.seek(start)
        for at in range(0, size, CHUNK):
            digests.append(hashlib.sha256(self._file.read(min(CHUNK, size - at))).hexdigest())
        return tuple(digests)

    def map_segment(self, segment: Segment) -> memoryview:
        """A written segment, mapped read-only: the accuracy report runs on it before the plan is finished."""
        mapped = mmap.mmap(self._file.fileno(), segment.offset + segment.padded_size, prot=mmap.PROT_READ)
        return memoryview(mapped)[segment.offset : segment.offset + segment.size]

    def finish(self, manifest: dict[str, Any]) -> str:
        """Adds the segment table to the manifest, writes it and the header, and gives the file its name.

        Returns the engine id, the sha256 of the manifest in hex.
        """
        table = [{"name": s.name, "offset": s.offset, "size": s.size, "sha256": list(s.chunks)} for s in self.segments]
        text = canonical_json(manifest | {"abi": ABI_VERSION, "segments": table})
        digest = hashlib.sha256(text).digest()
        self._file.seek(self._end)
        self._file.write(text)
        self._file.seek(0)
        self._file.write(HEADER.pack(MAGIC, ABI_VERSION, 0, self._end, len(text), digest))
        self._file.flush()
        os.fsync(self._file.fileno())
        os.chmod(self._temporary, 0o666 & ~_umask())
        os.replace(self._temporary, self.path)
        directory = os.open(self.path.parent or ".", os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return digest.hex()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
