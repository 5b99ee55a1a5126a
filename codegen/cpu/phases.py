"""What each phase of a step is and must read and compute, for a profile: read off the calls of the program.

The machine code carries one line per phase; runtime/phases.py reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

from llmc.codegen.cpu.program import Call, Program
from llmc.codegen.weights import Entry
from llmc.kernels.pack import LANES
from llmc.passes.kv_layout import PAGE_SIZE, KVSlot

_KERNEL = re.compile(r"\w+")
_TEMPLATE = re.compile(r"^\w+<(\d+)")
_ROWS = re.compile(r"\((?:par|own_tokens|own_rows), ([TR])\b")
_WEIGHT = re.compile(r"\bweight\(e, (0x[0-9a-f]+)")
_WINDOW = re.compile(r"\bAttentionParams\{[^,]+, (\d+)")


def phase_lines(program: Program) -> list[str]:
    """One line per phase, its fields separated by tabs; `Phase` in runtime/phases.py says what they are."""
    slots = iter(program.kv_slots)
    phases = groupby(program.calls, key=lambda call: call.phase)
    return [_line(list(calls), program.weights.entries, slots) for _, calls in phases]


def _line(calls: list[Call], entries: list[Entry], slots: Iterator[KVSlot]) -> str:
    names: list[str] = []
    rows, weight_format = "T", ""
    weight_bytes = row_bytes = macs = kv_bytes = attention_macs = window = 0
    for call in calls:
        kernel = _kernel(call)
        found = _ROWS.search(call.text)
        rows = found[1] if found else "R" if kernel == "sample" else rows
        name = kernel
        for entry in _weights(call, entries):
            assert entry.ref is not None
            weight_format = entry.format
            if kernel == "embed":
                row_bytes += entry.size // (-(-entry.ref.shape[0] // LANES) * LANES)
                continue
            weight_bytes += entry.size
            macs += entry.ref.shape[0] * entry.ref.shape[1]
            name = f"{'head' if rows == 'R' else kernel} {entry.format}"
        if kernel == "attention":
            slot, heads, found = next(slots), _TEMPLATE.match(call.text), _WINDOW.search(call.text)
            assert heads is not None and found is not None, call.text
            kv_bytes, window = slot.page_bytes // PAGE_SIZE, int(found[1])
            attention_macs = 2 * int(heads[1]) * slot.head_dim
        if name not in names:
            names.append(name)
    fields = (rows, weight_format, weight_bytes, row_bytes, macs, kv_bytes, attention_macs, window)
    return "\t".join(["+".join(names), calls[0].path, *map(str, fields)])


def _kernel(call: Call) -> str:
    found = _KERNEL.match(call.text)
    assert found is not None, call.text
    return found[0]


def _weights(call: Call, entries: list[Entry]) -> Iterator[Entry]:
    """The matrices that a call reads."""
    for offset in _WEIGHT.findall(call.text):
        yield next(e for e in entries if e.offset <= int(offset, 16) < e.offset + e.size)
