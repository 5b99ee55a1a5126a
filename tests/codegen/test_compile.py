"""codegen/cpu/compile.py: reproducible objects for every target, cached by all that can change them."""

from __future__ import annotations

import ctypes
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_engines import compiled, lowered

from llmc.codegen.cpu import compile as compiling
from llmc.codegen.cpu.compile import compile_unit
from llmc.errors import UserError
from llmc.kv_page import PAGE_SIZE
from llmc.runtime.cpu.executor import load_code
from llmc.runtime.cpu.targets import CPU_TARGETS, parse_target

UNIT = """
#include "abi.h"
#include "vmath.h"
extern "C" __attribute__((visibility("default"))) int answer() { return llmc::kPageSize + 26; }
"""
_ALLOWED = {"libc.so.6", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}


def needed_libraries(code: bytes) -> set[str]:
    """DT_NEEDED of a 64-bit little-endian ELF object."""
    offset, size, count = struct.unpack_from("<Q", code, 32)[0], *struct.unpack_from("<HH", code, 54)
    headers = [struct.unpack_from("<IIQQQQQQ", code, offset + i * size) for i in range(count)]
    loads = [(h[3], h[2], h[5]) for h in headers if h[0] == 1]  # PT_LOAD: address, file offset, size
    (dynamic,) = [h for h in headers if h[0] == 2]  # PT_DYNAMIC
    entries = list(struct.iter_unpack("<QQ", code[dynamic[2] : dynamic[2] + dynamic[5]]))
    strings = next(value for tag, value in entries if tag == 5)  # DT_STRTAB
    base = next(at + strings - address for address, at, length in loads if address <= strings < address + length)
    return {code[base + v : code.index(b"\0", base + v)].decode() for tag, v in entries if tag == 1}


@pytest.fixture
def cache(monkeypatch: Any, tmp_path: Path) -> Path:
    """An object cache of its own; the compiler's own cache stays warm."""
    real = compiling.cache_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "llmc").mkdir()
    real.joinpath("zig").mkdir(parents=True, exist_ok=True)
    (tmp_path / "llmc" / "zig").symlink_to(real / "zig")
    return tmp_path / "llmc"


@pytest.fixture
def compiles(monkeypatch: Any) -> list[list[str]]:
    """The commands that were run instead of the compiler."""
    commands: list[list[str]] = []
    monkeypatch.setattr(compiling, "_run", lambda command, source: commands.append(command) or b"code")
    return commands


def test_a_warm_and_a_cold_cache_give_the_same_bytes(monkeypatch: Any, cache: Path, tmp_path: Path) -> None:
    codes = [compile_unit(UNIT, parse_target("native"))]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cold one"))
    codes.append(compile_unit(UNIT, parse_target("native")))
    assert len(list((tmp_path / "a cold one" / "llmc" / "objects").iterdir())) == 1
    assert codes[0] == codes[1] and codes[0][:4] == b"\x7fELF"
    assert str(tmp_path).encode() not in codes[0] and b"llmc-" not in codes[0]
    path = tmp_path / "unit.so"
    path.write_bytes(codes[0])
    assert ctypes.CDLL(str(path)).answer() == 42


def test_the_page_size_of_the_kernels_is_that_of_the_runtime() -> None:
    assert f"constexpr int kPageSize = {PAGE_SIZE};".encode() in compiling.kernel_headers()["abi.h"]


@pytest.mark.parametrize("target", CPU_TARGETS, ids=lambda t: t.name)
def test_every_target_compiles_to_code_of_its_own(cache: Path, target: Any) -> None:
    code = compile_unit(UNIT, target)
    assert code[:4] == b"\x7fELF" and struct.unpack_from("<H", code, 18)[0] == _ELF_MACHINES[target.machine]
    assert needed_libraries(code) <= _ALLOWED


def test_an_engine_needs_libc_libm_and_libpthread_only() -> None:
    code, _ = compiled("llama")
    assert {"libc.so.6"} <= needed_libraries(code) <= _ALLOWED
    assert str(Path.cwd()).encode() not in code and str(Path.home()).encode() not in code
    library = load_code(code)
    assert not hasattr(library, "step"), "only llmc_* is exported"
    assert library.llmc_vocab_size() == lowered("llama").program.vocab_size == 211


def test_a_broken_unit_is_our_fault_and_shows_the_line(cache: Path) -> None:
    with pytest.raises(RuntimeError, match=r"does not compile:\n[^$]*step\.cpp:1:.*nonsense"):
        compile_unit("int x = nonsense;\n", parse_target("native"))
    assert not list(cache.glob("objects/*"))


def test_the_cache_knows_all_that_can_change_an_object(monkeypatch: Any, cache: Path, compiles: list[Any]) -> None:
    v3, scalar = parse_target("cpu:x86-64-v3"), parse_target("cpu:x86-64")
    for source, target in ((UNIT, v3), (UNIT, v3), (UNIT + "\n", v3), (UNIT, scalar), (UNIT, v3)):
        assert compile_unit(source, target) == b"code"
    assert len(compiles) == 3
    headers = compiling.kernel_headers()
    assert "llmc.h" in headers and "abi.h" in headers
    monkeypatch.setattr(compiling, "kernel_headers", lambda: headers | {"abi.h": headers["abi.h"] + b"\n"})
    compile_unit(UNIT, v3)
    monkeypatch.setattr(compiling.metadata, "version", lambda name: "0.0.0")
    compile_unit(UNIT, v3)
    monkeypatch.setattr(compiling, "_FLAGS", [*compiling._FLAGS, "-DX"])
    compile_unit(UNIT, v3)
    assert len(compiles) == 6 == len(list(cache.glob("objects/*.bin")))


def test_a_damaged_object_is_compiled_anew(cache: Path, compiles: list[Any]) -> None:
    target = parse_target("cpu:x86-64")
    compile_unit(UNIT, target)
    (cached,) = cache.glob("objects/*.bin")
    whole = cached.read_bytes()
    for damaged in (whole[:-1] + b"E", whole[:-1], b""):
        cached.write_bytes(damaged)
        assert compile_unit(UNIT, target) == b"code" and cached.read_bytes() == whole
    assert len(compiles) == 4


def test_another_compiler_is_neither_cached_nor_guessed(cache: Path, compiles: list[Any]) -> None:
    with pytest.raises(UserError, match=r"--cxx no-such-compiler: no such program"):
        compile_unit(UNIT, parse_target("native"), cxx="no-such-compiler")
    driver = shutil.which("true")
    assert driver is not None
    for _ in range(2):
        assert compile_unit(UNIT, parse_target("native"), cxx=driver) == b"code"
    assert len(compiles) == 2 and compiles[0][0] == driver and not list(cache.glob("objects/*"))


def test_a_missing_toolchain_says_how_to_get_it(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "ziglang", None)
    with pytest.raises(UserError, match=r"pip install 'llmc\[build\]'"):
        compile_unit(UNIT, parse_target("native"))


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch: Any, tmp_path: Path) -> None:
    """zig itself would try for ever."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    path = tmp_path / "unit.so"
    path.write_bytes(compile_unit(UNIT, parse_target("native")))
    assert ctypes.CDLL(str(path)).answer() == 42
