"""Compiles a generated unit with the pinned zig toolchain: hermetic, cross-compiling, byte-reproducible.

Only C headers are used (no C++ standard library), so nothing else has to be built first. Objects are cached by
all that can change them: the unit, the kernel headers, the flags and the compiler's version.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from pathlib import Path

from llmc.cache import cache_dir
from llmc.codegen import object_cache
from llmc.errors import UserError
from llmc.runtime.cpu.targets import Target
from llmc.scratch import scratch_directory

log = logging.getLogger(__name__)
KERNEL_DIR = Path(__file__).resolve().parents[2] / "kernels" / "cpu"
_FLAGS = (
    "-O3 -std=c++20 -nostdlib++ -fno-exceptions -fno-rtti -ffp-contract=off -fno-math-errno -fno-sanitize=undefined "
    "-fvisibility=hidden -shared -fPIC -s -g0 -Wl,--build-id=none -pthread"
).split()


def kernel_headers() -> dict[str, bytes]:
    """Every kernel header by name."""
    return {path.name: path.read_bytes() for path in sorted(KERNEL_DIR.glob("*.h"))}


def compile_unit(source: str, target: Target, cxx: str | None = None) -> bytes:
    """The shared object of a unit. cxx: another compiler driver, for experiments (not cached).

    Raises UserError when the toolchain is missing, RuntimeError when the unit does not compile (our fault).
    """
    command = [*_compiler(cxx), *_FLAGS, *_target_flags(target, cxx)]
    if cxx is not None:
        return _run(command, source)
    key = _key(command[1:], source)
    code = object_cache.load(key)
    if code is None:
        code = _run(command, source)
        with suppress(OSError):  # where the cache cannot be written, nothing is cached
            object_cache.store(key, code)
    return code


def _key(flags: Sequence[str], source: str) -> str:
    """A digest of all that can change an object."""
    key = hashlib.sha256()
    for part in (metadata.version("ziglang"), " ".join(flags), source):
        key.update(part.encode() + b"\0")
    for name, text in kernel_headers().items():
        key.update(name.encode() + b"\0" + text + b"\0")
    return key.hexdigest()


def _compiler(cxx: str | None) -> list[str]:
    if cxx is not None:
        if shutil.which(cxx) is None:
            raise UserError(f"--cxx {cxx}: no such program on PATH")
        return [cxx]
    if importlib.util.find_spec("ziglang") is None:
        raise UserError("the compiler is missing: pip install 'llmc[build]' (it brings ziglang)")
    return [sys.executable, "-m", "ziglang", "c++"]


def _target_flags(target: Target, cxx: str | None) -> list[str]:
    name = f'-DLLMC_TARGET="{target.name}"'
    if cxx is not None:
        return ["-march=native", name]
    return ["-target", target.zig_target, f"-mcpu={target.zig_cpu}", name]


def _run(command: list[str], source: str) -> bytes:
    """Compiles in a directory of its own with relative names, so that no path gets into the object."""
    with scratch_directory() as root:
        for name, text in kernel_headers().items():
            (root / name).write_bytes(text)
        (root / "step.cpp").write_text(source)
        zig_cache = _zig_cache() or root / "zig"
        env = os.environ | {"ZIG_GLOBAL_CACHE_DIR": str(zig_cache), "ZIG_LOCAL_CACHE_DIR": str(root / "zig-local")}
        code, said = _call([*command, "-I.", "step.cpp", "-o", "step.so"], root, env)
        if code:
            raise RuntimeError(f"the generated unit does not compile:\n{said[-4000:]}")
        return (root / "step.so").read_bytes()


_running: set[subprocess.Popen[str]] = set()


def _call(command: list[str], directory: Path, env: dict[str, str]) -> tuple[int, str]:
    """(exit code, what it said) of a compiler, in a process group of its own: zig starts clang, and both must end."""
    process = subprocess.Popen(
        command, cwd=directory, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    _running.add(process)
    try:
        said, _ = process.communicate()
    finally:
        _running.discard(process)
    return process.returncode, said


@contextmanager
def stopped_compilers() -> Iterator[None]:
    """Compilers that run in other threads are killed when the block is left by an exception: nobody waits for them."""
    try:
        yield
    except BaseException:
        for process in list(_running):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        raise


def _zig_cache() -> Path | None:
    """zig's own cache; None, with a warning, where it cannot be written: zig would try for ever."""
    directory = cache_dir() / "zig"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(directory, os.W_OK) else "it is read-only"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        _warn(cache_dir(), reason)
    return None if reason else directory


@cache
def _warn(directory: Path, reason: str) -> None:
    """Once, however many targets are compiled."""
    log.warning("nothing is cached in %s: %s; every build compiles anew", directory, reason)
