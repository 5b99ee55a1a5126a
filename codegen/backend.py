"""What a backend is, and which there are: the one place where a new one is named.

A backend turns a lowered graph into the code of its targets. Targets go by name everywhere, "cuda:sm_90"; what the name
means is the backend's own. What runs the code is the loader's matter: runtime/load.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import fx

from llmc.codegen.cpu.backend import CpuBackend
from llmc.codegen.triton.backend import TritonBackend
from llmc.codegen.weights import WeightTable

Advance = Callable[[int], None]
"""Told how many steps are done since it was told last."""


class Code(Protocol):
    """What a backend made of one lowered graph, for any of its targets.

    kv_page_bytes: of one page of the KV pool, all layers. sources: segments of the plan besides the code.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def kv_page_bytes(self) -> int: ...

    @property
    def sources(self) -> Mapping[str, bytes]: ...

    def steps(self, target: str) -> int:
        """How many steps `compile` reports; 0: it reports none, and may run in the background."""
        ...

    def compile(self, target: str, advance: Advance) -> bytes:
        """The segment code/TARGET. Raises UserError for what cannot be compiled for this target."""
        ...

    def memory(self, compiled: Mapping[str, bytes]) -> dict[str, Any]:
        """What the manifest says under "memory", given the code of every target of the plan."""
        ...


class Backend(Protocol):
    """prefixes: that its targets' names begin with. tools: packages whose versions its code depends on, besides those
    of every build."""

    @property
    def prefixes(self) -> tuple[str, ...]: ...

    @property
    def tools(self) -> tuple[str, ...]: ...

    def parse(self, names: Sequence[str]) -> list[str]:
        """The targets of what the user wrote, each once, in the order of the plan. Raises UserError for a name that is
        not known."""
        ...

    def select(self, graph: fx.Graph, table: WeightTable, cxx: str | None) -> Code:
        """Chooses kernels; `table` gets the weights that they read. cxx: another C++ compiler, for experiments.

        Raises UserError for what no kernel handles, naming the op and module.
        """
        ...


CPU = CpuBackend()
BACKENDS: tuple[Backend, ...] = (CPU, TritonBackend())
"""In the order in which their code stands in a plan. A name that begins like no other's target is a CPU's."""


def backend_of(target: str) -> Backend:
    """The backend that a target's name belongs to."""
    return next((b for b in BACKENDS if target.startswith(b.prefixes)), CPU)


def parse_targets(names: Sequence[str]) -> list[str]:
    """The targets of a build, in the order of the plan; no name: the CPU's defaults. Raises UserError for a name that
    is not known."""
    if not names:
        return CPU.defaults()
    return [target for b in BACKENDS for target in b.parse([n for n in names if backend_of(n) is b])]
