"""What a kernel's machine code says of itself, before the driver gets it.

A cubin is an ELF file of 64 bits for machine EM_CUDA. The driver parses it in this process and trusts it: one that is
cut short or for something else is told here, in words. Layout: System V ABI, chapter 4 (ELF-64); where the compute
capability stands: the files of the ptxas of CUDA 12 (ABI 7) and 13 (ABI 8), as `cuobjdump -elf` reads them.
"""

from __future__ import annotations

import struct

from llmc.errors import UserError
from llmc.runtime.cuda.targets import runs_on

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_PROGRAM_SIZE = 56
_IDENT = b"\x7fELF\x02\x01\x01"  # 64 bits, little endian, version 1
_CAPABILITY_AT = {b"\x33\x07": 0, b"\x41\x08": 8}
"""By the OS ABI and its version in e_ident: the first of the eight bits of e_flags that hold the capability."""
_EXECUTABLE, _EM_CUDA = 2, 190
_PROGBITS, _NOBITS = 1, 8
_MOST_SECTIONS = 4096


def check_cubin(code: memoryview, name: str, capability: int) -> None:
    """Raises UserError unless the bytes are a whole cubin with the kernel `name`, for a GPU of that capability (90 for
    9.0)."""
    if len(code) < _HEADER.size or bytes(code[: len(_IDENT)]) != _IDENT:
        raise _refused(name, "it is no ELF file of 64 bits")
    _, kind, machine, _, _, programs, sections, flags, _, entry, count, section_entry, num_sections, names = (
        _HEADER.unpack_from(code)
    )
    at = _CAPABILITY_AT.get(bytes(code[7:9]))
    if kind != _EXECUTABLE or machine != _EM_CUDA or at is None:
        raise _refused(name, "it is no cubin")
    found = flags >> at & 0xFF
    if not runs_on(found, capability):
        raise _refused(name, f"it is code for sm_{found}, this GPU is sm_{capability}")
    if count and (entry != _PROGRAM_SIZE or programs + count * entry > len(code)):
        raise _refused(name, "its program headers do not lie in it")
    fits = 0 < num_sections <= _MOST_SECTIONS and sections + num_sections * _SECTION.size <= len(code)
    if not fits or section_entry != _SECTION.size or names >= num_sections:
        raise _refused(name, "its section headers do not lie in it")
    _check_sections(code, name, [_SECTION.unpack_from(code, sections + i * _SECTION.size) for i in range(num_sections)],
                    names)  # fmt: skip


def _check_sections(code: memoryview, name: str, headers: list[tuple[int, ...]], names: int) -> None:
    """All contents lie in the file, and one section is the kernel's machine code."""
    for header in headers:
        if header[1] != _NOBITS and header[4] + header[5] > len(code):
            raise _refused(name, f"it ends at byte {len(code)}, and a section of it at {header[4] + header[5]}")
    table = bytes(code[headers[names][4] :][: headers[names][5]])
    wanted = b".text." + name.encode() + b"\0"
    if not any(h[1] == _PROGBITS and h[5] and table.startswith(wanted, h[0]) for h in headers):
        raise _refused(name, "it has no kernel of that name")


def _refused(name: str, why: str) -> UserError:
    return UserError(f"the plan's GPU code for the kernel {name} is damaged: {why}; rebuild the plan")
