"""What each phase of a step is and must read and compute, for a profile.

The machine code carries one line of JSON per phase; runtime/cpu/phases.py reads it.
"""

from __future__ import annotations

import json
from itertools import groupby

from llmc.codegen.cpu.call import Call
from llmc.codegen.cpu.program import Program


def phase_lines(program: Program) -> list[str]:
    """One line per phase; `Phase` in runtime/cpu/phases.py says what is in it."""
    return [_line(list(calls)) for _, calls in groupby(program.calls, key=lambda call: call.phase)]


def _line(calls: list[Call]) -> str:
    # What activations take is left out: the caches hold them.
    costs = [{k: v for k, v in call.cost.fields().items() if k != "activation_bytes"} for call in calls]
    counted = [cost for cost in costs if cost.keys() - {"rows"}]
    label = "+".join(dict.fromkeys(_label(call) for call in calls))
    return json.dumps({"label": label, "path": calls[0].path, "costs": counted}, separators=(",", ":"))


def _label(call: Call) -> str:
    """A matrix product is named with the format of its weights, the one that makes the logits is "head"."""
    if call.kernel not in ("linear", "expert_linear"):
        return call.kernel
    (matrix,) = (entry for entry in call.entries if entry.is_matrix)
    kind = "head" if call.cost.rows == "R" else "linear" if call.kernel == "linear" else "experts"
    return f"{kind} {matrix.format}"
