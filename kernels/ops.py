"""Typed views of the dialect's nodes: the arguments of every op by name, for reading and for building.

    linear = Linear.match(node)                 # None where the node is something else
    linear.residual
    replace_with(node, linear.evolve(act="silu"))

Each class lists the arguments of an op's schema in its order; that it does is checked when the module is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

from torch import fx

from llmc.kernels.dialect import OPS
from llmc.kernels.formats import F32, Format, find_format
from llmc.kernels.routing import Router

V = TypeVar("V", bound="OpView")
_NAMES = {op: name for name, op in OPS.items()}


def op_name(node: Any) -> str | None:
    """The name of the dialect's op that a node calls, or None."""
    return _NAMES.get(node.target) if isinstance(node, fx.Node) and node.op == "call_function" else None


@dataclass(frozen=True)
class OpView:
    """The arguments of one op; `op` is its name in the dialect."""

    op: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        names = [a.name for a in OPS[cls.op]._schema.arguments]
        listed = [name for name in cls.__annotations__ if name != "op"]
        if names != listed:
            raise TypeError(f"the view of {cls.op} lists {listed}, its schema has {names}")

    @classmethod
    def match(cls: type[V], node: Any) -> V | None:
        """The view of a node that calls this op, else None."""
        return cls.of(node) if op_name(node) == cls.op else None

    @classmethod
    def of(cls: type[V], node: fx.Node) -> V:
        """The view of a node that is known to call this op."""
        assert node.target is OPS[cls.op], f"{node.name} is not {cls.op}"
        return cls(*(_READ.get(str(f.type), _same)(a) for f, a in zip(fields(cls), node.args, strict=True)))

    def evolve(self: V, **changes: Any) -> V:
        """The same op with other arguments."""
        return replace(self, **changes)

    @property
    def target(self) -> Any:
        """What a node of this op calls."""
        return OPS[self.op]

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments as a node has them."""
        values = (getattr(self, f.name) for f in fields(self))
        return tuple(v.name if isinstance(v, Format) else v for v in values)


def _same(value: Any) -> Any:
    return value


_READ: dict[str, Callable[[Any], Any]] = {"Format": find_format, "float": float}
"""How the arguments of a node are read, by the type of the field."""


@dataclass(frozen=True)
class Embed(OpView):
    op = "embed"
    ids: fx.Node
    weight: fx.Node
    scale: float = 1.0
    offset: int = 0
    format: Format = F32


@dataclass(frozen=True)
class Linear(OpView):
    op = "linear"
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None = None
    residual: fx.Node | None = None
    act: str = "none"
    gated: bool = False
    format: Format = F32

    @property
    def plain(self) -> bool:
        """Whether nothing was merged into it yet but a bias, and no format chosen."""
        return self == Linear(self.x, self.weight, self.bias)


@dataclass(frozen=True)
class Moe(OpView):
    op = "moe"
    x: fx.Node
    logits: fx.Node
    correction: fx.Node | None
    up: fx.Node
    up_bias: fx.Node | None
    down: fx.Node
    down_bias: fx.Node | None
    scores: str
    top_k: int
    groups: int
    top_groups: int
    group_best: int
    normalise: bool
    floor: float
    eps: float
    scale: float
    act: str = "none"
    gated: bool = False
    format: Format = F32

    @property
    def router(self) -> Router:
        """How it chooses and weighs its experts."""
        return Router(*(getattr(self, f.name) for f in fields(Router)))


@dataclass(frozen=True)
class RmsNorm(OpView):
    op = "rms_norm"
    x: fx.Node
    weight: fx.Node | None
    eps: float


@dataclass(frozen=True)
class RmsNormAdd(OpView):
    op = "rms_norm_add"
    x: fx.Node
    residual: fx.Node
    weight: fx.Node | None
    eps: float


@dataclass(frozen=True)
class LayerNorm(OpView):
    op = "layer_norm"
    x: fx.Node
    weight: fx.Node | None
    bias: fx.Node | None
    eps: float


@dataclass(frozen=True)
class RopeTable(OpView):
    op = "rope_table"
    positions: fx.Node
    inv_freq: fx.Node
    scale: float


@dataclass(frozen=True)
class Rope(OpView):
    op = "rope"
    x: fx.Node
    table: fx.Node
    interleaved: bool


@dataclass(frozen=True)
class Attention(OpView):
    op = "attention"
    q: fx.Node
    k: fx.Node
    v: fx.Node
    positions: fx.Node
    query_start: fx.Node
    sinks: fx.Node | None
    scale: float
    window: int
    softcap: float
    layer: int


@dataclass(frozen=True)
class Act(OpView):
    op = "act"
    x: fx.Node
    kind: str


@dataclass(frozen=True)
class GatedAct(OpView):
    op = "gated_act"
    gate: fx.Node
    up: fx.Node
    kind: str


@dataclass(frozen=True)
class Add(OpView):
    op = "add"
    a: fx.Node
    b: fx.Node


@dataclass(frozen=True)
class Mul(OpView):
    op = "mul"
    a: fx.Node
    b: fx.Node


@dataclass(frozen=True)
class RowGate(OpView):
    op = "row_gate"
    x: fx.Node
    gate: fx.Node
    kind: str


@dataclass(frozen=True)
class Scale(OpView):
    op = "scale"
    x: fx.Node
    value: float


@dataclass(frozen=True)
class Softcap(OpView):
    op = "softcap"
    x: fx.Node
    cap: float


@dataclass(frozen=True)
class SelectRows(OpView):
    op = "select_rows"
    x: fx.Node
    rows: fx.Node
