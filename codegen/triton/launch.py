"""What the GPU backend lowers a graph to: buffers in an arena and a straight list of kernel launches.

Nothing here depends on a compute capability; `configs.py` chooses the tiles and `archive.py` has them compiled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmc.runtime.cost import Cost

Arg = tuple[str | int, ...]
"""Where an argument points, as the archive writes it: ("tokens", bytes per row), ("weight", offset), …"""
Dim = int | tuple[str, int | str]
"""A grid dimension: a number, or (symbol, per) = ceil(symbol / per), where `per` may be a constant's name."""


ACTIVATIONS = Cost()
"""Of a launch that reads and writes activations alone."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch before its tiles are chosen.

    op: label for people. function: "module.function" in kernels/triton. args: every parameter that is a pointer, in the
    kernel's order: (name, pointer type, where it points). constants: all others except those of the configuration.
    tiles: which table of configs.py gives them. when: "always", "decode", "prefill", "adjust". cost: see
    codegen/cost.py; its rows are what the step's size is counted in.
    """

    op: str
    function: str
    args: tuple[tuple[str, str, Arg], ...]
    constants: Mapping[str, Any]
    grid: tuple[Dim, ...]
    path: str
    tiles: str = "row"
    when: str = "always"
    cost: Cost = ACTIVATIONS


@dataclass
class Buffer:
    """Storage of one value in one form; `size` bytes per row, alive from launch `first` to `last`."""

    name: str
    domain: str
    size: int
    form: str
    width: int
    """Elements per row: the row stride of the values."""
    first: int
    last: int


@dataclass(frozen=True)
class KVLayer:
    """One layer's part of the KV pool in bytes per page: keys at 0, then values, then float32 scales (int8 only)."""

    page_bytes: int
    value_offset: int
    key_scale_offset: int | None
    value_scale_offset: int | None


@dataclass
class GpuProgram:
    """The whole step. offsets: of buffers in their arena; partials: float32 words per split-attention work item."""

    half: str
    launches: list[Launch] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    kv: list[KVLayer] = field(default_factory=list)
    vocab_size: int = 0
    partials: int = 0
    tile_tokens: list[int] = field(default_factory=list)
    offsets: dict[str, int] = field(default_factory=dict)
    arena: dict[str, int] = field(default_factory=dict)
    weight_bytes: int = 0
    weights: list[DeviceWeight] = field(default_factory=list)


@dataclass(frozen=True)
class DeviceWeight:
    """A stored weight on the device: `source` and `source_size` in the plan's weights segment, `device` offset in the
    weights region, and the launches that repack it there (none: a plain copy)."""

    source: int
    source_size: int
    device: int
    repack: tuple[Launch, ...]


def pow2(n: int, least: int = 1) -> int:
    """The least power of two >= n and >= least."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
