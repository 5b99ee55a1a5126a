"""What the work of a step must read and compute, whatever kernel does it: the one form in which plans say it.

The compiler derives a `Cost` of every op once (codegen/cost.py); the machine code of CPUs and the archives of GPU code
carry them; `llmc bench`, its profile and the roofline of `llmc inspect` ask what they come to in a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepShape:
    """spans: (first position, tokens) of every sequence of the step. num_rows: how many of them sample."""

    spans: tuple[tuple[int, int], ...]
    num_rows: int

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.spans)


@dataclass(frozen=True)
class Units:
    """How a machine does the arithmetic of costs: the kind that has a peak there, by `Cost.arithmetic`. activations:
    whether their bytes count; the caches of a CPU hold them."""

    kinds: Mapping[str, str]
    activations: bool


@dataclass(frozen=True)
class Work:
    """bytes: read (and written, if activations count). ops: operations by kind of arithmetic, a multiply-add is two."""

    bytes: float = 0
    ops: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: Work) -> Work:
        kinds = {**self.ops, **other.ops}
        return Work(self.bytes + other.bytes, {k: self.ops.get(k, 0) + other.ops.get(k, 0) for k in kinds})

    def per(self, count: int) -> Work:
        """The mean of `count` steps that take this together."""
        return Work(self.bytes / count, {kind: ops / count for kind, ops in self.ops.items()})

    @property
    def total_ops(self) -> float:
        return sum(self.ops.values())

    def seconds_at_peak(self, peaks: Mapping[str, float]) -> float:
        """The time that the operations take at `peaks`, operations/s by kind."""
        return sum(ops / peaks[kind] for kind, ops in self.ops.items())


@dataclass(frozen=True)
class Cost:
    """What some work of a step must read and compute.

    rows: what it is done for, "T" tokens or "R" sampled rows. weight_bytes: of matrices, read whole in a step that has
    such rows. row_bytes: of tables, for every row. activation_bytes: of values read and written, for every row.
    macs: multiply-adds of matrix products, for every row. kv_bytes: of keys and values, for every position that a
    sequence sees. attention_macs: for every token and position that it sees. window: positions that a token sees at
    most; 0: all before it. arithmetic: what is multiplied: "int8", "int4" (with int8), "float16" of any kind,
    "float32"; "" nothing. experts, top_k: the matrices are those of so many experts, of which each row reads top_k;
    how many a step reads is what independent even choices come to.
    """

    rows: str = "T"
    weight_bytes: int = 0
    row_bytes: int = 0
    activation_bytes: int = 0
    macs: int = 0
    kv_bytes: int = 0
    attention_macs: int = 0
    window: int = 0
    arithmetic: str = ""
    experts: int = 0
    top_k: int = 0

    def fields(self) -> dict[str, Any]:
        """For JSON, without what is at its default; `Cost(**fields)` reads it."""
        plain = asdict(Cost())
        return {name: value for name, value in asdict(self).items() if value != plain[name]}

    def read_share(self, rows: int) -> float:
        """The part of the matrices that a step with so many rows reads."""
        if not self.experts:
            return 1.0 if rows else 0.0
        return 1.0 - (1.0 - self.top_k / self.experts) ** rows

    def work(self, shape: StepShape, units: Units) -> Work:
        """What it comes to in a step."""
        rows = shape.num_tokens if self.rows == "T" else shape.num_rows
        moved = self.row_bytes * rows + self.weight_bytes * self.read_share(rows)
        if units.activations:
            moved += self.activation_bytes * rows
        macs = self.macs * rows
        if self.kv_bytes:
            moved += self.kv_bytes * sum(_positions_read(start, count, self.window) for start, count in shape.spans)
        if self.attention_macs:
            seen = sum(_positions_seen(start, count, self.window) for start, count in shape.spans)
            macs += self.attention_macs * seen
        return Work(moved, {units.kinds[self.arithmetic]: 2.0 * macs} if macs else {})


def _positions_read(start: int, count: int, window: int) -> int:
    """Positions whose keys and values any of the tokens start .. start + count - 1 sees."""
    first = max(0, start - window + 1) if window else 0
    return start + count - first


def _positions_seen(start: int, count: int, window: int) -> int:
    """The sum over the tokens start .. start + count - 1 of the positions that each sees, its own included."""
    growing = max(0, min(count, window - start)) if window else count
    return growing * (2 * start + growing + 1) // 2 + (count - growing) * window
