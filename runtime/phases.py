"""The phases of a CPU step, as the plan's machine code describes them: what each is, reads and computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """One stretch of a step, up to where its threads may have to wait for each other.

    label: its kernels joined with "+"; a matrix product is named with the format of its weights, the one that makes
    the logits is "head". path: the module of its first call. rows: "T", it works on tokens, or "R", on sampled rows.
    weight_format: "f32", "bf16", "w8" or "w4" of the matrices that it reads, or "". weight_bytes: of matrices, read
    whole in a step. row_bytes: read for every row (of the token embedding). macs: multiply-adds of matrix products for
    every row. kv_bytes: of keys and values, for every visible position of a sequence. attention_macs: for every token
    and position that it sees. window: positions that a token sees at most; 0: all before it.
    """

    label: str
    path: str
    rows: str
    weight_format: str
    weight_bytes: int
    row_bytes: int
    macs: int
    kv_bytes: int
    attention_macs: int
    window: int


def parse_phases(text: str) -> tuple[Phase, ...]:
    """The phases of `llmc_phases` (codegen/cpu/emit.py): a line each, fields separated by tabs."""
    phases = []
    for line in text.splitlines():
        label, path, rows, weight_format, *numbers = line.split("\t")
        phases.append(Phase(label, path, rows, weight_format, *map(int, numbers)))
    return tuple(phases)
