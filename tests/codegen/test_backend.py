"""codegen/backend.py: the table of backends, and targets by name."""

from __future__ import annotations

import pytest
from tiny_engines import lowered

from llmc.codegen.backend import BACKENDS, CPU, backend_of, parse_targets
from llmc.codegen.weights import WeightTable
from llmc.errors import UserError
from llmc.runtime.cpu.targets import DEFAULT_TARGETS


def test_no_name_means_the_defaults() -> None:
    assert parse_targets(()) == [t.name for t in DEFAULT_TARGETS]


def test_targets_come_once_each_in_the_order_of_the_plan() -> None:
    asked = ("hip:gfx942", "cuda:sm_90", "x86-64", "cuda:sm_80", "cpu:x86-64-v3", "cuda:sm_90", "cpu:x86-64")
    wanted = ["cpu:x86-64-v3", "cpu:x86-64", "cuda:sm_80", "cuda:sm_90", "hip:gfx942"]
    assert parse_targets(asked) == wanted
    assert parse_targets(("cuda:sm_90",)) == ["cuda:sm_90"], "no default joins what is named"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x86-63", r"--target x86-63: unknown target \(known: cpu:x86-64-v4"),
        ("cuda:sm_1", "--target cuda:sm_1: "),
        ("hip:gfx1", "--target hip:gfx1: unknown AMD target"),
        ("metal", r"--target metal: unknown target \(known: cpu:x86-64-v4"),
    ],
)
def test_an_unknown_target_is_named(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_targets(("native", name))


def test_every_backend_has_names_of_its_own() -> None:
    prefixes = [prefix for backend in BACKENDS for prefix in backend.prefixes]
    assert len(set(prefixes)) == len(prefixes)
    assert [backend_of(f"{p}x") for b in BACKENDS for p in b.prefixes] == [b for b in BACKENDS for _ in b.prefixes]
    assert backend_of("native") is CPU


def test_all_backends_read_one_set_of_weights() -> None:
    graph = lowered("llama", "int8").graph
    table = WeightTable()
    codes = [backend.select(graph, table, None) for backend in BACKENDS]
    assert table.entries == lowered("llama", "int8").program.weights.entries
    assert len({(code.vocab_size, code.kv_page_bytes) for code in codes}) == 1
    compiled = [code.memory({"x": b"12345"}) for code in codes]
    assert compiled[0].keys() == {"arena_bytes_per_token", "arena_bytes_per_row"}
    assert compiled[1]["gpu"]["code_bytes"] == {"x": 5}
    assert [list(code.sources) for code in codes] == [["source/step.cpp"], []]
    assert codes[0].steps("cpu:x86-64") == 0 < codes[1].steps("cuda:sm_90")
