"""GPUs as a backend: launches of Triton kernels, compiled ahead of time into an archive per target (see
codegen/backend.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from llmc.codegen.triton.archive import GpuTarget, count_kernels, emit_archive
from llmc.codegen.triton.compile import find_hip_target
from llmc.codegen.triton.launch import GpuProgram
from llmc.codegen.triton.select import select_launches
from llmc.codegen.weights import WeightTable
from llmc.runtime.cuda.targets import CUDA_TARGETS, find_cuda_target


@dataclass(frozen=True)
class TritonCode:
    """The launches of a step."""

    program: GpuProgram

    @property
    def vocab_size(self) -> int:
        return self.program.vocab_size

    @property
    def kv_page_bytes(self) -> int:
        return sum(layer.page_bytes for layer in self.program.kv)

    @property
    def sources(self) -> Mapping[str, bytes]:
        return {}

    def steps(self, target: str) -> int:
        return count_kernels(self.program, _find(target))

    def compile(self, target: str, advance: Callable[[int], None]) -> bytes:
        return emit_archive(self.program, _find(target), advance)

    def memory(self, compiled: Mapping[str, bytes]) -> dict[str, Any]:
        """Memory on the device; the plan's weights are repacked there, none is stored twice."""
        gpu = {
            "weight_bytes": self.program.weight_bytes,
            "arena_bytes_per_token": self.program.arena["tokens"],
            "arena_bytes_per_row": self.program.arena["rows"],
            "launches": len(self.program.launches),
            "code_bytes": {name: len(data) for name, data in compiled.items()},
        }
        return {"gpu": gpu}


@dataclass(frozen=True)
class TritonBackend:
    """Code for NVIDIA GPUs, and for AMD's as an experiment (docs/gpu.md)."""

    prefixes: tuple[str, ...] = ("cuda", "hip")
    tools: tuple[str, ...] = ("triton",)

    def parse(self, names: Sequence[str]) -> list[str]:
        found = list(dict.fromkeys(_find(name).name for name in names))
        cuda = [target.name for target in CUDA_TARGETS]
        return [*(name for name in cuda if name in found), *(name for name in found if name not in cuda)]

    def select(self, graph: fx.Graph, table: WeightTable, cxx: str | None) -> TritonCode:
        return TritonCode(select_launches(graph, table, "bf16"))


def _find(name: str) -> GpuTarget:
    return find_hip_target(name) if name.startswith("hip") else find_cuda_target(name)
