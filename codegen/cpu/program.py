"""Selects kernels: from the lowered graph to a straight list of kernel calls over buffers.

Every node becomes one or two calls; views become offsets. Calls are grouped in phases: between phases stands a barrier
of all threads, within a phase a thread only reads rows that it wrote itself. Buffers get lifetimes in phases.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from llmc.codegen.memory import place_buffers
from llmc.codegen.values import Value
from llmc.codegen.weights import Entry, WeightTable
from llmc.errors import UserError
from llmc.kernels.dialect import OPS
from llmc.kernels.pack import GROUP
from llmc.passes.kv_layout import KVSlot
from llmc.passes.match import aten

_NAMES = {op: name for name, op in OPS.items()}


@dataclass
class Buffer:
    """Storage of one value: `size` bytes per row, rows are tokens ("tokens") or sampled rows ("rows")."""

    name: str
    domain: str
    size: int
    first: int
    last: int
    kind: str
    """"mat": float32 rows; "quant": int8 rows of padded width with scales and sums."""


@dataclass(frozen=True)
class Call:
    """One kernel call: `text` is C++ with the operand names in place; `comment` says what it computes."""

    text: str
    path: str
    partition: str
    phase: int


@dataclass
class Program:
    """What `emit` prints."""

    calls: list[Call] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    weights: WeightTable = field(default_factory=WeightTable)
    kv_slots: list[KVSlot] = field(default_factory=list)
    vocab_size: int = 0
    offsets: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    logits: str = ""


def select_kernels(graph: fx.Graph) -> Program:
    """Raises UserError for a value layout or shape that no CPU kernel handles, naming the op and module."""
    return _Selector(graph).run()


class _Selector:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.program = graph, Program()
        self.values: dict[fx.Node, Value[Buffer]] = {}
        self.quantized: dict[tuple[str, int, int], Buffer] = {}
        self.phase, self.partition = 0, ""
        self.path = ""
        self.kernels: dict[str, Callable[[fx.Node], None]] = {
            "embed": self.embed, "linear": self.linear, "rms_norm": self.norm, "layer_norm": self.norm,
            "rms_norm_add": self.norm_add, "rope_table": self.rope_table, "rope": self.rope,
            "attention": self.attention, "act": self.act, "gated_act": self.gated_act, "add": self.binary,
            "mul": self.binary, "scale": self.unary, "softcap": self.unary, "select_rows": self.select_rows,
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
            elif _NAMES.get(node.target) in self.kernels:
                self.kernels[_NAMES[node.target]](node)
            else:
                raise UserError(f"op {node.target} at {self.path}: the CPU backend has no kernel for it")
        return self.program

    def finish(self, output: fx.Node) -> None:
        """The logits buffer, the sampler, and the placement of all buffers."""
        logits = self.values[output]
        if logits.buffer.domain != "rows" or logits.column or len(logits.shape) != 1:
            raise UserError("the model's output is not one row of logits per sampled token")
        program = self.program
        program.vocab_size, program.logits = logits.width, logits.buffer.name
        self.path = "sampling"
        name = self.mat(output)
        self.call(f"sample(par, b, {name}, {logits.width}, e.scratch)", "sample", [logits])
        program.offsets, program.peaks = place_buffers(program.buffers)

    # ---- operands

    def new(self, node: fx.Node, domain: str) -> Value[Buffer]:
        shape = tuple(node.meta["shape"][1:])
        buffer = self.buffer(node.name, domain, math.prod(shape) * 4, "mat")
        self.values[node] = Value(buffer, 0, shape)
        return self.values[node]

    def buffer(self, name: str, domain: str, size: int, kind: str) -> Buffer:
        buffer = Buffer(name, domain, size, self.phase, self.phase, kind)
        self.program.buffers.append(buffer)
        return buffer

    def mat(self, node: Any) -> str:
        """C++ expression of a value as `Mat`."""
        if node is None:
            return "none"
        value = self.values[node]
        return value.buffer.name if value.column == 0 else f"columns({value.buffer.name}, {value.column})"

    def domain(self, node: fx.Node) -> str:
        return self.values[node].buffer.domain

    def slice(self, node: fx.Node) -> Value[Buffer]:
        x, dim, lo, hi = node.args
        source = self.values[x]
        if dim != 1:
            raise UserError(f"a slice across heads at {self.path} is not contiguous; the CPU backend cannot use it")
        return source.sliced(lo, hi)

    def vector(self, node: Any) -> str:
        if node is None:
            return "nullptr"
        table, meta = self.program.weights, node.meta
        entry = table.constant(meta["constant"]) if "constant" in meta else table.vector(meta["weight"])
        return f"floats(e, {entry.offset:#x})"

    def weight(self, entry: Entry) -> str:
        offsets = [entry.region(name) for name in ("data", "scale", "min")]
        return "weight(e, " + ", ".join(f"{o:#x}" if o is not None else "-1" for o in offsets) + ")"

    def call(self, text: str, partition: str, uses: list[Value[Buffer] | Buffer]) -> None:
        """Appends a call; opens a new phase unless it continues the same rows of the same thread."""
        shared = partition == self.partition and partition in ("tokens", "rows")
        if self.program.calls and not shared:
            self.phase += 1
        self.partition = partition
        for use in uses:
            buffer = use.buffer if isinstance(use, Value) else use
            buffer.last = self.phase
        self.program.calls.append(Call(text, self.path, partition, self.phase))

    def emit(self, node: fx.Node, text: str, partition: str, reads: list[Any], domain: str) -> None:
        """A call that makes the value of a node: `text` has {out} for it."""
        out = self.new(node, domain)
        self.call(
            text.replace("{out}", out.buffer.name),
            partition,
            [self.values[r] for r in reads if r is not None],
        )
        out.buffer.first = out.buffer.last = self.phase

    # ---- kernels

    def rowwise(self, node: fx.Node, kernel: str, inputs: list[fx.Node], tail: str = "") -> None:
        """A kernel that makes each row of its result from the same row of its inputs."""
        domain = self.domain(inputs[0])
        mats = ", ".join(self.mat(x) for x in inputs)
        self.emit(node, f"{kernel}(par, {_rows(domain)}, {mats}{tail}, {{out}})", domain, inputs, domain)

    def embed(self, node: fx.Node) -> None:
        ids, w, scale, offset, format = node.args
        ref = w.meta["weight"]
        weight = self.weight(self.program.weights.matrix(ref, format, False))
        kernel = f"embed<Fmt::{format}, {ref.shape[1]}>"
        text = f"{kernel}(par, T, b.{ids}, {offset}, {weight}, {_f(scale)}, {{out}})"
        self.emit(node, text, "tokens", [], "tokens")

    def linear(self, node: fx.Node) -> None:
        x, w, bias, residual, act, gated, format = node.args
        if format.endswith("a16"):
            raise UserError(
                f"linear at {self.path}: the CPU backend has no weight-only product; name GPU targets only (--target)"
            )
        ref, domain = w.meta["weight"], self.domain(x)
        weight = self.weight(self.program.weights.matrix(ref, format, gated))
        n, k = ref.shape[0] // (2 if gated else 1), ref.shape[1]
        operand: str = self.mat(x)
        reads: list[Value[Buffer] | Buffer] = [self.values[x]]
        if format in ("w8", "w4"):
            quantized = self.quantize(x, k, domain)
            operand, reads = quantized.name, [quantized]
        if residual is not None:
            reads.append(self.values[residual])
        out = self.new(node, domain)
        kernel = f"linear<Fmt::{format}, {n}, {k}, Act::{act}, {str(gated).lower()}>"
        operands = f"{operand}, {weight}, {self.vector(bias)}, {self.mat(residual)}, {out.buffer.name}"
        self.call(f"{kernel}(par, {_rows(domain)}, {operands})", "columns", reads)
        out.buffer.first = out.buffer.last = self.phase

    def quantize(self, x: fx.Node, k: int, domain: str) -> Buffer:
        """The int8 form of a value, made once however many products read it."""
        value = self.values[x]
        key = (value.buffer.name, value.column, k)
        if key not in self.quantized:
            padded = -(-k // GROUP) * GROUP
            buffer = self.buffer(f"{x.name}_q", domain, padded + padded // GROUP * 8, "quant")
            self.call(f"quantize<{k}>(par, {_rows(domain)}, {self.mat(x)}, {buffer.name})", domain, [value])
            buffer.first = buffer.last = self.phase
            self.quantized[key] = buffer
        return self.quantized[key]

    def norm(self, node: fx.Node) -> None:
        x, *vectors, eps = node.args
        shape = self.values[x].shape
        weights = "".join(f", {self.vector(v)}" for v in vectors)
        kernel = f"{_NAMES[node.target]}<{math.prod(shape[:-1])}, {shape[-1]}>"
        self.rowwise(node, kernel, [x], f"{weights}, {_f(eps)}")

    def norm_add(self, node: fx.Node) -> None:
        x, residual, weight, eps = node.args
        domain, width = self.domain(x), self.values[x].width
        operands = f"{self.mat(x)}, {self.vector(weight)}, {_f(eps)}, {self.mat(residual)}"
        text = f"rms_norm_add<1, {width}>(par, {_rows(domain)}, {operands}, {{out}})"
        self.emit(node, text, domain, [x, residual], domain)

    def rope_table(self, node: fx.Node) -> None:
        _, inv_freq, scale = node.args
        kernel = f"rope_table<{node.meta['shape'][1]}>"
        text = f"{kernel}(par, T, b.positions, {self.vector(inv_freq)}, {_f(scale)}, {{out}})"
        self.emit(node, text, "tokens", [], "tokens")

    def rope(self, node: fx.Node) -> None:
        x, table = node.args
        heads, dim = self.values[x].shape
        self.rowwise(node, f"rope<{heads}, {dim}, {self.values[table].width}>", [x, table])

    def attention(self, node: fx.Node) -> None:
        q, k, v, _, _, sinks, scale, window, softcap, _ = node.args
        slot: KVSlot = node.meta["kv"]
        if slot.dtype == "int8":
            raise UserError(
                f"attention at {self.path}: the CPU backend has no int8 KV cache; name GPU targets only (--target)"
            )
        base = f"e.kv + {sum(s.page_bytes for s in self.program.kv_slots):#x} * e.num_pages"
        self.program.kv_slots.append(slot)
        shape = f"{slot.heads}, {slot.head_dim}, Kv::{slot.dtype}"
        write = f"kv_write<{shape}>(par, b, {self.mat(k)}, {self.mat(v)}, {base})"
        self.call(write, "tokens", [self.values[k], self.values[v]])
        params = f"AttentionParams{{{_f(scale)}, {window}, {_f(softcap)}, {self.vector(sinks)}}}"
        kernel = f"attention<{self.values[q].shape[0]}, {shape}>"
        self.emit(node, f"{kernel}(par, b, {self.mat(q)}, {base}, {params}, {{out}})", "attention", [q], "tokens")

    def act(self, node: fx.Node) -> None:
        x, kind = node.args
        self.rowwise(node, f"act<Act::{kind}, {self.values[x].width}>", [x])

    def gated_act(self, node: fx.Node) -> None:
        gate, up, kind = node.args
        self.rowwise(node, f"gated_act<Act::{kind}, {self.values[gate].width}>", [gate, up])

    def binary(self, node: fx.Node) -> None:
        a, b = node.args
        self.rowwise(node, f"{_NAMES[node.target]}<{self.values[a].width}>", [a, b])

    def unary(self, node: fx.Node) -> None:
        x, value = node.args
        self.rowwise(node, f"{_NAMES[node.target]}<{self.values[x].width}>", [x], f", {_f(value)}")

    def select_rows(self, node: fx.Node) -> None:
        x, _ = node.args
        text = f"select_rows<{self.values[x].width}>(par, R, b.rows, {self.mat(x)}, {{out}})"
        self.emit(node, text, "rows", [x], "rows")


def _rows(domain: str) -> str:
    return "T" if domain == "tokens" else "R"


def _f(value: Any) -> str:
    """A float32 literal that is exactly the nearest float32."""
    number = float(value)
    if not math.isfinite(number):
        raise UserError(f"the model has a constant of {number}")
    return f"{number.hex()}f" if number else "0.0f"
