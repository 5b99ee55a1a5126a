"""What a kernel takes of the GPU: registers and spills from ptxas's own report, tensor-core opcodes from the code.

Only ptxas tells spills from other local memory (arrays, the slow paths of libdevice): both become the same STL and LDL
instructions, and cuobjdump counts both as stack.
"""

from __future__ import annotations

import importlib.util
import re
import struct
import subprocess
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from llmc.scratch import scratch_directory

_REGISTERS = re.compile(r"\bUsed (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@!?\w+\s+)?([A-Z0-9_]+)", re.MULTILINE)
_TENSOR_OPCODE = re.compile(r"[A-Z]+MMA")  # HMMA, IMMA, HGMMA, IGMMA, UTCHMMA, …
_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_WORD = 16  # bytes of an instruction, since sm_70


def ptxas_report(log: str) -> tuple[int, int]:
    """Registers per thread of a kernel, and the bytes per thread that it spills: stores plus loads, as `ptxas -v`
    counts them in the code. Raises RuntimeError for a log that lacks either."""
    registers, spills = _REGISTERS.findall(log), _SPILLS.findall(log)
    if not registers or not spills:
        raise RuntimeError(f"no report of ptxas in its log: {log[:500]!r}")
    return max(map(int, registers)), sum(int(stores) + int(loads) for stores, loads in spills)


def machine_code(cubin: bytes) -> bytes:
    """The instructions of a cubin: its .text sections, one after the other."""
    return b"".join(data for name, data in _sections(cubin) if name.startswith(b".text"))


def _sections(elf: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Name and content of every section of a 64-bit little-endian ELF file."""
    (start,) = struct.unpack_from("<Q", elf, 40)
    count, names_index = struct.unpack_from("<HH", elf, 60)
    headers = [_SECTION.unpack_from(elf, start + i * _SECTION.size) for i in range(count)]
    names = headers[names_index][4]
    for name, kind, _, _, offset, size, *_ in headers:
        is_code = kind == 1  # SHT_PROGBITS; others may hold no bytes in the file
        at = names + name
        yield elf[at : elf.index(b"\0", at)], elf[offset : offset + size] if is_code else b""


def tensor_opcodes(cubins: Sequence[bytes], capability: int) -> list[tuple[str, ...]]:
    """The tensor-core opcodes of every cubin (without their suffixes), sorted.

    nvdisasm takes a third of a second to start, as long as ptxas takes for a kernel: it runs once for all of them, over
    their instructions without the ELF files around.
    """
    codes = [machine_code(cubin) for cubin in cubins]
    ends = list(accumulate(map(len, codes)))
    found: list[set[str]] = [set() for _ in cubins]
    for address, opcode in _INSTRUCTION.findall(_disassemble(b"".join(codes), capability)):
        if _TENSOR_OPCODE.fullmatch(opcode):
            found[bisect_right(ends, int(address, 16))].add(opcode)
    return [tuple(sorted(opcodes)) for opcodes in found]


def _disassemble(code: bytes, capability: int) -> str:
    if len(code) % _WORD:
        raise RuntimeError(f"{len(code)} bytes of machine code: no multiple of an instruction's {_WORD}")
    if not code:
        return ""
    machine = f"SM{capability}" + ("a" if capability >= 90 else "")  # as Triton calls ptxas
    with scratch_directory() as directory:
        (directory / "code").write_bytes(code)
        done = subprocess.run(
            [nvdisasm(), "-ndf", "-b", machine, directory / "code"], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"nvdisasm: {done.stderr[-500:]}")
    return done.stdout


def nvdisasm() -> Path:
    """The disassembler that comes with Triton, found without importing it."""
    spec = importlib.util.find_spec("triton")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("nvdisasm comes with triton, which is not installed")
    return Path(spec.submodule_search_locations[0]) / "backends" / "nvidia" / "bin" / "nvdisasm"
