"""Interleaved rounds over engines on the CPU, and what their medians come to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cpu_engines import Measured
from gpu_rounds import Results, StepBytes, Workload, interleave


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
    """Rounds as `interleave` says, begun by another engine each. Raises RuntimeError when an engine gives other than
    the tokens asked for."""
    return interleave(engines, what, rounds, vocab_size, lambda e, p, w: e.seconds(w, p), say, rotate=True)


def step_bytes(manifest: Mapping[str, Any]) -> StepBytes:
    """From a plan's manifest. Of the token embedding a step reads a few rows, unless it is the head, too."""
    vocab = manifest["model"]["vocab_size"]
    tables = [w for w in manifest["weights"] if w["shape"][0] == vocab]
    unread = tables[0]["size"] if len(tables) > 1 else 0
    return StepBytes(manifest["memory"]["weight_bytes"] - unread, manifest["model"]["kv_bytes_per_token"])


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
