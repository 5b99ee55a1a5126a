"""Places buffers in an arena so that buffers alive at the same time do not overlap.

Offsets are in bytes per row, because every activation has one row per token: the arena of a step of T tokens takes
peak * T bytes. Greedy by size, lowest free offset first (Pisarchyk and Lee 2020,
"greedy by size for offset calculation").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

ALIGN = 64


@dataclass(frozen=True)
class Lifetime:
    """A buffer of `size` bytes per row, alive in phases first..last, both included."""

    name: str
    size: int
    first: int
    last: int


def plan_offsets(lifetimes: list[Lifetime]) -> tuple[dict[str, int], int]:
    """(offset by name, peak), all in bytes per row and multiples of 64."""
    placed: list[tuple[Lifetime, int]] = []
    offsets: dict[str, int] = {}
    for item in sorted(lifetimes, key=lambda b: (-b.size, b.first, b.name)):
        busy = sorted(
            (offset, offset + other.size)
            for other, offset in placed
            if other.first <= item.last and item.first <= other.last
        )
        at = 0
        for begin, end in busy:
            if at + item.size <= begin:
                break
            at = max(at, -(-end // ALIGN) * ALIGN)
        placed.append((item, at))
        offsets[item.name] = at
    peak = max((offset + item.size for item, offset in placed), default=0)
    return offsets, -(-peak // ALIGN) * ALIGN


class Placeable(Protocol):
    """What a backend's buffer says of itself; `domain` names its arena."""

    name: str
    domain: str
    size: int
    first: int
    last: int


def place_buffers(buffers: Sequence[Placeable]) -> tuple[dict[str, int], dict[str, int]]:
    """(offset by buffer, peak by arena) for the arenas "tokens" and "rows", in bytes per row."""
    offsets: dict[str, int] = {}
    peaks: dict[str, int] = {}
    for domain in ("tokens", "rows"):
        lifetimes = [Lifetime(b.name, b.size, b.first, b.last) for b in buffers if b.domain == domain]
        placed, peaks[domain] = plan_offsets(lifetimes)
        offsets |= placed
    return offsets, peaks
