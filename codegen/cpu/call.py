"""A kernel call of the CPU's program as data: what it runs, on what, and what it costs. `emit.py` prints it."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.codegen.values import Value
from llmc.codegen.weights import Entry
from llmc.kernels.formats import GROUP, Format
from llmc.runtime.cost import Cost


@dataclass
class Buffer:
    """Storage of one value: `size` bytes per row, rows are tokens ("tokens") or sampled rows ("rows").

    first, last: the epochs of its life. format: of the weights that an int8 form is for, None for float32 rows.
    private: each thread has rows of its own in a step of few.
    """

    name: str
    domain: str
    size: int
    first: int
    last: int
    format: Format | None
    private: bool

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.size // 4 if self.format is None else self.size * GROUP // quant_bytes(GROUP, self.format)


@dataclass(frozen=True)
class Name:
    """Something that the step has in C++: "T", "b.positions", "none"."""

    text: str


@dataclass(frozen=True)
class Enum:
    """An enumerator of the kernels: Fmt::w8."""

    kind: str
    value: str


@dataclass(frozen=True)
class Pool:
    """A layer's part of the KV pool: what the layers before it take, in bytes per page."""

    offset: int


@dataclass(frozen=True)
class Pairs:
    """A buffer of float32 that holds `count` rows, one for each chosen expert, in the place of each token's."""

    buffer: Buffer
    count: int


@dataclass(frozen=True)
class AttentionParams:
    """The numbers of an attention layer, and its sinks."""

    scale: float
    window: int
    softcap: float
    sinks: Entry | None


Template = int | bool | Enum
Operand = Value[Buffer] | Pairs | Buffer | Entry | Pool | AttentionParams | Name | int | float
NO_MATRIX, NO_VECTOR = Name("none"), Name("nullptr")


@dataclass(frozen=True)
class Call:
    """One kernel call. operands: in the kernel's order, after its team.

    partition: how its threads divide the work: "tokens", "rows", "columns", "attention",
    "sample" or "pairs": by token or by pair of token and expert, from what others made of all tokens. private: a thread
    makes all of it for itself in a step of few rows. wait: the barrier before it: "" none, "always", "few rows" or
    "many rows", and then `wait_rows` says of which domain. phase: counts the barriers before it; epoch: those that
    always stand. output: what it writes, None for the KV pool and the sampled tokens. cost: see codegen/cost.py.
    """

    kernel: str
    template: tuple[Template, ...]
    operands: tuple[Operand, ...]
    path: str
    partition: str
    private: bool
    wait: str
    wait_rows: str
    phase: int
    epoch: int
    output: Buffer | None
    cost: Cost

    @property
    def team(self) -> str:
        """The threads that share it: all, or for a private one in a step of few rows each alone."""
        return f"own_{row_domain(self.partition)}" if self.private else "par"

    @property
    def buffers(self) -> list[Buffer]:
        """The buffers among its operands, in their order."""
        return operand_buffers(self.operands)

    @property
    def reads(self) -> list[Buffer]:
        """The buffers that it reads."""
        return [b for b in self.buffers if b is not self.output]

    @property
    def entries(self) -> list[Entry]:
        """The stored weights that it reads."""
        sinks = [o.sinks for o in self.operands if isinstance(o, AttentionParams) and o.sinks is not None]
        return [o for o in self.operands if isinstance(o, Entry)] + sinks


def row_domain(partition: str) -> str:
    """The domain of the rows that a partition by rows divides."""
    return "tokens" if partition == "pairs" else partition


def operand_buffers(operands: tuple[Operand, ...]) -> list[Buffer]:
    """The buffers among operands."""
    buffers = [o.buffer if isinstance(o, Value | Pairs) else o for o in operands]
    return [b for b in buffers if isinstance(b, Buffer)]


def numbers(operands: tuple[Operand, ...]) -> list[float]:
    """The floating-point constants among operands."""
    params = [o for o in operands if isinstance(o, AttentionParams)]
    return [o for o in operands if isinstance(o, float)] + [x for p in params for x in (p.scale, p.softcap)]


def quant_bytes(width: int, format: Format) -> int:
    """Bytes per row of an int8 form: elements (of two bytes for w8 on AVX2), and a scale and a sum per group."""
    return width * (2 if format.symmetric else 1) + width // GROUP * 8
