"""Engines that `gpu.py` measures: llmc in this process, peers each in a process of its own (gpu_worker.py)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from llmc.runtime.engine import Engine
from llmc.runtime.request import Request, SamplingParams

Prompts = list[list[int]]
_START_S = 900
"""Until a peer has loaded, which may compile."""


class Skipped(Exception):
    """An engine that cannot be measured here; the message says why."""


class Measured(Protocol):
    """An engine that continues prompts greedily, past any end of text."""

    name: str

    def run(self, prompts: Prompts, new: int) -> tuple[float, Prompts]:
        """Seconds from all prompts at hand to all of `new` tokens after each, and these tokens."""
        ...

    def close(self) -> None: ...


class Ours:
    """llmc's engine as `llmc serve` runs it, without HTTP and text: scheduler, batches, executor."""

    name = "llmc"

    def __init__(self, engine: Engine) -> None:
        """engine: not yet started; this owns it."""
        self._engine = engine
        self._engine.start()
        self._loop = asyncio.new_event_loop()
        self._requests = 0

    def run(self, prompts: Prompts, new: int) -> tuple[float, Prompts]:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        first = self._requests
        self._requests += len(prompts)
        requests = [Request(str(first + i), tuple(p), params) for i, p in enumerate(prompts)]
        start = time.perf_counter()
        outputs = self._loop.run_until_complete(self._collect(requests))
        return time.perf_counter() - start, [outputs[r.request_id] for r in requests]

    async def _collect(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {r.request_id: [] for r in requests}
        stream = self._engine.open_stream(requests)
        try:
            async for output in stream:
                tokens[output.request_id] += output.token_ids
        finally:
            stream.close()
        return tokens

    def close(self) -> None:
        self._engine.close()
        self._loop.close()


class WorkerProcess:
    """An engine in a process of its own, so that its libraries and memory are apart from ours. It talks in lines of
    JSON: first {"versions": …} or {"skipped": reason}, then one line for each of its standard input."""

    def __init__(self, name: str, command: Sequence[str], without: str) -> None:
        """Raises Skipped when it cannot run here. without: an environment variable that it must not see."""
        self.name = name
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 (open as long as the process)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            start_new_session=True, env={k: v for k, v in os.environ.items() if k != without},
        )  # fmt: skip
        try:
            answer = self._receive()
        except BaseException:
            self.close()
            raise
        if "skipped" in answer:
            self.close()
            raise Skipped(answer["skipped"])
        self.versions: dict[str, str] = answer["versions"]

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request. Raises Skipped when the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise Skipped(self._last_words()) from error
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(_START_S)
            raise Skipped(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"it ended with code {self._process.poll()}: {lines[-1] if lines else 'without a word'}"

    def close(self) -> None:
        """With what it started: a peer may have processes of its own."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # of a request that was never read
        self._log.close()


class Peer(WorkerProcess):
    """A peer on a GPU (gpu_worker.py)."""

    def __init__(self, name: str, checkpoint: Path, device: str, max_length: int, max_batch: int) -> None:
        """Raises Skipped when it cannot run here. max_length: prompt and output tokens of a sequence."""
        command = [sys.executable, Path(__file__).with_name("gpu_worker.py"), name, checkpoint, device]
        super().__init__(name, [*map(str, command), str(max_length), str(max_batch)], "TRITON_INTERPRET")

    def run(self, prompts: Prompts, new: int) -> tuple[float, Prompts]:
        answer = self.ask({"prompts": prompts, "new": new})
        return answer["seconds"], answer["tokens"]
