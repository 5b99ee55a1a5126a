"""Measures `llmc serve` on this machine's CPU, for one plan:

- start: from the start of the process to the first token over HTTP, the plan's file in the page cache;
- rate: 16 clients that stream, beside the engine alone (cpu_worker.py), interleaved, on the same prompts;
- host: what the server's process does beside its kernels (scheduling, batches, text, HTTP), as a share of its CPU time;
- memory: the most that is resident, beside the sizes of file and KV pool.

The clients run on the same cores and take their time from the server. The result goes to stdout and, as a section of
its own, to docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # llmc, from a checkout that is not installed

import numpy as np
from cpu_engines import Limits, Worker, decode_seconds
from cpu_report import machine_line, publish, section_name, this_machine
from cpu_worker import Clock
from gpu_engines import Prompts
from gpu_rounds import Workload

from llmc.errors import UserError
from llmc.runtime.plan import Plan, manifest_fields
from llmc.runtime.threads import default_threads

SEQUENCES, CONTEXT = 16, 64
KV_BYTES = 256 << 20
START_S = 60
"""Until a server that does not answer has failed."""


class Server:
    """`llmc serve` in a process of its own."""

    def __init__(self, plan: Path, limits: Limits) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = int(probe.getsockname()[1])
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 (open as long as the process)
        flags = {
            "port": self._port, "threads": limits.threads, "max-model-len": limits.length,
            "served-model-name": "bench",
            "max-num-seqs": limits.batch, "max-num-batched-tokens": limits.prompt_tokens, "kv-cache-memory": KV_BYTES,
        }  # fmt: skip
        command = [sys.executable, "-m", "llmc.cli", "serve", str(plan), "--no-prefix-cache"]
        command += [f"--{k}={v}" for k, v in flags.items()]
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, start_new_session=True, cwd=Path(__file__).parents[2]
        )

    async def stream(self, prompt: list[int], new: int, sequence: int, clock: Clock) -> None:
        """One streamed completion of `new` tokens, greedy. An event with a choice is a token; there is none for a token
        whose text is not whole yet. The usage at the end must say how many were asked for. Raises ConnectionError while
        nobody listens, UserError for a model whose tokens have no text, RuntimeError for any other answer."""
        body = json.dumps({
            "model": "bench", "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        }).encode()  # fmt: skip
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            events, usage = 0, b""
            async for line in reader:
                if line.startswith(b"data: {") and b'"choices":[{' in line:
                    events += 1
                    clock.add(sequence, [0])
                elif line.startswith(b"data: {"):
                    usage = line
                elif line.startswith(b"HTTP/") and b" 200 " not in line:
                    raise RuntimeError(f"the server answered {line.decode().strip()}")
        finally:
            writer.close()
        given = json.loads(usage[len("data: ") :] or "{}").get("usage", {}).get("completion_tokens")
        if given != new:
            raise RuntimeError(f"the server says that it gave {given} tokens, asked for {new}")
        if events < new // 2:
            raise UserError("most tokens of this model have no text; without it no client sees when they come")
        clock.add(sequence, [0] * (new - events))

    async def first_token(self, started: float) -> float:
        """Seconds from `started` (time.perf_counter) until a client that keeps trying has its first token."""
        while True:
            clock = Clock(1)
            try:
                await self.stream([1, 2, 3, 4], 1, 0, clock)
            except ConnectionError:
                if self._process.poll() is not None or time.perf_counter() - started > START_S:
                    raise RuntimeError(f"the server did not start: {self._last_words()}") from None
                await asyncio.sleep(0.005)
                continue
            return time.perf_counter() - started

    def _last_words(self) -> str:
        self._log.seek(0)
        return (self._log.read().decode(errors="replace").strip().splitlines() or ["without a word"])[-1]

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)

    def memory(self) -> dict[str, int]:
        """Bytes: the most that was resident, and of what is now, the part that no other process could share."""
        status = dict(line.split(":", 1) for line in self._proc("status").splitlines())
        peak, anonymous = (int(status[name].split()[0]) * 1024 for name in ("VmHWM", "RssAnon"))
        return {"peak_bytes": peak, "anonymous_bytes": anonymous}

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU time until now of all threads, and of one that runs nothing but kernels (0 when there is none)."""
        total, kernels = 0.0, 0.0
        for task in Path(f"/proc/{self._process.pid}/task").iterdir():
            seconds = int((task / "schedstat").read_text().split()[0]) / 1e9
            total += seconds
            if (task / "comm").read_text().strip() == "llmc-pool-1":
                kernels = seconds
        return total, kernels

    def _proc(self, name: str) -> str:
        return Path(f"/proc/{self._process.pid}/{name}").read_text()

    def close(self) -> None:
        if self._process.poll() is None:
            self.signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()


def measure_starts(plan: Path, limits: Limits, count: int) -> list[float]:
    """Seconds to the first token of `count` servers, one after the other; one more comes first and is not counted."""
    seconds = []
    for _ in range(count + 1):
        started = time.perf_counter()
        server = Server(plan, limits)
        try:
            seconds.append(asyncio.run(server.first_token(started)))
        finally:
            server.close()
    return seconds[1:]


