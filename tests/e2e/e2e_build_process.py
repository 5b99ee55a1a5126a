"""`llmc build` in a process of its own, forked from one that has the compiler imported: seconds less each time.

The forked process is the command line in all that the tests look at: exit code, what is on its file descriptors
1 and 2, what it leaves behind when it is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from e2e_harness import assert_refused

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["llmc.build", "llmc.cli", "transformers.models.llama.modeling_llama"])
OLDER = b"an older plan"


def _main(arguments: list[str], log: str, cwd: str, env: dict[str, str], file_limit: int | None) -> None:
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{log}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.environ.update(env)
    os.chdir(cwd)
    if file_limit is not None:
        # A write beyond it fails as on a full disk; Python ignores the signal that would come too.
        assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    from llmc.cli import main

    sys.argv = ["llmc", *arguments]
    main()


@dataclass
class Build:
    """A finished `llmc build`."""

    code: int | None
    stdout: str
    stderr: str
    left: dict[str, bytes] = field(default_factory=dict)
    """What is in the output directory: name -> contents."""


def run_build(
    model: Path | str,
    output: Path,
    *flags: str,
    env: dict[str, str] | None = None,
    file_limit: int | None = None,
    kill_when: Callable[[], bool] | None = None,
    kill_with: int = signal.SIGKILL,
) -> Build:
    """Builds to `output`, whose directory exists. With `kill_when`, a signal comes as soon as that holds."""
    log = output.parent.parent / f"{output.parent.name}.log"
    arguments = ["build", str(model), "-o", str(output), *flags]
    cwd = str(output.parent.parent)
    process = _CONTEXT.Process(target=_main, args=(arguments, str(log), cwd, env or {}, file_limit))
    process.start()
    if kill_when is not None:
        deadline = time.monotonic() + 120
        while not kill_when():
            assert process.is_alive(), Path(f"{log}.stderr").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert process.pid is not None
        os.kill(process.pid, kill_with)
    process.join(timeout=300)
    if process.is_alive():
        process.kill()
        process.join()
    out, err = (Path(f"{log}.{name}").read_text() for name in ("stdout", "stderr"))
    left = {p.name: p.read_bytes() for p in sorted(output.parent.iterdir())}
    return Build(process.exitcode, out, err, left)


def refused_build(
    model: Path | str,
    directory: Path,
    *words: str,
    flags: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    file_limit: int | None = None,
) -> str:
    """Asserts that a build over an older plan is refused, says `words`, and leaves that plan and nothing else.

    Returns the line of error.
    """
    out = directory / "out"
    out.mkdir(exist_ok=True)
    (out / "engine.plan").write_bytes(OLDER)
    done = run_build(model, out / "engine.plan", *flags, env=env, file_limit=file_limit)
    line = assert_refused(done.code, done.stderr, *words)
    assert done.stdout == ""
    assert done.left == {"engine.plan": OLDER}
    return line
