"""Compiles a unit of wrappers around the CPU kernels and calls it with numpy arrays.

A wrapper is an `EXPORT` function whose first parameter is a `Par`; `Unit.run` calls it for every thread id of
a team in turn, which is what the threads of a pool do at once. A 2-D float32 array is passed as a `Mat`, any
other array as a pointer, a Python float as float, None as a null pointer.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import llmc.kernels

HEADERS = Path(llmc.kernels.__file__).resolve().parent / "cpu"
PORTABLE, V3, V4 = "x86_64", "x86_64_v3", "x86_64_v4+avx512vnni"
VNNI_EMULATED = "x86_64_v3 as if with VNNI"
"""The VNNI branch on AVX2: instructions emulated, the logic real."""
_V3_FLAGS = {"avx2", "fma", "f16c", "bmi2"}
_FLAGS_NEEDED: dict[str, set[str]] = {
    PORTABLE: set(),
    V3: _V3_FLAGS,
    VNNI_EMULATED: _V3_FLAGS,
    V4: {"avx512_vnni", "avx512vl", "avx512bw"},
}
_PREAMBLE = """
#include "llmc.h"
using namespace llmc;
#define EXPORT extern "C" __attribute__((visibility("default")))
"""
SENTINEL = np.float32(-12345.0)


class Par(ctypes.Structure):
    _fields_ = [("tid", ctypes.c_int), ("nt", ctypes.c_int), ("pool", ctypes.c_void_p)]


class Mat(ctypes.Structure):
    _fields_ = [("p", ctypes.c_void_p), ("ld", ctypes.c_int)]


class QuantBuf(ctypes.Structure):
    _fields_ = [("q", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("sum", ctypes.c_void_p)]


class Weight(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("min", ctypes.c_void_p)]


NO_MAT = Mat(None, 0)


@cache
def _cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split(":", 1)[1].split())
    return set()


def can_run(mcpu: str) -> bool:
    return sys.platform == "linux" and os.uname().machine == "x86_64" and _FLAGS_NEEDED[mcpu] <= _cpu_flags()


def require(mcpu: str) -> str:
    """mcpu, or a skip that says what this machine lacks."""
    if not can_run(mcpu):
        pytest.skip(f"this CPU lacks {', '.join(sorted(_FLAGS_NEEDED[mcpu] - _cpu_flags()))} for {mcpu}")
    return mcpu


def _cache_dir() -> Path:
    path = Path(tempfile.gettempdir()) / f"llmc-kernel-tests-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise RuntimeError(f"{path} belongs to somebody else")
    return path


def compile_unit(wrappers: str, mcpu: str, target: str = "x86_64-linux-gnu.2.28") -> Path:
    """The shared object of these wrappers; cached by everything that it depends on."""
    flags = ["-O3", "-std=c++20", "-nostdlib++", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off"]
    flags += ["-fno-math-errno", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    if mcpu == VNNI_EMULATED:
        mcpu, emulation = V3, Path(__file__).with_name("vnni_emulation.h")
        flags += ["-D__AVX512VNNI__=1", "-include", str(emulation), "-O1"]  # compiles in half the time
    flags += ["-target", target, f"-mcpu={mcpu}", f"-I{HEADERS}"]
    source = _PREAMBLE + wrappers
    digest = hashlib.sha256(repr((source, flags)).encode())
    for header in [*sorted(HEADERS.glob("*.h")), Path(__file__).with_name("vnni_emulation.h")]:
        digest.update(header.read_bytes())
    root = _cache_dir()
    out = root / f"{digest.hexdigest()[:24]}.so"
    if not out.exists():
        unit, made = out.with_suffix(f".{os.getpid()}.cpp"), out.with_suffix(f".{os.getpid()}.so")
        unit.write_text(source)
        zig_cache = {"ZIG_GLOBAL_CACHE_DIR": str(root / "zig"), "ZIG_LOCAL_CACHE_DIR": str(root / "zig")}
        command = [sys.executable, "-m", "ziglang", "c++", *flags, str(unit), "-o", str(made)]
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
    return Mat(a.ctypes.data, a.strides[0] // 4)


class Unit:
    def __init__(self, wrappers: str, mcpu: str) -> None:
        self.library = ctypes.CDLL(str(compile_unit(wrappers, mcpu)))

    def run(self, name: str, *args: Any, threads: int = 1) -> None:
        function = getattr(self.library, name)
        converted = [_argument(a) for a in args]
        for tid in range(threads):
            function(Par(tid, threads, None), *converted)


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
