"""Calls the functions of a shared object for another CPU with numpy arrays, in a process that emulates it.

Code for aarch64 runs under qemu-user (cross_guest.c), code for x86-64 with more instructions than this CPU may have in
Bochs (bochs_guest.py).

The process shares a file with this one. For a call, the arrays that its arguments point into are copied there, the
pointers translated, and the arrays copied back afterwards. So a kernel sees the same bytes, the same aliasing and the
same alignment as it would here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt

_SYSROOT = Path("/usr/aarch64-linux-gnu")
_OLDEST_AARCH64 = "neoverse-n1"
"""The oldest CPU that the target promises to run on: an instruction that it lacks ends the process."""
_NO_AVX512 = {"GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW", "LD_BIND_NOW": "1"}
"""The C library that the emulated code calls must not use what only the real CPU has."""
Array = npt.NDArray[Any]
_CALL = struct.Struct("<96s8Q8Q8Q")
_ALIGNMENT = 64


class Machine(NamedTuple):
    """An emulated CPU, and how functions are called there."""

    command: list[str]
    """The object, the shared file and its size follow."""
    environment: dict[str, str]
    registers: int
    """Integer arguments that they hold."""
    aapcs: bool
    """AArch64's procedure call standard: large structures are copied by the caller and passed by their address, and an
    integer that has no register takes the rest of them from those that follow. Else System V's for x86-64."""


def qemu(program: Path) -> Machine:
    """program: cross_guest.c compiled for aarch64."""
    return Machine(["qemu-aarch64", "-L", str(_SYSROOT), "-cpu", _OLDEST_AARCH64, str(program)], {}, 8, True)


def bochs(model: str, shim: Path) -> Machine:
    """model: one of bochs_guest.py's; shim: bochs_shim.c compiled."""
    guest = Path(__file__).with_name("bochs_guest.py")
    return Machine([sys.executable, str(guest), model, str(shim)], _NO_AVX512, 6, False)


def lacks_qemu() -> str:
    """What this machine needs before it can run code for aarch64, or nothing."""
    if shutil.which("qemu-aarch64") is not None and (_SYSROOT / "lib" / "libc.so.6").exists():
        return ""
    return f"qemu-aarch64 with a C library in {_SYSROOT}: apt-get install qemu-user libc6-arm64-cross"


