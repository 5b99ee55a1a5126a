"""What a shared object says of itself, before the system's loader maps it.

The loader trusts an object: one that is cut short kills the process when a missing page is touched, one for another
instruction set when it runs. Layout: System V ABI, chapter 4 and 5 (ELF-64).
"""

from __future__ import annotations

import platform
import struct

from llmc.errors import UserError

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_IDENT = b"\x7fELF\x02\x01\x01"  # 64 bits, little endian, version 1
_SHARED, _LOAD = 3, 1
_MACHINES = {"x86_64": 62, "aarch64": 183}
_MOST_PROGRAM_HEADERS = 64


def check_object(code: bytes | memoryview) -> None:
    """Raises UserError unless the bytes are a whole shared object for this kind of machine."""
    if len(code) < _HEADER.size or bytes(code[: len(_IDENT)]) != _IDENT:
        raise _refused("it is no ELF object of 64 bits")
    header = _HEADER.unpack_from(code)
    kind, machine, programs, sections = header[1], header[2], header[5], header[6]
    entry, count, section_entry, num_sections = header[9:13]
    if kind != _SHARED:
        raise _refused("it is no shared object")
    if machine != _MACHINES.get(platform.machine()):
        raise _refused(f"it is for another kind of machine than {platform.machine()}")
    if entry != _PROGRAM.size or not 0 < count <= _MOST_PROGRAM_HEADERS or programs + count * entry > len(code):
        raise _refused("its program headers do not lie in it")
    if sections + num_sections * section_entry > len(code):
        raise _refused("its section headers do not lie in it")
    for index in range(count):
        what, _, offset, _, _, size, _, _ = _PROGRAM.unpack_from(code, programs + index * entry)
        if what == _LOAD and offset + size > len(code):
            raise _refused(f"it ends at byte {len(code)}, and a segment of it at {offset + size}")


def _refused(why: str) -> UserError:
    return UserError(f"the plan's machine code is damaged: {why}; rebuild the plan")
