"""What is measured: workloads, interleaved rounds of them over engines, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from gpu_engines import Measured, Prompts, Skipped

from llmc.runtime.cost import Cost


@dataclass(frozen=True)
class Workload:
    """`batch` prompts of `context` tokens. decode: tokens after the first of each; 0: the first alone (prefill)."""

    batch: int
    context: int
    decode: int

    @property
    def name(self) -> str:
        return f"decode {self.batch} x {self.context}" if self.decode else f"prefill {self.context}"

    @property
    def length(self) -> int:
        """Tokens of a sequence at the end."""
        return self.context + self.decode + 1

    @property
    def tokens(self) -> int:
        """What tokens/s count: of the prompts, or decoded."""
        return self.batch * (self.decode or self.context)


def workloads(decode: int) -> list[Workload]:
    prefill = [Workload(1, context, 0) for context in (512, 2048)]
    return prefill + [Workload(batch, context, decode) for context in (64, 1024) for batch in (1, 8, 16, 32)]


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one decode step must read at least: weights, and keys and values per sequence and position."""

    weights: int
    context: int

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> StepBytes:
        """From the JSON of an archive (docs/gpu.md)."""
        costs = [Cost(**call["cost"]) for call in header["calls"] if call["when"] in ("always", "decode")]
        return cls(sum(c.weight_bytes for c in costs), sum(c.kv_bytes for c in costs))

    def step(self, workload: Workload) -> int:
        """In the middle of the decoding."""
        return self.weights + self.context * workload.batch * (workload.context + workload.decode // 2)


@dataclass
class Results:
    """seconds: by workload and engine, one per round; of decoding, without the prompt and the first token."""

    seconds: dict[Workload, dict[str, list[float]]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def median(self, workload: Workload, engine: str) -> float | None:
        samples = self.seconds[workload].get(engine)
        return statistics.median(samples) if samples else None


class Named(Protocol):
    """What the rounds must know of an engine."""

    @property
    def name(self) -> str: ...


Engine = TypeVar("Engine", bound=Named)


def interleave(
    engines: Sequence[Engine],
    what: Sequence[Workload],
    rounds: int,
    vocab_size: int,
    seconds: Callable[[Engine, Prompts, Workload], float],
    say: Callable[[str], None],
    warm_up: bool = True,
    rotate: bool = False,
) -> Results:
    """Every round runs every workload once on every engine, in turn, all on the same prompts. An engine that fails is
    left out of what follows, by name.

    warm_up: each runs once unmeasured before. rotate: in each round another engine begins. seconds: what is measured;
    it raises Skipped for an engine that fails.
    """
    results = Results({workload: {} for workload in what})
    rng = np.random.default_rng(0)
    for number in range(0 if warm_up else 1, rounds + 1):
        say(f"round {number} of {rounds}" if number else "warm-up")
        first = number % len(engines) if rotate and engines else 0
        turns = [*engines[first:], *engines[:first]]
        for workload in what:
            prompts = rng.integers(10, vocab_size, (workload.batch, workload.context)).tolist()
            for engine in turns:
                if engine.name in results.skipped:
                    continue
                try:
                    time = seconds(engine, prompts, workload)
                except Skipped as reason:
                    results.skipped[engine.name] = f"{workload.name}: {reason}"
                    continue
                if number:
                    results.seconds[workload].setdefault(engine.name, []).append(time)
    return results


def measure(
    engines: Sequence[Measured],
    what: Sequence[Workload],
    rounds: int,
    vocab_size: int,
    say: Callable[[str], None] = lambda line: None,
    warm_up: bool = True,
) -> Results:
    """Rounds as `interleave` says. Raises RuntimeError when an engine gives other than the tokens asked for."""
    return interleave(engines, what, rounds, vocab_size, _seconds, say, warm_up)


def _seconds(engine: Measured, prompts: Prompts, workload: Workload) -> float:
    first = _run(engine, prompts, 1, workload)
    if not workload.decode:
        return first
    return _run(engine, prompts, 1 + workload.decode, workload) - first


def _run(engine: Measured, prompts: Prompts, new: int, workload: Workload) -> float:
    seconds, tokens = engine.run(prompts, new)
    counts = [len(t) for t in tokens]
    if counts != [new] * len(prompts):
        raise RuntimeError(f"{engine.name}, {workload.name}: gave {counts} tokens, asked for {new} of each")
    return seconds


def figures(
    results: Results, engines: Sequence[str], ours: str, read: StepBytes, bandwidth: float
) -> list[dict[str, Any]]:
    """One entry per workload: tokens/s of each engine (median, and all rounds); of ours, the share of the bandwidth
    (bytes/s) that a decode step's bytes take."""
    found = []
    for workload in results.seconds:
        entry: dict[str, Any] = {"workload": workload.name, "tokens_per_s": {}, "rounds_s": results.seconds[workload]}
        for engine in engines:
            if seconds := results.median(workload, engine):
                entry["tokens_per_s"][engine] = workload.tokens / seconds
        if workload.decode and (seconds := results.median(workload, ours)):
            size = read.step(workload)
            entry |= {"step_us": seconds / workload.decode * 1e6, "step_bytes": size}
            entry["bandwidth_share"] = size / (seconds / workload.decode) / bandwidth
        found.append(entry)
    return found


def table(entries: Sequence[Mapping[str, Any]], engines: Sequence[str], ours: str) -> str:
    """Text for people."""
    header = ["tokens/s", *engines, "step us", "MB/step", "of bandwidth"]
    lines = [header]
    for entry in entries:
        rates = [f"{entry['tokens_per_s'][e]:.0f}" if e in entry["tokens_per_s"] else "" for e in engines]
        step = ["", "", ""]
        if "step_us" in entry:
            step = [f"{entry['step_us']:.0f}", f"{entry['step_bytes'] / 1e6:.1f}", f"{entry['bandwidth_share']:.0%}"]
        lines.append([entry["workload"], *rates, *step])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )
