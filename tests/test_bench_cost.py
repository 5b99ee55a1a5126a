"""llmc/bench_cost.py: bytes and operations of a step, against counting them one by one."""

from __future__ import annotations

import pytest

from llmc.bench_cost import Cost, StepShape, phase_cost, step_cost
from llmc.runtime.phases import Phase

EMBED = Phase("embed", "e", "T", "w8", 0, 7, 0, 0, 0, 0)
LINEAR = Phase("linear w4", "l", "T", "w4", 1000, 0, 600, 0, 0, 0)
HEAD = Phase("head w8", "h", "R", "w8", 500, 0, 300, 0, 0, 0)


def attention(window: int) -> Phase:
    return Phase("attention", "a", "T", "", 0, 0, 0, 10, 3, window)


def visible(position: int, window: int) -> set[int]:
    return {p for p in range(position + 1) if not window or p > position - window}


@pytest.mark.parametrize("window", [0, 1, 4, 5, 100])
@pytest.mark.parametrize("spans", [((0, 1),), ((0, 9),), ((7, 1), (3, 1)), ((2, 6), (20, 5))])
def test_attention_is_counted_by_what_tokens_see(window: int, spans: tuple[tuple[int, int], ...]) -> None:
    cost = phase_cost(attention(window), StepShape(spans, 0))
    read = sum(len(set().union(*(visible(p, window) for p in range(a, a + n)))) for a, n in spans)
    seen = sum(len(visible(p, window)) for a, n in spans for p in range(a, a + n))
    assert cost.bytes == 10 * read and cost.ops == {"fp32": 2 * 3 * seen}


def test_weights_are_read_once_and_multiplied_for_every_row() -> None:
    shape = StepShape(((0, 5), (9, 1)), 2)
    cost = step_cost([EMBED, LINEAR, HEAD], shape)
    assert cost.bytes == 7 * 6 + 1000 + 500
    assert cost.ops == {"int4": 2 * 600 * 6, "int8": 2 * 300 * 2}


def test_a_step_that_samples_nothing_reads_no_head() -> None:
    assert phase_cost(HEAD, StepShape(((0, 5),), 0)).bytes == 0


def test_mixed_arithmetic_is_weighed_by_its_peaks() -> None:
    cost = Cost(0, {"fp32": 100.0, "int8": 400.0})
    assert cost.seconds_at_peak({"fp32": 100.0, "int8": 200.0, "int4": 1.0}) == 3.0
    assert (cost + cost).per(2) == cost
