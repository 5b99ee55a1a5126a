"""Engines that `cpu.py` measures, each in processes of its own: workers (cpu_worker.py) and the tools of llama.cpp."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gpu_engines import Prompts, Skipped, WorkerProcess
from gpu_rounds import Workload


class Measured(Protocol):
    """An engine with a model."""

    name: str
    versions: dict[str, str]

    def seconds(self, workload: Workload, prompts: Prompts) -> float:
        """Of the prompt until its first token, or of the decoding of all sequences alone. Raises Skipped when the
        engine fails, RuntimeError when it gives other than the tokens asked for."""
        ...

    def peak_bytes(self) -> int:
        """The most memory that was resident, files mapped by the engine included."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Limits:
    """threads: of the engine. length: tokens of a sequence, prompt and output. batch: sequences. prompt_tokens: of all
    prompts of a workload, so that every engine may take them in one step."""

    threads: int
    length: int
    batch: int
    prompt_tokens: int


class Worker(WorkerProcess):
    """An engine in cpu_worker.py. It is stopped when it is not its turn: an idle engine takes no time from another."""

    def __init__(self, name: str, python: str, kind: str, model: Path, limits: Limits) -> None:
        """name: for people. kind: as cpu_worker.py has it. Raises Skipped when it cannot run here."""
        script = Path(__file__).with_name("cpu_worker.py")
        numbers = (limits.threads, limits.length, limits.batch, limits.prompt_tokens)
        super().__init__(name, [python, str(script), kind, str(model), *map(str, numbers)], "PYTHONPATH")
        self._signal(signal.SIGSTOP)
        self._peak = self._high_water()

    def seconds(self, workload: Workload, prompts: Prompts) -> float:
        new = workload.decode + 1
        self._signal(signal.SIGCONT)
        answer = self.ask({"prompts": prompts, "new": new})
        self._signal(signal.SIGSTOP)
        self._peak = self._high_water()
        counts = [len(tokens) for tokens in answer["tokens"]]
        if counts != [new] * len(prompts):
            raise RuntimeError(f"{self.name}, {workload.name}: gave {counts} tokens, asked for {new} of each")
        return decode_seconds(answer, workload) if workload.decode else float(answer["first_s"])

    def peak_bytes(self) -> int:
        return self._peak

    def _high_water(self) -> int:
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"{self.name}: Linux does not say what memory it took")

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


def decode_seconds(answer: dict[str, Any], workload: Workload) -> float:
    """Seconds for all tokens after the first of each sequence. An engine may have given more than the first ones when
    the last sequence began; the rate of the rest counts."""
    rest = sum(map(len, answer["tokens"])) - answer["first_tokens"]
    return float((answer["seconds"] - answer["first_s"]) * workload.tokens / rest)


class LlamaCpp:
    """llama-bench for prompts, llama-batched-bench for decoding. They load the model for every run, warm up before they
    measure, and take random tokens of their own."""

    def __init__(self, name: str, build: Path, version: str | None, model: Path, limits: Limits) -> None:
        """build: llama.cpp's build directory. version: None is what the tools say of themselves. Raises Skipped when
        they are not there."""
        self.name, self._bin, self._model, self._limits = name, build / "bin", model, limits
        for tool in ("llama-bench", "llama-batched-bench"):
            if not (self._bin / tool).is_file():
                raise Skipped(f"its build directory has no bin/{tool}")
        self.versions = {"llama.cpp": version} if version else {}
        self._peak = 0

    def seconds(self, workload: Workload, prompts: Prompts) -> float:
        threads = str(self._limits.threads)
        if not workload.decode:
            found = self._run(
                "llama-bench", "-t", threads, "-p", str(workload.context), "-n", "0", "-r", "1", "-o", "jsonl"
            )
            self._check(workload, (found["n_prompt"], found["n_gen"]), (workload.context, 0))
            self.versions.setdefault("llama.cpp", f"{found['build_number']} ({found['build_commit']})")
            return float(found["avg_ns"]) / 1e9
        found = self._run(
            "llama-batched-bench", "-t", threads, "-tb", threads, "-c", str(self._limits.length * workload.batch),
            "-b", "2048", "-ub", "512", "-npp", str(workload.context), "-ntg", str(workload.decode),
            "-npl", str(workload.batch), "--output-format", "jsonl",
        )  # fmt: skip
        asked = workload.decode, workload.batch, workload.batch * (workload.context + workload.decode)
        self._check(workload, (found["tg"], found["pl"], found["n_kv"]), asked)
        return float(found["t_tg"])

    def _check(self, workload: Workload, given: tuple[int, ...], asked: tuple[int, ...]) -> None:
        if given != asked:
            raise RuntimeError(f"{self.name}, {workload.name}: says that it ran {given}, asked for {asked}")

    def _run(self, tool: str, *arguments: str) -> dict[str, Any]:
        """The last line of JSON that the tool prints."""
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [self._bin / tool, "-m", self._model, *arguments], stdout=output, stderr=subprocess.STDOUT
            )
            usage = _wait(process)
            self._peak = max(self._peak, usage.ru_maxrss * 1024)
            output.seek(0)
            lines = output.read().splitlines()
        found = [line for line in lines if line.startswith("{")]
        if process.returncode or not found:
            raise Skipped(f"{tool} ended with code {process.returncode}: {lines[-1] if lines else 'without a word'}")
        answer: dict[str, Any] = json.loads(found[-1])
        return answer

    def peak_bytes(self) -> int:
        return self._peak

    def close(self) -> None:
        """Nothing runs between its turns."""


def _wait(process: subprocess.Popen[bytes]) -> resource.struct_rusage:
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage
