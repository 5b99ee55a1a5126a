"""The processes that compile kernels (worker.py): started when needed, in a known environment, and ended together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llmc
from llmc.errors import UserError
from llmc.scratch import scratch_directory

_COMMAND = [sys.executable, "-m", "llmc.codegen.triton.worker"]
# What changes the code that Triton or its tools make, or makes them print: workers run without.
_PREFIXES = ("TRITON_", "MLIR_", "LLVM_", "AMDGCN_", "NVPTX_", "PTXAS_", "DISABLE_")
_NAMES = frozenset(["USE_IR_LOC", "ALLOW_LHS_TMEM_LAYOUT_CONVERSION"])


@dataclass(frozen=True)
class Refusal:
    """The compiler cannot make a kernel; the reason is one line."""

    reason: str


class Team:
    """Workers, one for every thread that calls `compile` at the same time. To be used in a `with`."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._directory = self._stack.enter_context(scratch_directory())
        self._all: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._ended = False
        self._lock = threading.Lock()

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for worker in self._all:
            worker.close()
        self._stack.close()

    def kill(self) -> None:
        """Ends the workers; calls in progress raise, and later ones."""
        with self._lock:
            self._ended = True
            for worker in self._all:
                worker.kill()

    def compile(self, job: dict[str, Any], label: str) -> Refusal | tuple[dict[str, Any], bytes]:
        """Properties and machine code of a job's kernel (see worker.py). label: names it in errors."""
        worker = self._take()
        answer = worker.ask(job, label)
        self._idle.append(worker)
        return answer

    def _take(self) -> _Worker:
        with self._lock:
            if self._ended:
                raise RuntimeError("the compilers of GPU kernels have ended")
            if self._idle:
                return self._idle.pop()
            self._all.append(_Worker(self._directory))
            return self._all[-1]


class _Worker:
    """One process and the pipes to it."""

    def __init__(self, directory: Path) -> None:
        own = Path(tempfile.mkdtemp(dir=directory))
        self._log = own / "log"
        with open(self._log, "w+b") as log:  # readable: the worker looks for the compiler's messages in it
            self._process = subprocess.Popen(
                _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=own,
                env=_environment(own), start_new_session=True,
            )  # fmt: skip

    def ask(self, job: dict[str, Any], label: str) -> Refusal | tuple[dict[str, Any], bytes]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            stdin.write(json.dumps(job).encode() + b"\n")
            stdin.flush()
        line = stdout.readline()
        if not line.endswith(b"\n"):
            raise self._died(label)
        answer = json.loads(line)
        if "refused" in answer:
            return Refusal(answer["refused"])
        if "fault" in answer:
            raise RuntimeError(f"compiling {label}:\n{answer['fault']}")
        code = stdout.read(answer["size"])
        if len(code) != answer.pop("size"):
            raise self._died(label)
        return answer, code

    def _died(self, label: str) -> Exception:
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return UserError(
                f"the compiler of GPU kernels was killed while it compiled {label}; if memory ran out, build with "
                "fewer CPUs (taskset -c 0 llmc build …)"
            )
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        printed = self._log.read_text(errors="replace")[-4000:]
        return RuntimeError(f"the compiler of GPU kernels ended {how} while it compiled {label}:\n{printed}")

    def kill(self) -> None:
        """With the tools that it runs: they share its process group."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # of what was not read
                    pipe.close()


def _environment(own: Path) -> dict[str, str]:
    """The same code whatever the user's environment is; all that is written goes to the worker's directory."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_PREFIXES) and k not in _NAMES}
    inherited = [os.path.abspath(path) for path in kept.get("PYTHONPATH", "").split(os.pathsep) if path]
    root = str(Path(llmc.__file__).resolve().parents[1])
    return kept | {
        "PYTHONPATH": os.pathsep.join([root, *inherited]),
        "PYTHONHASHSEED": "0",
        "TMPDIR": str(own),
        "TRITON_CACHE_DIR": str(own / "cache"),
        "TRITON_DISABLE_LINE_INFO": "1",  # it would hold paths
        "TRITON_DUMP_PTXAS_LOG": "1",
        "TRITON_STORE_BINARY_ONLY": "1",
    }