async def serve_all(server: Server, prompts: Prompts, new: int) -> dict[str, Any]:
    clock = Clock(len(prompts))
    await asyncio.gather(*(server.stream(prompt, new, i, clock) for i, prompt in enumerate(prompts)))
    return clock.answer()


def measure_rates(plan: Path, limits: Limits, rounds: int, decode: int, vocab_size: int) -> dict[str, Any]:
    """Tokens/s of the server and of the engine alone in each round, the host's share of the server's CPU time in the
    rounds, and its memory after them. A first round is not counted."""
    workload = Workload(SEQUENCES, CONTEXT, decode)
    rng = np.random.default_rng(0)
    engine = Worker("engine", sys.executable, "llmc", plan, limits)
    server = Server(plan, limits)
    rates: dict[str, list[float]] = {"server": [], "engine": []}
    hosts = []
    try:
        asyncio.run(server.first_token(time.perf_counter()))
        for _ in range(rounds + 1):
            prompts = rng.integers(10, vocab_size, (SEQUENCES, CONTEXT)).tolist()
            server.signal(signal.SIGSTOP)
            rates["engine"].append(workload.tokens / engine.seconds(workload, prompts))
            server.signal(signal.SIGCONT)
            before = server.cpu_seconds()
            answer = asyncio.run(serve_all(server, prompts, decode + 1))
            total, kernels = (b - a for a, b in zip(before, server.cpu_seconds(), strict=True))
            rates["server"].append(workload.tokens / decode_seconds(answer, workload))
            hosts.append(1 - kernels * limits.threads / total)
        memory = server.memory()
    finally:
        server.close()
        engine.close()
    found: dict[str, Any] = {"tokens_per_s": {name: values[1:] for name, values in rates.items()}, "memory": memory}
    return found | ({"host_share": hosts[1:]} if limits.threads > 1 else {})


def run(plan: Path, threads: int, starts: int, rounds: int, decode: int) -> dict[str, Any]:
    """All that the script says, as JSON has it."""
    with manifest_fields(plan):
        vocab_size = int(Plan.open(plan).manifest["model"]["vocab_size"])
    limits = Limits(threads, CONTEXT + decode + 1, SEQUENCES, SEQUENCES * CONTEXT)
    return {
        "plan": plan.name, "date": datetime.date.today().isoformat(), "machine": this_machine(), "threads": threads,
        "file_bytes": plan.stat().st_size, "kv_bytes": KV_BYTES, "decode": decode,
        "first_token_s": measure_starts(plan, limits, starts),
        **measure_rates(plan, limits, rounds, decode, vocab_size),
    }  # fmt: skip


def section(found: dict[str, Any], name: str) -> str:
    """Markdown of what `run` returned."""
    rates = found["tokens_per_s"]
    server, engine = (statistics.median(rates[who]) for who in ("server", "engine"))
    ratios = [a / b for a, b in zip(rates["server"], rates["engine"], strict=True)]
    starts, memory = found["first_token_s"], found["memory"]
    extra = memory["peak_bytes"] - found["file_bytes"] - found["kv_bytes"]
    lines = [
        f"## Serving {name}", "", machine_line(found), "",
        f"- First token over HTTP {statistics.median(starts):.2f} s after the start of the process "
        f"({min(starts):.2f}-{max(starts):.2f}, {len(starts)} starts, the file in the page cache).",
        f"- {SEQUENCES} streams of {found['decode']} tokens: {server:.0f} tokens/s, the engine alone {engine:.0f}; "
        f"in the same round {statistics.median(ratios):.0%} ({min(ratios):.0%}-{max(ratios):.0%}, {len(ratios)} "
        "rounds).",
    ]  # fmt: skip
    if hosts := found.get("host_share"):
        lines.append(
            f"- Everything but kernels (scheduling, batches, text, HTTP): {statistics.median(hosts):.1%} of the "
            "server's CPU time in these rounds."
        )
    mib = {name: size / 2**20 for name, size in (memory | {"extra": extra}).items()}
    lines.append(
        f"- Peak memory {mib['peak_bytes']:.0f} MiB: the file's {found['file_bytes'] / 2**20:.0f}, a KV pool of "
        f"{found['kv_bytes'] / 2**20:.0f}, and {mib['extra']:+.0f}; {mib['anonymous_bytes']:.0f} are not of the file."
    )
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--name", help="of the model, for the section (default: the file's name)")
    parser.add_argument("--threads", type=int, default=default_threads(), help="of the engine (default: cores)")
    parser.add_argument("--starts", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decode", type=int, default=128, help="tokens of each stream after the first")
    parser.add_argument("--no-docs", action="store_true", help="leave docs/benchmarks.md as it is")
    given = parser.parse_args(arguments)
    numbers = given.threads, given.starts, given.rounds, given.decode
    if min(numbers) < 1:
        parser.error("numbers must be at least 1")
    name = section_name({"model": given.name or given.plan.stem, "machine": this_machine()})
    return publish(
        "serving.py", f"serving {name}", lambda: section(run(given.plan.absolute(), *numbers), name), not given.no_docs
    )


if __name__ == "__main__":
    sys.exit(main())
