"""pip as a process of its own, whose output nobody sees: a bar shows how a download comes on, and errors are told."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from llmc.errors import UserError

Bar = Callable[[str, int, str], AbstractContextManager[Callable[[int], None]]]
"""(name, total, unit) -> a bar; entered, it gives what is told how much more is done."""
_UNITS = {"bytes": 1, "kB": 1000, "MB": 1000**2}
# Newer pips announce the metadata of a wheel, too.
_ANNOUNCED = re.compile(r"Downloading \S+(?<!\.metadata) \((\d+(?:\.\d+)?) (bytes|kB|MB)\)")
_POLL_SECONDS = 0.1


def no_bar(name: str, total: int, unit: str) -> AbstractContextManager[Callable[[int], None]]:
    """A bar that nobody sees."""
    return nullcontext(lambda amount: None)


def run_pip(spec: str, arguments: list[str], scratch: Path | None = None, bar: Bar = no_bar) -> tuple[int, str, str]:
    """(exit code, standard output, what went wrong in pip's words) of this interpreter's pip.

    scratch: an empty folder where a download grows, for the bar. Ends pip when it is interrupted. Raises UserError
    where there is no pip.
    """
    if importlib.util.find_spec("pip") is None:
        raise UserError(f"fetching {spec} needs pip, which this Python lacks: run `python -m ensurepip`")
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check"]
    env = os.environ | ({"TMPDIR": str(scratch)} if scratch is not None else {})
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors, ExitStack() as stack:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=env)
        stack.callback(process.wait)
        stack.callback(process.kill)
        if scratch is not None:
            _watch(
                process, output.fileno(), scratch, lambda total: stack.enter_context(bar(f"fetch {spec}", total, "B"))
            )
        return process.wait(), _text(output.fileno()), _reason(_text(errors.fileno()))


def _watch(
    process: subprocess.Popen[bytes], output: int, scratch: Path, start: Callable[[int], Callable[[int], None]]
) -> None:
    """Waits for the process. start: gives a bar of so many bytes, once pip has said how many there are."""
    advance, total, seen = None, 0, 0
    while True:
        try:
            process.wait(_POLL_SECONDS)
            break
        except subprocess.TimeoutExpired:
            if advance is None and (announced := _ANNOUNCED.search(_text(output))) is not None:
                total = int(float(announced[1]) * _UNITS[announced[2]])
                advance = start(total)
            if advance is not None:
                done = min(total, _largest(scratch))  # of the file itself and its copy for pip's cache
                advance(max(0, done - seen))
                seen = max(seen, done)
    if advance is not None and process.returncode == 0:
        advance(total - seen)


def _largest(folder: Path) -> int:
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:  # pip has just moved it
                continue
    return max(sizes)


def _text(descriptor: int) -> str:
    """All of a file that another process writes: its position, which is shared, is left alone."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")


def _reason(errors: str) -> str:
    """What pip says went wrong."""
    found = [line for line in errors.splitlines() if line.startswith("ERROR:")]
    return found[-1].removeprefix("ERROR:").strip()[:200] if found else "no wheel was found"
