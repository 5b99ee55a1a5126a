"""Compiles a unit of wrappers around the CPU kernels and calls it with numpy arrays.

A wrapper is an `EXPORT` function whose first parameter is a `Par`; `Unit.run` calls it for every thread id of
a team, on threads of its own. A 2-D float32 array is passed as a `Mat`, any other array as a pointer, a Python float as
float, None as a null pointer.

Code for aarch64, and on request code with AVX-512 or AVX-VNNI, runs emulated in a process of its own (cross_guest.py),
the team in turn. A structure with pointers says in `arrays` what they point into, so that it can be passed there.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cross_guest import Guest, Machine, bochs, lacks_bochs, lacks_qemu, qemu

import llmc.kernels
from llmc.runtime.cpu.targets import parse_target

HEADERS = Path(llmc.kernels.__file__).resolve().parent / "cpu"
PORTABLE, V3, V4 = "x86_64", "x86_64_v3", "x86_64_v4+avx512vnni"
AVXVNNI = parse_target("cpu:x86-64-v3+avxvnni").zig_cpu
AARCH64 = parse_target("cpu:aarch64+dotprod").zig_cpu
V4_IN_BOCHS, AVXVNNI_IN_BOCHS = f"{V4} in Bochs", f"{AVXVNNI} in Bochs"
BOCHS = {V4_IN_BOCHS: (V4, "ice_lake"), AVXVNNI_IN_BOCHS: (AVXVNNI, "arrow_lake")}
"""Variants whose code runs in an emulated CPU: what is compiled, and a CPU that has these instructions and not many
more."""
VNNI_EMULATED = "x86_64_v3 as if with VNNI"
"""The VNNI branch on AVX2, where no emulator is: instructions emulated, the logic real."""
EMULATED = [pytest.param(m, marks=pytest.mark.cross) for m in (*BOCHS, AARCH64)]
"""Parameters for the variants that `make test-cross` runs in an emulator, on every machine."""
_V3_FLAGS = {"avx2", "fma", "f16c", "bmi2"}
_FLAGS_NEEDED: dict[str, set[str]] = {
    PORTABLE: set(),
    V3: _V3_FLAGS,
    VNNI_EMULATED: _V3_FLAGS,
    AVXVNNI: _V3_FLAGS | {"avx_vnni"},
    V4: {"avx512_vnni", "avx512vl", "avx512bw"},
}
_PREAMBLE = """
#include "llmc.h"
using namespace llmc;
#define EXPORT extern "C" __attribute__((visibility("default")))
static Pool team_pool;
EXPORT void* new_team(int nt) {  // without threads
  team_pool = Pool();
  team_pool.nt = nt;
  return &team_pool;
}
"""
SENTINEL = np.float32(-12345.0)


class Par(ctypes.Structure):
    _fields_ = [("tid", ctypes.c_int), ("nt", ctypes.c_int), ("pool", ctypes.c_void_p)]


class Mat(ctypes.Structure):
    _fields_ = [("p", ctypes.c_void_p), ("ld", ctypes.c_int)]
    arrays: tuple[npt.NDArray[Any], ...] = ()


class QuantBuf(ctypes.Structure):
    _fields_ = [("q", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("sum", ctypes.c_void_p)]
    arrays: tuple[npt.NDArray[Any], ...] = ()


class Weight(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("min", ctypes.c_void_p)]
    arrays: tuple[npt.NDArray[Any], ...] = ()


NO_MAT = Mat(None, 0)


@cache
def _cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split(":", 1)[1].split())
    return set()


def lacks(mcpu: str) -> str:
    """What this machine needs before it can run code for mcpu, or nothing."""
    if mcpu == AARCH64:
        return lacks_qemu()
    if mcpu in BOCHS:
        return lacks_bochs()
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return "Linux on x86-64"
    return ", ".join(sorted(_FLAGS_NEEDED[mcpu] - _cpu_flags()))


def require(mcpu: str) -> str:
    """mcpu, or a skip that says what this machine lacks."""
    if missing := lacks(mcpu):
        pytest.skip(f"{mcpu} needs {missing}")
    return mcpu


def _cache_dir() -> Path:
    path = Path(tempfile.gettempdir()) / f"llmc-kernel-tests-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise RuntimeError(f"{path} belongs to somebody else")
    return path


def compile_unit(wrappers: str, mcpu: str) -> Path:
    """The shared object of these wrappers; cached by everything that it depends on."""
    mcpu = BOCHS[mcpu][0] if mcpu in BOCHS else mcpu
    target = parse_target("cpu:aarch64+dotprod" if mcpu == AARCH64 else "cpu:x86-64").zig_target
    flags = ["-O3", "-std=c++20", "-nostdlib++", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off"]
    flags += ["-fno-math-errno", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    emulation = Path(__file__).with_name("vnni_emulation.h")
    if mcpu in (VNNI_EMULATED, PORTABLE):
        flags += ["-O1"]  # compiles in half the time
    if mcpu == VNNI_EMULATED:
        flags += ["-D__AVX512VNNI__=1", "-include", str(emulation)]
        mcpu = V3
    flags += ["-target", target, f"-mcpu={mcpu}", f"-I{HEADERS}"]
    headers = b"".join(path.read_bytes() for path in [*sorted(HEADERS.glob("*.h")), emulation])
    return _compile(_PREAMBLE + wrappers, ".cpp", flags, headers)


def emulator(mcpu: str) -> Machine | None:
    """What runs code for mcpu; None for this machine itself."""
    here = Path(__file__)
    if mcpu in BOCHS:
        flags = ["-O1", "-shared", "-fPIC", "-target", parse_target("cpu:x86-64").zig_target]
        return bochs(BOCHS[mcpu][1], _compile(here.with_name("bochs_shim.c").read_text(), ".c", flags))
    if mcpu != AARCH64:
        return None
    target = parse_target("cpu:aarch64+dotprod")
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-target", target.zig_target, f"-mcpu={target.zig_cpu}", "-ldl"]
    return qemu(_compile(here.with_name("cross_guest.c").read_text(), ".c", flags))


def _compile(source: str, suffix: str, flags: list[str], headers: bytes = b"") -> Path:
    digest = hashlib.sha256(repr((source, flags)).encode() + headers)
    root = _cache_dir()
    out = root / f"{digest.hexdigest()[:24]}.so"
    if not out.exists():
        unit, made = out.with_suffix(f".{os.getpid()}{suffix}"), out.with_suffix(f".{os.getpid()}.so")
        unit.write_text(source)
        zig_cache = {"ZIG_GLOBAL_CACHE_DIR": str(root / "zig"), "ZIG_LOCAL_CACHE_DIR": str(root / "zig")}
        driver = "cc" if suffix == ".c" else "c++"
        command = [sys.executable, "-m", "ziglang", driver, *flags, str(unit), "-o", str(made)]
        done = subprocess.run(command, env=os.environ | zig_cache, capture_output=True, text=True, check=False)
        unit.unlink()
        if done.returncode != 0:
            raise RuntimeError(done.stderr[-4000:])
        made.replace(out)
    return out


def _argument(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.ndim == 2 and value.dtype == np.float32:
            return as_mat(value)
        return ctypes.c_void_p(value.ctypes.data)
    if isinstance(value, (float, np.floating)):
        return ctypes.c_float(value)
    if isinstance(value, (int, np.integer)):
        return ctypes.c_int(int(value))
    if value is None:
        return ctypes.c_void_p(None)
    return value


def as_mat(a: npt.NDArray[np.float32]) -> Mat:
    assert a.strides[1] == 4 or a.size <= a.shape[0]
    mat = Mat(a.ctypes.data, a.strides[0] // 4)
    mat.arrays = (a,)
    return mat


def _arrays_of(value: Any) -> tuple[npt.NDArray[Any], ...]:
    if isinstance(value, np.ndarray):
        return (value,)
    value = getattr(value, "_obj", value)  # of ctypes.byref
    return getattr(value, "arrays", ())


class Unit:
    """Wrappers compiled for one variant, and called here or, where it is emulated, in a guest process."""

    def __init__(self, wrappers: str, mcpu: str, cpu: str | None = None) -> None:
        """cpu: the variant whose machine runs it, if not mcpu's own."""
        path = compile_unit(wrappers, mcpu)
        machine = emulator(cpu or mcpu)
        self.guest = None if machine is None else Guest(path, machine)
        self.library = ctypes.CDLL(str(path)) if self.guest is None else None

    def run(self, name: str, *args: Any, threads: int = 1) -> None:
        pool = self.call("new_team", threads if self.guest is None else 1)  # of one: a barrier does not wait
        team = [Par(tid, threads, pool) for tid in range(threads)]
        if self.guest is not None or threads == 1:
            for par in team:
                self.call(name, par, *args)
            return
        with ThreadPoolExecutor(threads) as executor:
            list(executor.map(lambda par: self.call(name, par, *args), team))

    def call(self, name: str, *args: Any) -> int:
        """The int64_t that a function returns, whatever its parameters; meaningless for one that returns nothing."""
        converted = [_argument(a) for a in args]
        if self.guest is not None:
            return self.guest.call(name, converted, [a for arg in args for a in _arrays_of(arg)])
        function = getattr(self.library, name)
        function.restype = ctypes.c_int64
        result: int = function(*converted)
        return result


def new_mat(rows: int, columns: int, extra: int = 3) -> npt.NDArray[np.float32]:
    """An output of wide rows: `columns` are the output, the rest must keep the sentinel (see `checked`)."""
    return np.full((rows + 1, columns + extra), SENTINEL, np.float32)


def checked(a: npt.NDArray[np.float32], rows: int, columns: int) -> npt.NDArray[np.float32]:
    """The [rows, columns] of a `new_mat`, after asserting that nothing was written beside them."""
    assert (a[:, columns:] == SENTINEL).all() and (a[rows:] == SENTINEL).all(), "written outside the output"
    return a[:rows, :columns].copy()


def aligned_bytes(data: bytes) -> npt.NDArray[np.uint8]:
    """A copy that starts on a 64-byte boundary, as the plan's segments do."""
    memory = np.zeros(len(data) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    memory[start : start + len(data)] = np.frombuffer(data, np.uint8)
    return memory[start : start + len(data)]
