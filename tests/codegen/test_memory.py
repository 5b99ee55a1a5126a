"""codegen/memory.py: buffers that live together never share bytes, and the arena is no larger than it must be."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.codegen.memory import ALIGN, Lifetime, plan_offsets

_SPANS = st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 12), st.integers(0, 6)), min_size=0, max_size=24)


def _lifetimes(spans: list[tuple[int, int, int]]) -> list[Lifetime]:
    return [Lifetime(f"b{i}", size, first, first + length) for i, (size, first, length) in enumerate(spans)]


@settings(deadline=None, max_examples=300, derandomize=True)
@given(_SPANS)
def test_live_buffers_are_disjoint_and_the_peak_is_bounded(spans: list[tuple[int, int, int]]) -> None:
    lifetimes = _lifetimes(spans)
    offsets, peak = plan_offsets(lifetimes)
    assert offsets.keys() == {b.name for b in lifetimes}
    assert all(at >= 0 and at % ALIGN == 0 for at in offsets.values()) and peak % ALIGN == 0
    for i, a in enumerate(lifetimes):
        for b in lifetimes[:i]:
            if a.first <= b.last and b.first <= a.last:
                lo, hi = offsets[a.name], offsets[b.name]
                assert lo + a.size <= hi or hi + b.size <= lo
    live = [sum(b.size for b in lifetimes if b.first <= t <= b.last) for t in range(20)]
    ends = [offsets[b.name] + b.size for b in lifetimes]
    assert max([*live, *ends], default=0) <= peak <= sum(-(-b.size // ALIGN) * ALIGN for b in lifetimes)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(_SPANS)
def test_the_order_of_the_buffers_does_not_matter(spans: list[tuple[int, int, int]]) -> None:
    lifetimes = _lifetimes(spans)
    shuffled = random.Random(0).sample(lifetimes, len(lifetimes))
    assert plan_offsets(shuffled) == plan_offsets(lifetimes)


def test_a_chain_takes_two_buffers() -> None:
    offsets, peak = plan_offsets([Lifetime(f"b{i:02d}", 256, i, i + 1) for i in range(20)])
    assert peak == 512 and set(offsets.values()) == {0, 256}


def test_a_buffer_goes_into_the_gap_that_fits() -> None:
    big = [Lifetime("a", 1024, 0, 9), Lifetime("b", 512, 0, 4), Lifetime("c", 512, 5, 9)]
    offsets, peak = plan_offsets([*big, Lifetime("d", 100, 3, 6)])
    assert peak == 1024 + 512 + 128 and offsets["b"] == offsets["c"] == 1024


def test_a_shared_phase_is_an_overlap() -> None:
    assert plan_offsets([Lifetime("a", 64, 0, 3), Lifetime("b", 64, 3, 5)])[1] == 128
    assert plan_offsets([Lifetime("a", 64, 0, 3), Lifetime("b", 64, 4, 5)])[1] == 64
    assert plan_offsets([]) == ({}, 0)
