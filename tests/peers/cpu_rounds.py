"""Interleaved rounds over engines on the CPU, and what their medians come to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cpu_engines import Measured
from gpu_engines import Skipped
from gpu_rounds import Results, Workload


def workloads(decode: int) -> list[Workload]:
    """decode: tokens after the first of each sequence."""
    return [Workload(1, 512, 0), *(Workload(batch, 64, decode) for batch in (1, 8, 16))]


def measure(
    engines: Sequence[Measured],
    what: Sequence[Workload],
    rounds: int,
    vocab_size: int,
    say: Callable[[str], None] = lambda line: None,
) -> Results:
    """Every round runs every workload once on every engine, after a warm-up that is not measured. In each round another
    engine begins; all have the same prompts. An engine that fails is left out of what follows, by name.

    Raises RuntimeError when one gives other than the tokens that were asked for.
    """
    results = Results({workload: {} for workload in what})
    rng = np.random.default_rng(0)
    for number in range(rounds + 1):
        say(f"round {number} of {rounds}" if number else "warm-up")
        first = number % len(engines) if engines else 0
        turns = [*engines[first:], *engines[:first]]
        for workload in what:
            prompts = rng.integers(10, vocab_size, (workload.batch, workload.context)).tolist()
            for engine in turns:
                if engine.name in results.skipped:
                    continue
                try:
                    seconds = engine.seconds(workload, prompts)
                except Skipped as reason:
                    results.skipped[engine.name] = f"{workload.name}: {reason}"
                    continue
                if number:
                    results.seconds[workload].setdefault(engine.name, []).append(seconds)
    return results


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one decode step of a plan must read at least: weights, and keys and values per position."""

    weights: int
    position: int

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> StepBytes:
        """From a plan's manifest. Of the token embedding a step reads a few rows, unless it is the head, too."""
        vocab = manifest["model"]["vocab_size"]
        tables = [w for w in manifest["weights"] if w["shape"][0] == vocab]
        unread = tables[0]["size"] if len(tables) > 1 else 0
        return cls(manifest["memory"]["weight_bytes"] - unread, manifest["model"]["kv_bytes_per_token"])

    def step(self, workload: Workload) -> int:
        """In the middle of the decoding."""
        return self.weights + self.position * workload.batch * (workload.context + workload.decode // 2)


def figures(results: Results, names: Sequence[str], ours: str, read: StepBytes, bandwidth: float) -> dict[str, Any]:
    """What is reported of one format. names: the engines that began, in the order of the table. Per engine: the median
    tokens/s of each workload, how much faster ours is, and `spread`, the widest range of its rounds over their median.
    bandwidth_share: of ours, the bytes of a decode step over its time over `bandwidth` (bytes/s)."""
    engines: dict[str, Any] = {}
    for name in names:
        rates, ratios, spread = {}, {}, 0.0
        for workload, samples in results.seconds.items():
            if seconds := results.median(workload, name):
                rates[workload.name] = workload.tokens / seconds
                spread = max(spread, (max(samples[name]) - min(samples[name])) / seconds)
                if mine := results.median(workload, ours):
                    ratios[workload.name] = seconds / mine
        if rates:
            engines[name] = {"tokens_per_s": rates, "ratio": ratios, "spread": spread}
    share = {
        workload.name: read.step(workload) * workload.decode / seconds / bandwidth
        for workload in results.seconds
        if workload.decode and (seconds := results.median(workload, ours))
    }
    return {
        "engines": engines, "bandwidth": bandwidth, "bandwidth_share": share, "step_bytes": read.weights,
        "rounds_s": {w.name: samples for w, samples in results.seconds.items()}, "skipped": dict(results.skipped),
    }  # fmt: skip
