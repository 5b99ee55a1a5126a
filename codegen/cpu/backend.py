"""The CPU as a backend: one C++ unit for all targets, compiled for each (see codegen/backend.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from llmc.codegen.cpu.compile import compile_unit
from llmc.codegen.cpu.emit import emit_unit
from llmc.codegen.cpu.program import Program, select_kernels
from llmc.codegen.weights import WeightTable
from llmc.runtime.cpu.targets import CPU_TARGETS, DEFAULT_TARGETS, parse_target


@dataclass(frozen=True)
class CpuCode:
    """A program and its C++."""

    program: Program
    unit: str
    cxx: str | None

    @property
    def vocab_size(self) -> int:
        return self.program.vocab_size

    @property
    def kv_page_bytes(self) -> int:
        return sum(slot.page_bytes for slot in self.program.kv_slots)

    @property
    def sources(self) -> Mapping[str, bytes]:
        return {"source/step.cpp": self.unit.encode()}

    def steps(self, target: str) -> int:
        return 0

    def compile(self, target: str, advance: Callable[[int], None]) -> bytes:
        return compile_unit(self.unit, parse_target(target), self.cxx)

    def memory(self, compiled: Mapping[str, bytes]) -> dict[str, Any]:
        return {f"arena_bytes_per_{name}": self.program.peaks[f"{name}s"] for name in ("token", "row")}


@dataclass(frozen=True)
class CpuBackend:
    """Code for CPUs (docs/kernels.md)."""

    prefixes: tuple[str, ...] = ("cpu:",)
    tools: tuple[str, ...] = ()

    def defaults(self) -> list[str]:
        """The targets of a build that names none."""
        return [target.name for target in DEFAULT_TARGETS]

    def parse(self, names: Sequence[str]) -> list[str]:
        found = {parse_target(name).name for name in names}
        return [target.name for target in CPU_TARGETS if target.name in found]

    def select(self, graph: fx.Graph, table: WeightTable, cxx: str | None) -> CpuCode:
        program = select_kernels(graph, table)
        return CpuCode(program, emit_unit(program), cxx)
