"""The header of a safetensors file, checked against the file's size before anything of a tensor is allocated.

Format: 8 bytes little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, then the
data, which the tensors cover without hole or overlap (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from llmc.errors import UserError
from llmc.frontend.rawfile import RawFile

_MAX_HEADER = 100_000_000  # the limit of the safetensors library
_MAX_RANK = 8
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64, "BOOL": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its stored type, its shape, and where its bytes begin and end in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(file: RawFile) -> dict[str, Stored]:
    """Every tensor of the file, by name. Raises UserError when header and file disagree in any way."""
    where = str(file.path)
    if file.size < 8:
        raise UserError(f"{where} is truncated: {file.size} bytes are no safetensors file; fetch it again")
    length = int.from_bytes(file.read(0, 8).tobytes(), "little")
    if length > _MAX_HEADER:
        raise UserError(f"{where} is not a safetensors file: its header claims {length} bytes")
    if 8 + length > file.size:
        raise UserError(f"{where} is truncated inside its header ({file.size} of {8 + length} bytes): fetch it again")
    entries = _parse(file.read(8, length).tobytes(), where)
    base = 8 + length
    tensors = {name: _entry(name, value, base, file) for name, value in entries if name != "__metadata__"}
    if len(tensors) != sum(name != "__metadata__" for name, _ in entries):
        raise UserError(f"{where} lists a tensor twice: {_first_duplicate(entries)}; export the checkpoint again")
    _check_cover(tensors, base, file)
    return tensors


def _parse(text: bytes, where: str) -> list[tuple[str, Any]]:
    """The header's top-level pairs, duplicates included (a dict would hide them)."""
    pairs: list[tuple[str, Any]] = []

    def keep(found: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal pairs
        pairs = found  # objects close inside out, so the outermost comes last
        return dict(found)

    try:
        value = json.loads(text, object_pairs_hook=keep)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} has a damaged safetensors header ({error}): fetch it again") from error
    if not isinstance(value, dict):
        raise UserError(f"{where} has a damaged safetensors header (not an object): fetch it again")
    return pairs


def _entry(name: str, value: Any, base: int, file: RawFile) -> Stored:
    """One entry, its shape checked against its bytes and its bytes against the file."""
    where = f"tensor {name[:200]} in {file.path}"
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise UserError(f"{where} has the unknown type {str(dtype)[:50]!r}: convert it to F32, F16 or BF16")
    if not _naturals(shape) or len(shape) > _MAX_RANK:
        raise UserError(f"{where} has a malformed shape: the header is damaged; fetch the file again")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise UserError(f"{where} has malformed data_offsets: the header is damaged; fetch the file again")
    begin, end = base + offsets[0], base + offsets[1]
    if end > file.size:
        raise UserError(f"{where} ends at byte {end} but the file has {file.size}: it is truncated; fetch it again")
    bits = math.prod(shape) * _BITS[dtype]
    if bits != (end - begin) * 8:
        raise UserError(
            f"{where}: shape {list(shape)} of {dtype} needs {bits / 8:.0f} bytes, but the header gives "
            f"{end - begin}: the header is damaged; fetch the file again"
        )
    return Stored(dtype, tuple(shape), begin, end)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_cover(tensors: dict[str, Stored], base: int, file: RawFile) -> None:
    """The format's own rule: in order of their offsets the tensors fill the data exactly."""
    expected = base
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if stored.begin != expected:
            relation = "overlaps another" if stored.begin < expected else "leaves a hole before it"
            raise UserError(f"tensor {name} in {file.path} {relation}: the header is damaged; fetch the file again")
        expected = stored.end
    if expected != file.size:
        raise UserError(
            f"{file.path} has {file.size - expected} bytes that belong to no tensor: it is damaged; fetch it again"
        )


def _first_duplicate(entries: list[tuple[str, Any]]) -> str:
    names = [name for name, _ in entries]
    return next(name for position, name in enumerate(names) if name in names[:position])
