"""What a step must read and compute, whatever the kernels do: the numerators of `llmc bench`.

Read: every matrix of the step once, embedding rows per token, and the keys and values that a sequence sees, once per
sequence. Computed: multiply-adds of matrix products and of attention, two operations each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llmc.runtime.phases import Phase

UNITS = {"w8": "int8", "w4": "int4", "f32": "fp32", "bf16": "fp32"}
"""The arithmetic of a product, one of runtime/executor.py's PEAKS, by the format of the weights."""


@dataclass(frozen=True)
class Cost:
    """bytes: read from memory. ops: operations by kind of arithmetic."""

    bytes: float = 0
    ops: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: Cost) -> Cost:
        kinds = {**self.ops, **other.ops}
        return Cost(self.bytes + other.bytes, {k: self.ops.get(k, 0) + other.ops.get(k, 0) for k in kinds})

    def per(self, count: int) -> Cost:
        """The mean of `count` steps that cost this together."""
        return Cost(self.bytes / count, {kind: ops / count for kind, ops in self.ops.items()})

    @property
    def total_ops(self) -> float:
        return sum(self.ops.values())

    def seconds_at_peak(self, peaks: Mapping[str, float]) -> float:
        """The time that the operations take at `peaks`, operations/s by kind."""
        return sum(ops / peaks[kind] for kind, ops in self.ops.items())


@dataclass(frozen=True)
class StepShape:
    """spans: (first position, tokens) of every sequence of the step. num_rows: how many of them sample."""

    spans: tuple[tuple[int, int], ...]
    num_rows: int

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.spans)


def phase_cost(phase: Phase, shape: StepShape) -> Cost:
    """What one phase of one step costs."""
    rows = shape.num_tokens if phase.rows == "T" else shape.num_rows
    read = phase.row_bytes * rows + (phase.weight_bytes if rows else 0)
    ops: dict[str, float] = {}
    if phase.macs:
        ops[UNITS[phase.weight_format]] = 2.0 * phase.macs * rows
    if phase.kv_bytes:
        read += phase.kv_bytes * sum(_positions_read(start, count, phase.window) for start, count in shape.spans)
    if phase.attention_macs:
        seen = sum(_positions_seen(start, count, phase.window) for start, count in shape.spans)
        ops["fp32"] = ops.get("fp32", 0) + 2.0 * phase.attention_macs * seen
    return Cost(read, ops)


def step_cost(phases: Sequence[Phase], shape: StepShape) -> Cost:
    """What one step costs."""
    return sum((phase_cost(phase, shape) for phase in phases), Cost())


def _positions_read(start: int, count: int, window: int) -> int:
    """Positions whose keys and values any of the tokens start .. start + count - 1 sees."""
    first = max(0, start - window + 1) if window else 0
    return start + count - first


def _positions_seen(start: int, count: int, window: int) -> int:
    """The sum over the tokens start .. start + count - 1 of the positions that each sees, its own included."""
    growing = max(0, min(count, window - start)) if window else count
    return growing * (2 * start + growing + 1) // 2 + (count - growing) * window
