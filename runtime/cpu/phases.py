"""The phases of a CPU step, as the plan's machine code describes them: what each is, reads and computes."""

from __future__ import annotations

import json
from dataclasses import dataclass

from llmc.runtime.cost import Cost


@dataclass(frozen=True)
class Phase:
    """One stretch of a step, up to where its threads may have to wait for each other.

    label: its kernels joined with "+"; a matrix product is named with the format of its weights, the one that makes
    the logits is "head". path: the module of its first call. costs: of its calls, without those that cost nothing.
    """

    label: str
    path: str
    costs: tuple[Cost, ...]


def parse_phases(text: str) -> tuple[Phase, ...]:
    """The phases of `llmc_phases`, a line of JSON each (codegen/cpu/phases.py)."""
    found = map(json.loads, text.splitlines())
    return tuple(Phase(p["label"], p["path"], tuple(Cost(**cost) for cost in p["costs"])) for p in found)
