"""The header of a GGUF file (versions 2 and 3): metadata and tensor table, checked against the file's size.

Every count, length, extent and offset is held against the bytes that are really there before anything of that
size is allocated. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from llmc.errors import UserError
from llmc.frontend.rawfile import RawFile

_MAX_RANK = 4  # GGML_MAX_DIMS
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# The fewest bytes a metadata pair (key length, key, type, value) and a tensor entry can take.
_MIN_PAIR, _MIN_TENSOR = 8 + 4 + 1, 8 + 4 + 4 + 8


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in the file; `shape` in row-major order (the file lists the fastest dimension first)."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    begin: int
    end: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row along the first dimension (of all of a tensor with fewer than two dimensions)."""
        block, size = GGML_QUANT_SIZES[self.kind]
        extents = self.shape[1:] if len(self.shape) > 1 else self.shape
        return math.prod(extents) // block * int(size)


@dataclass(frozen=True)
class GgufHeader:
    """`pairs` holds each metadata pair as raw bytes, so that a part of the header can be written again."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    pairs: dict[str, bytes]


def read_gguf_header(file: RawFile) -> GgufHeader:
    """The whole header. Raises UserError naming what is malformed, truncated or unsupported."""
    if file.size < 24 or file.read(0, 4).tobytes() != b"GGUF":
        raise UserError(f"{file.path} is not a GGUF file, or is cut off before its header")
    with file.path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _Reader(file, data).header()
        except struct.error as error:
            raise UserError(f"{file.path} is truncated inside its header: fetch the file again") from error
        except UnicodeDecodeError as error:
            raise UserError(f"{file.path} has text that is not UTF-8 in its header: the file is damaged") from error


class _Reader:
    """A cursor over the mapped file; only the pages of the header are ever touched."""

    def __init__(self, file: RawFile, data: mmap.mmap) -> None:
        self.path, self.size, self.data, self.at = file.path, file.size, data, 0

    def header(self) -> GgufHeader:
        version, tensor_count, pair_count = struct.unpack_from("<IQQ", self.data, 4)
        if version not in (2, 3):
            hint = "big-endian" if version in (2 << 24, 3 << 24) else f"version {version}"
            raise UserError(f"{self.path} is a {hint} GGUF: only little-endian versions 2 and 3 are supported")
        self.at = 24
        self.claim("metadata pairs", pair_count, _MIN_PAIR)
        metadata: dict[str, Any] = {}
        pairs: dict[str, bytes] = {}
        for _ in range(pair_count):
            begin = self.at
            key = self.string()
            if key in metadata:
                raise UserError(f"{self.path} gives the metadata key {key[:100]!r} twice: the file is damaged")
            metadata[key] = self.value(self.scalar("I"), key)
            pairs[key] = self.data[begin : self.at]
        self.claim("tensors", tensor_count, _MIN_TENSOR)
        entries = [self.tensor_entry() for _ in range(tensor_count)]
        return GgufHeader(metadata, self.place(entries, metadata), pairs)

    def claim(self, what: str, count: int, least: int) -> None:
        """Refuses a count that could not fit into the rest of the file."""
        if count * least > self.size - self.at:
            raise UserError(
                f"{self.path} claims {count} {what}, more than its {self.size} bytes can hold: "
                "the file is damaged or truncated; fetch it again"
            )

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self.data, self.at)
        begin = self.at + 8
        if length > self.size - begin:
            raise UserError(f"{self.path} claims a text of {length} bytes, more than the file has: it is truncated")
        self.at = begin + length
        return self.data[begin : self.at].decode("utf-8")

    def value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(key)
        raise UserError(f"{self.path}: metadata {key[:100]!r} has the unknown type {kind}; the file is damaged")

    def array(self, key: str) -> list[Any]:
        kind, count = struct.unpack_from("<IQ", self.data, self.at)
        self.at += 12
        if kind == _STRING:
            self.claim(f"texts in {key[:100]!r}", count, 8)
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            raise UserError(f"{self.path}: metadata {key[:100]!r} is an array of the unsupported type {kind}")
        code = _SCALARS[kind]
        width = struct.calcsize("<" + code)
        self.claim(f"values in {key[:100]!r}", count, width)
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += count * width
        return list(values)

    def tensor_entry(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        """(name, row-major shape, type, offset within the data)."""
        name = self.string()
        rank = self.scalar("I")
        if rank > _MAX_RANK:
            raise UserError(f"tensor {name[:200]} in {self.path} claims {rank} dimensions: the file is damaged")
        extents = struct.unpack_from(f"<{rank}Q", self.data, self.at)
        self.at += 8 * rank
        code, offset = self.scalar("I"), self.scalar("Q")
        try:
            kind = GGMLQuantizationType(code)
        except ValueError as error:
            raise UserError(
                f"tensor {name[:200]} in {self.path} has the unknown GGML type {code}: upgrade the gguf package"
            ) from error
        return name, tuple(reversed(extents)), kind, offset

    def place(
        self, entries: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]], metadata: dict[str, Any]
    ) -> dict[str, GgufTensor]:
        """Where each tensor's bytes lie, checked against the file and each other."""
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise UserError(f"{self.path} asks for an alignment of {alignment!r}: the file is damaged")
        base = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            block, size = GGML_QUANT_SIZES[kind]
            if shape and shape[-1] % block:
                raise UserError(f"tensor {name} in {self.path}: rows of {shape[-1]} are no whole {kind.name} blocks")
            begin = base + offset
            end = begin + math.prod(shape) // block * int(size)
            if end > self.size:
                raise UserError(
                    f"tensor {name} {list(shape)} in {self.path} ends at byte {end}, but the file has "
                    f"{self.size}: it is truncated; fetch it again"
                )
            if offset % alignment or name in tensors:
                problem = "is listed twice" if name in tensors else "is misaligned"
                raise UserError(f"tensor {name} in {self.path} {problem}: the file is damaged")
            tensors[name] = GgufTensor(name, shape, kind, begin, end)
        self.refuse_overlap(tensors)
        return tensors

    def refuse_overlap(self, tensors: dict[str, GgufTensor]) -> None:
        previous = 0
        for tensor in sorted(tensors.values(), key=lambda t: (t.begin, t.end)):
            if tensor.begin < previous:
                raise UserError(f"tensor {tensor.name} in {self.path} overlaps another: the file is damaged")
            previous = tensor.end
