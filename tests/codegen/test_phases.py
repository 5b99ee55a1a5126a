"""codegen/cpu/phases.py: what the machine code says of its phases, against the program and the weights."""

from __future__ import annotations

import numpy as np
import pytest
from families import VOCAB
from tiny_engines import Sequences, executor, lowered

from llmc.codegen.cpu.phases import phase_lines
from llmc.kernels.pack import LANES
from llmc.kv_page import PAGE_SIZE
from llmc.runtime.cpu.phases import Phase, parse_phases


def phases_of(family: str, precision: str) -> tuple[Phase, ...]:
    return parse_phases("\n".join(phase_lines(lowered(family, precision).program)))


@pytest.mark.parametrize(("family", "precision"), [("llama", "fp32"), ("llama", "int4"), ("gpt2", "int8")])
def test_every_matrix_is_counted_where_it_is_multiplied(family: str, precision: str) -> None:
    program, phases = lowered(family, precision).program, phases_of(family, precision)
    matrices = [e for e in program.weights.entries if e.ref is not None and len(e.ref.shape) == 2]
    read = {kernel: [e for c in program.calls if c.kernel == kernel for e in c.entries if e in matrices]
            for kernel in ("embed", "linear")}  # fmt: skip
    costs = [cost for p in phases for cost in p.costs]
    assert sum(c.weight_bytes for c in costs) == sum(e.size for e in read["linear"])
    assert sum(c.macs for c in costs) == sum(e.ref.shape[0] * e.ref.shape[1] for e in read["linear"] if e.ref)
    rows = [-(-e.ref.shape[0] // LANES) * LANES for e in read["embed"] if e.ref]
    assert sum(c.row_bytes for c in costs) == sum(e.size // n for e, n in zip(read["embed"], rows, strict=True)) > 0


def test_labels_and_domains() -> None:
    phases = phases_of("llama", "int4")
    labels = [p.label for p in phases]
    assert labels[-2:] == ["head w8", "sample"] and labels.count("linear w4") == 2 * 4
    assert labels.count("attention") == 2 and "head" in phases[-2].path
    assert [c.rows for p in phases[-3:] for c in p.costs] == ["R"]  # the head's
    assert {c.rows for p in phases[:-3] for c in p.costs} == {"T"}
    assert {c.arithmetic for p in phases if p.label.startswith("linear") for c in p.costs} == {"int4"}


@pytest.mark.parametrize(("family", "windows"), [("llama", {0}), ("gemma2", {0, 8})])
def test_attention_reads_the_pool_of_its_layer(family: str, windows: set[int]) -> None:
    program, phases = lowered(family, "int8").program, phases_of(family, "int8")
    attention = [(p, c) for p in phases for c in p.costs if c.kv_bytes]
    assert [c.kv_bytes * PAGE_SIZE for _, c in attention] == [slot.page_bytes for slot in program.kv_slots]
    assert all(p.label == "attention" for p, _ in attention) and {c.window for _, c in attention} == windows
    heads = [c.template[0] for c in program.calls if c.kernel == "attention"]
    dims = [slot.head_dim for slot in program.kv_slots]
    assert [c.attention_macs for _, c in attention] == [2 * h * d for h, d in zip(heads, dims, strict=True)]


def test_the_machine_code_tells_them_and_times_them() -> None:
    engine = executor("llama", "int8", threads=2)
    try:
        assert engine.phases == phases_of("llama", "int8")
        tokens = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
        sequences = Sequences(engine, [tokens])
        with engine.profile() as ns:
            sequences.step({0: 30})
            once = ns.copy()
            sequences.step({0: 1})
        assert (once > 0).all() and (ns > once).all() and len(ns) == len(engine.phases)
        total = ns.copy()
        sequences.step({0: 1})
        assert (ns == total).all(), "a step outside the block was counted"
    finally:
        engine.close()


def test_a_profile_changes_no_result() -> None:
    engine = executor("llama", "int8")
    try:
        tokens = np.random.default_rng(1).integers(0, VOCAB, 20).tolist()
        plain, profiled = Sequences(engine, [tokens]), Sequences(engine, [tokens])
        plain.step({0: 20})
        with engine.profile():
            profiled.step({0: 20})
        assert np.array_equal(plain.rows(0), profiled.rows(0))
    finally:
        engine.close()
