"""Selects kernels: from the lowered graph to a straight list of kernel calls over buffers.

Every node becomes one or two calls; views become offsets. Calls are grouped in phases: between phases stands a barrier
of all threads, within a phase a thread only reads rows that it wrote itself.

What only matrix products read, such as a norm and its int8 form, is *private*: in a step of few rows every thread
makes all of it for itself, and the barrier before the product falls away. Such barriers depend on the number of rows;
buffers get lifetimes in epochs, which end at the barriers that always stand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import fx

from llmc.codegen.cost import node_costs
from llmc.codegen.cpu import experts
from llmc.codegen.cpu.call import (
    NO_MATRIX,
    NO_VECTOR,
    AttentionParams,
    Buffer,
    Call,
    Enum,
    Name,
    Operand,
    Pool,
    Template,
    numbers,
    operand_buffers,
    quant_bytes,
    row_domain,
)
from llmc.codegen.memory import place_buffers
from llmc.codegen.values import Value
from llmc.codegen.weights import Entry, WeightTable
from llmc.errors import UserError
from llmc.kernels import ops
from llmc.kernels.formats import Format
from llmc.kernels.ops import op_name
from llmc.passes.kv_layout import KVSlot
from llmc.passes.match import aten
from llmc.runtime.cost import Cost

_BY_ROW = frozenset(["rms_norm", "layer_norm", "rms_norm_add", "act", "gated_act", "add", "mul", "scale", "softcap",
                     "row_gate", "select_rows"])  # fmt: skip


@dataclass
class Program:
    """What `emit` prints."""

    weights: WeightTable
    calls: list[Call] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    kv_slots: list[KVSlot] = field(default_factory=list)
    vocab_size: int = 0
    offsets: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)


def select_kernels(graph: fx.Graph, table: WeightTable) -> Program:
    """`table` gets the weights that the program reads.

    Raises UserError for a value layout or shape that no CPU kernel handles, naming the op and module.
    """
    return Selector(graph, Program(table)).run()


class Selector:
    """Appends calls, with what they read and write, to a program; experts.py has those of mixtures of experts."""

    def __init__(self, graph: fx.Graph, program: Program) -> None:
        self.graph, self.program = graph, program
        self.costs = node_costs(graph)
        self.values: dict[fx.Node, Value[Buffer]] = {}
        self.private = _private_nodes(graph)
        self.quantized: dict[tuple[str, int, int, Format], Buffer] = {}
        self.epoch = 0
        self.path = ""
        self.kernels: dict[str, Callable[[fx.Node], None]] = {
            "embed": self.embed, "linear": self.linear, "rms_norm": self.norm, "layer_norm": self.norm,
            "rms_norm_add": self.norm_add, "rope_table": self.rope_table, "rope": self.rope,
            "attention": self.attention, "act": self.act, "gated_act": self.gated_act, "add": self.binary,
            "mul": self.binary, "scale": self.unary, "softcap": self.unary, "select_rows": self.select_rows,
            "row_gate": self.row_gate, "moe": lambda node: experts.emit_moe(self, node),
        }  # fmt: skip

    def run(self) -> Program:
        for node in self.graph.nodes:
            if node.op == "output":
                self.finish(node.args[0])
            if node.op != "call_function":
                continue
            self.path = node.meta.get("path", "?")
            if node.target is aten.view.default:
                source = self.values[node.args[0]]
                self.values[node] = source.viewed(node.meta["shape"][1:])
            elif node.target is aten.slice.Tensor:
                self.values[node] = self.slice(node)
            elif (name := op_name(node)) in self.kernels:
                self.kernels[str(name)](node)
            else:
                raise UserError(f"op {node.target} at {self.path}: the CPU backend has no kernel for it")
        return self.program

    def finish(self, output: fx.Node) -> None:
        """The sampler over the logits, and the placement of all buffers."""
        logits = self.values[output]
        if logits.buffer.domain != "rows" or logits.column or len(logits.shape) != 1:
            raise UserError("the model's output is not one row of logits per sampled token")
        program = self.program
        program.vocab_size = logits.width
        self.path = "sampling"
        self.call("sample", (), (Name("b"), logits, logits.width, Name("e.scratch")), "sample", Cost("R"))
        program.offsets, program.peaks = place_buffers(program.buffers)

    # ---- operands

    def new(self, node: fx.Node, domain: str) -> Value[Buffer]:
        shape = tuple(node.meta["shape"][1:])
        buffer = self.buffer(node.name, domain, math.prod(shape) * 4, private=node in self.private)
        self.values[node] = Value(buffer, 0, shape)
        return self.values[node]

    def buffer(self, name: str, domain: str, size: int, format: Format | None = None, private: bool = False) -> Buffer:
        buffer = Buffer(name, domain, size, self.epoch, self.epoch, format, private)
        self.program.buffers.append(buffer)
        return buffer

    def domain(self, node: fx.Node) -> str:
        return self.values[node].buffer.domain

    def slice(self, node: fx.Node) -> Value[Buffer]:
        x, dim, lo, hi = node.args
        source = self.values[x]
        if dim != 1:
            raise UserError(f"a slice across heads at {self.path} is not contiguous; the CPU backend cannot use it")
        return source.sliced(lo, hi)

    def vector(self, node: fx.Node | None) -> Entry | None:
        if node is None:
            return None
        table, meta = self.program.weights, node.meta
        return table.constant(meta["constant"]) if "constant" in meta else table.vector(meta["weight"])

    def call(
        self,
        kernel: str,
        template: tuple[Template, ...],
        operands: tuple[Operand, ...],
        partition: str,
        cost: Cost,
        output: Buffer | None = None,
        private: bool = False,
    ) -> None:
        """Appends a call, with the barrier that it needs. Raises UserError for a number that is not finite."""
        for number in numbers(operands):
            if not math.isfinite(number):
                raise UserError(f"the model has a constant of {number} at {self.path}")
        calls = self.program.calls
        wait, rows = self.wait(calls[-1], partition, private) if calls else ("", "")
        self.epoch += wait == "always"
        for buffer in operand_buffers(operands):
            buffer.last = self.epoch
        if output is not None:
            output.first = self.epoch
        phase = calls[-1].phase + (wait != "") if calls else 0
        calls.append(
            Call(kernel, template, operands, self.path, partition, private, wait, rows, phase, self.epoch, output, cost)
        )

    def wait(self, before: Call, partition: str, private: bool) -> tuple[str, str]:
        """The barrier between the last call and one of this kind, and the rows whose number it depends on."""
        if partition == before.partition and partition in ("tokens", "rows"):
            # Each thread goes on with rows that it wrote; but a thread that makes all rows for itself reads all.
            return ("few rows", partition) if private and not before.private else ("", "")
        if before.private and partition in ("columns", "pairs"):
            return "many rows", row_domain(before.partition)
        return "always", ""

    # ---- kernels

    def rowwise(
        self, node: fx.Node, template: tuple[Template, ...], operands: Sequence[fx.Node | Operand], domain: str
    ) -> None:
        """A kernel that makes each row of its result on its own: node operands are values; the result comes last."""
        out = self.new(node, domain)
        values = tuple(self.values[o] if isinstance(o, fx.Node) else o for o in operands)
        rows = Name(_rows(domain))
        kernel, private = str(op_name(node)), node in self.private
        self.call(kernel, template, (rows, *values, out), domain, self.costs[node], out.buffer, private)

    def embed(self, node: fx.Node) -> None:
        op = ops.Embed.of(node)
        ref = op.weight.meta["weight"]
        entry = self.program.weights.matrix(ref, op.format, False)
        template = (_format(op.format), ref.shape[1])
        self.rowwise(node, template, [Name(f"b.{op.ids}"), op.offset, entry, op.scale], "tokens")

    def linear(self, node: fx.Node) -> None:
        op = ops.Linear.of(node)
        self.check_format(op.format)
        ref, domain = op.weight.meta["weight"], self.domain(op.x)
        entry = self.program.weights.matrix(ref, op.format, op.gated)
        n, k = ref.shape[0] // (2 if op.gated else 1), ref.shape[1]
        x: Operand = self.values[op.x]
        if op.format.integer_products:
            x = self.quantize(op.x, k, op.format)
        residual = self.values[op.residual] if op.residual is not None else NO_MATRIX
        out = self.new(node, domain)
        rows = Name(_rows(domain))
        template = (_format(op.format), n, k, Enum("Act", op.act), op.gated)
        operands = (rows, x, entry, self.vector(op.bias) or NO_VECTOR, residual, out)
        self.call("linear", template, operands, "columns", self.costs[node], out.buffer)

    def check_format(self, format: Format) -> None:
        """Raises UserError for a format that no product of the CPU's is for."""
        if "cpu" not in format.backends:
            raise UserError(
                f"linear at {self.path}: the CPU backend has no weight-only product; name GPU targets only (--target)"
            )

    def quantize(self, x: fx.Node, k: int, format: Format) -> Buffer:
        """The int8 form of a value for weights of a format, made once however many products read it."""
        value, domain = self.values[x], self.domain(x)
        key = (value.buffer.name, value.column, k, format)
        if key not in self.quantized:
            padded = -(-k // format.group) * format.group
            name = f"{x.name}_q{len(self.quantized)}"
            buffer = self.buffer(name, domain, quant_bytes(padded, format), format, private=True)
            rows = _rows(domain)
            self.call(
                "quantize", (k, _format(format)), (Name(rows), value, buffer), domain, Cost(rows), buffer, private=True
            )
            self.quantized[key] = buffer
        return self.quantized[key]

    def norm(self, node: fx.Node) -> None:
        op = ops.RmsNorm.match(node) or ops.LayerNorm.of(node)
        shape = self.values[op.x].shape
        vectors = [op.weight, op.bias] if isinstance(op, ops.LayerNorm) else [op.weight]
        operands = [op.x, *(self.vector(v) or NO_VECTOR for v in vectors), op.eps]
        self.rowwise(node, (math.prod(shape[:-1]), shape[-1]), operands, self.domain(op.x))

    def norm_add(self, node: fx.Node) -> None:
        op = ops.RmsNormAdd.of(node)
        operands = [op.x, self.vector(op.weight) or NO_VECTOR, op.eps, op.residual]
        self.rowwise(node, (1, self.values[op.x].width), operands, self.domain(op.x))

    def rope_table(self, node: fx.Node) -> None:
        op = ops.RopeTable.of(node)
        operands = [Name("b.positions"), self.vector(op.inv_freq) or NO_VECTOR, op.scale]
        self.rowwise(node, (node.meta["shape"][1],), operands, "tokens")

    def rope(self, node: fx.Node) -> None:
        op = ops.Rope.of(node)
        heads, dim = self.values[op.x].shape
        shape = (heads, dim, self.values[op.table].width, op.interleaved)
        self.rowwise(node, shape, [op.x, op.table], self.domain(op.x))

    def attention(self, node: fx.Node) -> None:
        op = ops.Attention.of(node)
        slot: KVSlot = node.meta["kv"]
        pool = Pool(sum(s.page_bytes for s in self.program.kv_slots))
        self.program.kv_slots.append(slot)
        shape = (slot.heads, slot.head_dim, Enum("Kv", slot.dtype))
        keys, values = self.values[op.k], self.values[op.v]
        self.call("kv_write", shape, (Name("b"), keys, values, pool), "tokens", Cost())
        params = AttentionParams(op.scale, op.window, op.softcap, self.vector(op.sinks))
        query, out = self.values[op.q], self.new(node, "tokens")
        scratch = Name("{e.scratch, par.nt * sample_scratch_bytes(kVocab)}")  # the sampler's, which comes later
        operands = (Name("b"), query, pool, params, out, scratch)
        self.call("attention", (query.shape[0], *shape), operands, "attention", self.costs[node], out.buffer)

    def act(self, node: fx.Node) -> None:
        op = ops.Act.of(node)
        self.rowwise(node, (Enum("Act", op.kind), self.values[op.x].width), [op.x], self.domain(op.x))

    def gated_act(self, node: fx.Node) -> None:
        op = ops.GatedAct.of(node)
        template = (Enum("Act", op.kind), self.values[op.gate].width)
        self.rowwise(node, template, [op.gate, op.up], self.domain(op.gate))

    def binary(self, node: fx.Node) -> None:
        op = ops.Add.match(node) or ops.Mul.of(node)
        self.rowwise(node, (self.values[op.a].width,), [op.a, op.b], self.domain(op.a))

    def unary(self, node: fx.Node) -> None:
        op = ops.Scale.match(node) or ops.Softcap.of(node)
        value = op.value if isinstance(op, ops.Scale) else op.cap
        self.rowwise(node, (self.values[op.x].width,), [op.x, value], self.domain(op.x))

    def row_gate(self, node: fx.Node) -> None:
        op = ops.RowGate.of(node)
        self.rowwise(node, (Enum("Act", op.kind), self.values[op.x].width), [op.x, op.gate], self.domain(op.x))

    def select_rows(self, node: fx.Node) -> None:
        op = ops.SelectRows.of(node)
        self.rowwise(node, (self.values[op.x].width,), [Name("b.rows"), op.x], "rows")


def _private_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Values by rows that nothing reads but matrix products, or other such values made row by row from them."""
    private: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        by_row = op_name(node) in _BY_ROW and len(node.users) > 0
        if by_row and all(_reads_privately(user, node, private) for user in node.users):
            private.add(node)
    return private


def _reads_privately(user: fx.Node, node: fx.Node, private: set[fx.Node]) -> bool:
    if user.target is aten.view.default:
        return all(_reads_privately(reader, user, private) for reader in user.users)
    product = ops.Linear.match(user) or ops.Moe.match(user)
    if product is not None:
        return product.x is node and node not in product.args[1:]
    return user in private and op_name(user) != "select_rows"


def _rows(domain: str) -> str:
    """How many rows a domain has, as the step and costs name it."""
    return "T" if domain == "tokens" else "R"


def _format(format: Format) -> Enum:
    return Enum("Fmt", format.name)
