"""What the steps of `llmc bench` must read and compute on a CPU: the numerators of its figures."""

from __future__ import annotations

from collections.abc import Sequence

from llmc.runtime.cost import StepShape, Units, Work
from llmc.runtime.cpu.phases import Phase

CPU_UNITS = Units({"int8": "int8", "int4": "int4", "float16": "fp32", "float32": "fp32"}, activations=False)
"""Kinds of runtime/cpu/executor.py's PEAKS."""


def phase_work(phase: Phase, shape: StepShape) -> Work:
    """What one phase of one step comes to."""
    return sum((cost.work(shape, CPU_UNITS) for cost in phase.costs), Work())


def step_work(phases: Sequence[Phase], shape: StepShape) -> Work:
    """What one step comes to."""
    return sum((phase_work(phase, shape) for phase in phases), Work())
