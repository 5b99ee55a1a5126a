"""What a pass says of itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import fx

from llmc.kernels.formats import F32, Format
from llmc.kernels.weights import WeightRef


@dataclass(frozen=True)
class PassContext:
    """What a pass may depend on besides the graph.

    body_format / head_format: how linears, and the head and token embedding, are stored and multiplied.
    kv_dtype: "f32", "bf16" or "int8". grids: tensors of the checkpoint that keep the grid they are stored on, with the
    format that holds it. choose: called with the exact graph, says which linears take another format than
    body_format; its answer goes before everything but grids.
    """

    body_format: Format = F32
    head_format: Format = F32
    kv_dtype: str = "f32"
    grids: Mapping[str, Format] = field(default_factory=dict)
    choose: Callable[[fx.Graph], Mapping[WeightRef, Format]] | None = None


@dataclass(frozen=True)
class PassResult:
    """count: rewrites made. skipped: nodes that almost matched, with the reason why they were left alone."""

    count: int
    skipped: list[tuple[str, str]] = field(default_factory=list)


Pass = Callable[[fx.Graph, PassContext], PassResult]