def lacks_bochs() -> str:
    """What this machine needs before it can run x86-64 code that its CPU does not, or nothing."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return "Linux on an x86-64 CPU of any kind"
    return "" if importlib.util.find_spec("bochscpu") else "bochscpu-python: pip install -e '.[dev]'"


class _Region(NamedTuple):
    """Host addresses begin .. end - 1, and where they lie in the shared memory."""

    begin: int
    end: int
    offset: int


def _bounds(a: Array) -> tuple[int, int]:
    """The first address of an array that is not empty, and the one past its last byte."""
    begin = a.ctypes.data
    return begin, begin + sum((n - 1) * s for n, s in zip(a.shape, a.strides, strict=True)) + a.itemsize


def _place(bounds: Iterable[tuple[int, int]], end: int) -> list[_Region]:
    """Regions for these address ranges behind `end`; ranges that overlap share one."""
    merged: list[tuple[int, int]] = []
    for begin, stop in sorted(bounds):
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((begin, stop))
    regions = []
    for begin, stop in merged:
        offset = _aligned(end) + begin % _ALIGNMENT
        regions.append(_Region(begin, stop, offset))
        end = offset + stop - begin
    return regions


def _aligned(offset: int) -> int:
    return offset + -offset % _ALIGNMENT


def _end_of(regions: list[_Region]) -> int:
    return max((r.offset + r.end - r.begin for r in regions), default=0)


class Guest:
    """The process. object_path: what it loads; size: bytes shared."""

    def __init__(self, object_path: Path, machine: Machine, size: int = 1 << 26) -> None:
        self.size, self.machine = size, machine
        with tempfile.NamedTemporaryFile(prefix="llmc-guest-") as file:
            file.truncate(size)
            self.memory = mmap.mmap(file.fileno(), size)
            self.process = subprocess.Popen(
                [*machine.command, str(object_path), file.name, str(size)], env=os.environ | machine.environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            self.here = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
            weakref.finalize(self, _end, self.process)
            self.there = self._answer("start")
        self.kept: list[_Region] = []
        self.kept_arrays: list[Array] = []

    def keep(self, array: Array) -> None:
        """Gives an array a fixed place, for functions that remember its address beyond their call."""
        self.kept += _place([_bounds(array)], _end_of(self.kept))
        self.kept_arrays.append(array)

    def call(self, name: str, args: list[Any], arrays: Iterable[Array] = ()) -> int:
        """The result of a function, as 64 bits. args: ctypes values; arrays: all that the pointers in them point into.

        A pointer into none of the arrays is passed as it is: it came from the guest.
        """
        bounds = {_bounds(a) for a in arrays if a.size}
        fresh = {b for b in bounds if not any(r.begin <= b[0] < r.end for r in self.kept)}
        regions = self.kept + _place(fresh, _end_of(self.kept))
        call = _Registers(self, regions)
        for arg in args:
            call.add(arg)
        assert call.end <= self.size, "the shared memory is too small for these arrays"
        for r in regions:
            ctypes.memmove(self.here + r.offset, r.begin, r.end - r.begin)
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(call.packed(name))
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer, which does not come, says why
        result = self._answer(name)
        for r in regions:
            ctypes.memmove(r.begin, self.here + r.offset, r.end - r.begin)
        return result

    def _answer(self, what: str) -> int:
        assert self.process.stdout is not None and self.process.stderr is not None
        data = self.process.stdout.read(8)
        if len(data) == 8:
            return int.from_bytes(data, "little")
        error = self.process.stderr.read().decode()
        raise RuntimeError(f"{what}: the guest ended with {self.process.wait()}: {error}")


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout, process.stderr):
        assert pipe is not None
        try:
            pipe.close()
        except BrokenPipeError:
            continue  # it has ended already
    process.wait()


class _Registers:
    """Arguments laid out as the machine's procedure call standard wants them."""

    def __init__(self, guest: Guest, regions: list[_Region]) -> None:
        self.guest, self.regions = guest, regions
        self.x: list[int] = []
        self.v: list[int] = []
        self.stack: list[int] = []
        self.end = _end_of(regions)
        """Of the shared memory that is in use."""

    def add(self, value: Any) -> None:
        if isinstance(value, ctypes.c_float):
            self.v.append(int.from_bytes(bytes(value), "little"))
        elif isinstance(value, ctypes.Structure):
            self._add_structure(value)
        elif isinstance(value, ctypes.c_void_p):
            self._add_words([self._translate(value.value)])
        elif hasattr(value, "_obj"):  # what ctypes.byref returns
            self._add_words([self._copy(value._obj)])
        else:
            self._add_words([int(value.value) & (1 << 64) - 1])

    def packed(self, name: str) -> bytes:
        assert len(self.v) <= 8 and len(self.stack) <= 8
        words = [w + [0] * (8 - len(w)) for w in (self.x, self.v, self.stack)]
        return _CALL.pack(name.encode(), *words[0], *words[1], *words[2])

    def _add_words(self, words: list[int]) -> None:
        """In registers or, where they do not hold all of it, on the stack."""
        machine = self.guest.machine
        if len(self.x) + len(words) <= machine.registers:
            self.x += words
            return
        self.stack += words
        if machine.aapcs:
            self.x += [0] * (machine.registers - len(self.x))

    def _add_structure(self, value: ctypes.Structure) -> None:
        data = self._image(value)
        words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
        if len(words) <= 2:
            self._add_words(words)
        elif self.guest.machine.aapcs:
            self._add_words([self._copy(value)])
        else:
            self.stack += words

    def _image(self, value: ctypes.Structure) -> bytes:
        """The bytes of a structure with its pointers translated."""
        image = type(value).from_buffer_copy(value)
        for name, kind in value._fields_:  # type: ignore[misc]
            if kind is ctypes.c_void_p:
                setattr(image, name, self._translate(getattr(value, name)))
            elif issubclass(kind, ctypes.Structure):
                setattr(image, name, kind.from_buffer_copy(self._image(getattr(value, name))))
        return bytes(image)

    def _copy(self, value: ctypes.Structure) -> int:
        """The address there of a copy of a structure."""
        at = _aligned(self.end)
        image = self._image(value)
        self.end = at + len(image)
        self.guest.memory[at : self.end] = image
        return self.guest.there + at

    def _translate(self, address: int | None) -> int:
        for r in self.regions:
            if address is not None and r.begin <= address < r.end:
                return self.guest.there + r.offset + address - r.begin
        return address or 0
