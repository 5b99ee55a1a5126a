"""runtime/cost.py and llmc/bench_cost.py: bytes and operations of a step, against counting them one by one."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from llmc.bench_cost import phase_work, step_work
from llmc.runtime.cost import Cost, StepShape, Units, Work
from llmc.runtime.cpu.phases import Phase

EMBED = Phase("embed", "e", (Cost("T", row_bytes=7),))
LINEAR = Phase("linear w4", "l", (Cost("T", 1000, macs=600, arithmetic="int4"),))
HEAD = Phase("head w8", "h", (Cost("R", 500, macs=300, arithmetic="int8"),))


def attention(window: int) -> Phase:
    return Phase("attention", "a", (Cost("T", kv_bytes=10, attention_macs=3, window=window, arithmetic="float16"),))


def visible(position: int, window: int) -> set[int]:
    return {p for p in range(position + 1) if not window or p > position - window}


@pytest.mark.parametrize("window", [0, 1, 4, 5, 100])
@pytest.mark.parametrize("spans", [((0, 1),), ((0, 9),), ((7, 1), (3, 1)), ((2, 6), (20, 5))])
def test_attention_is_counted_by_what_tokens_see(window: int, spans: tuple[tuple[int, int], ...]) -> None:
    work = phase_work(attention(window), StepShape(spans, 0))
    read = sum(len(set().union(*(visible(p, window) for p in range(a, a + n)))) for a, n in spans)
    seen = sum(len(visible(p, window)) for a, n in spans for p in range(a, a + n))
    assert work.bytes == 10 * read and work.ops == {"fp32": 2 * 3 * seen}


def test_weights_are_read_once_and_multiplied_for_every_row() -> None:
    shape = StepShape(((0, 5), (9, 1)), 2)
    work = step_work([EMBED, LINEAR, HEAD], shape)
    assert work.bytes == 7 * 6 + 1000 + 500
    assert work.ops == {"int4": 2 * 600 * 6, "int8": 2 * 300 * 2}


def test_a_step_that_samples_nothing_reads_no_head() -> None:
    assert phase_work(HEAD, StepShape(((0, 5),), 0)).bytes == 0


def test_mixed_arithmetic_is_weighed_by_its_peaks() -> None:
    work = Work(0, {"fp32": 100.0, "int8": 400.0})
    assert work.seconds_at_peak({"fp32": 100.0, "int8": 200.0, "int4": 1.0}) == 3.0
    assert (work + work).per(2) == work


def test_activations_count_where_no_cache_holds_them() -> None:
    cost = Cost("T", 1000, activation_bytes=8, macs=1, arithmetic="int8")
    shape = StepShape(((0, 5),), 0)
    assert cost.work(shape, Units({"int8": "int8"}, activations=False)).bytes == 1000
    assert cost.work(shape, Units({"int8": "int8"}, activations=True)) == Work(1040, {"int8": 10.0})


def test_of_experts_those_that_tokens_choose_are_read() -> None:
    """Counted over every way in which three tokens choose two of four: none of them is likelier than another."""
    cost = Cost("T", 400, macs=10, arithmetic="int8", experts=4, top_k=2)
    units = Units({"int8": "int8"}, activations=False)
    pairs = list(combinations(range(4), 2))
    for tokens in (1, 2, 3):
        read = [len(set().union(*chosen)) for chosen in product(pairs, repeat=tokens)]
        work = cost.work(StepShape(((0, tokens),), 0), units)
        assert work.bytes == pytest.approx(100 * sum(read) / len(read)) and work.ops == {"int8": 20.0 * tokens}
    assert cost.work(StepShape((), 0), units).bytes == 0 and Cost(**cost.fields()) == cost


def test_a_cost_comes_back_from_its_fields() -> None:
    cost = Cost("R", 3, attention_macs=5, window=7, arithmetic="float16")
    assert cost.fields() == {"rows": "R", "weight_bytes": 3, "attention_macs": 5, "window": 7, "arithmetic": "float16"}
    assert Cost(**cost.fields()) == cost and Cost().fields() == {}
