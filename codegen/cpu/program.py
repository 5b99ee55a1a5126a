"""Selects kernels: from the lowered graph to a straight list of kernel calls over buffers.

Every node becomes one or two calls; views become offsets. Calls are grouped in phases: between phases stands a barrier
of all threads, within a phase a thread only reads rows that it wrote itself.

What only matrix products read, such as a norm and its int8 form, is *private*: in a step of few rows every thread
makes all of it for itself, and the barrier before the product falls away. Such barriers depend on the number of rows;
buffers get lifetimes in epochs, which end at the barriers that always stand.
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
_BY_ROW = frozenset(["rms_norm", "layer_norm", "rms_norm_add", "act", "gated_act", "add", "mul", "scale", "softcap",
                     "select_rows"])  # fmt: skip


@dataclass
class Buffer:
    """Storage of one value: `size` bytes per row, rows are tokens ("tokens") or sampled rows ("rows").

    first, last: the epochs of its life. format: of the weights that an int8 form is for, "" for float32 rows.
    private: each thread has rows of its own in a step of few.
    """

    name: str
    domain: str
    size: int
    first: int
    last: int
    format: str
    private: bool


@dataclass(frozen=True)
class Call:
    """One kernel call: `text` is C++ with the operand names in place.

    wait: the barrier before it: "" none, "always", "few rows" or "many rows", and then `rows` says of which domain.
    phase: counts the barriers before it; epoch: those that always stand.
    """

    text: str
    path: str
    partition: str
    private: bool
    wait: str
    rows: str
    phase: int
    epoch: int


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
        self.private = _private_nodes(graph)
        self.quantized: dict[tuple[str, int, int, str], Buffer] = {}
        self.epoch = 0
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
        buffer = self.buffer(node.name, domain, math.prod(shape) * 4, private=node in self.private)
        self.values[node] = Value(buffer, 0, shape)
        return self.values[node]

    def buffer(self, name: str, domain: str, size: int, format: str = "", private: bool = False) -> Buffer:
        buffer = Buffer(name, domain, size, self.epoch, self.epoch, format, private)
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

    def call(self, text: str, partition: str, uses: list[Value[Buffer] | Buffer], private: bool = False) -> None:
        """Appends a call, with the barrier that it needs. A private one names its team `own_tokens` or `own_rows`."""
        calls = self.program.calls
        wait, rows = self.wait(calls[-1], partition, private) if calls else ("", "")
        self.epoch += wait == "always"
        for use in uses:
            buffer = use.buffer if isinstance(use, Value) else use
            buffer.last = self.epoch
        phase = calls[-1].phase + (wait != "") if calls else 0
        calls.append(Call(text, self.path, partition, private, wait, rows, phase, self.epoch))

    def wait(self, before: Call, partition: str, private: bool) -> tuple[str, str]:
        """The barrier between the last call and one of this kind, and the rows whose number it depends on."""
        if partition == before.partition and partition in ("tokens", "rows"):
            # Each thread goes on with rows that it wrote; but a thread that makes all rows for itself reads all.
            return ("few rows", partition) if private and not before.private else ("", "")
        if before.private and partition == "columns":
            return "many rows", before.partition
        return "always", ""

    def emit(self, node: fx.Node, text: str, partition: str, reads: list[Any], domain: str) -> None:
        """A call that makes the value of a node: `text` has {par} for the team and {out} for the value."""
        out, private = self.new(node, domain), node in self.private
        text = text.replace("{par}", _team(domain, private)).replace("{out}", out.buffer.name)
        self.call(text, partition, [self.values[r] for r in reads if r is not None], private)
        out.buffer.first = out.buffer.last = self.epoch

    # ---- kernels

    def rowwise(self, node: fx.Node, kernel: str, inputs: list[fx.Node], tail: str = "") -> None:
        """A kernel that makes each row of its result from the same row of its inputs."""
        domain = self.domain(inputs[0])
        mats = ", ".join(self.mat(x) for x in inputs)
        self.emit(node, f"{kernel}({{par}}, {_rows(domain)}, {mats}{tail}, {{out}})", domain, inputs, domain)

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
            quantized = self.quantize(x, k, format)
            operand, reads = quantized.name, [quantized]
        if residual is not None:
            reads.append(self.values[residual])
        out = self.new(node, domain)
        kernel = f"linear<Fmt::{format}, {n}, {k}, Act::{act}, {str(gated).lower()}>"
        operands = f"{operand}, {weight}, {self.vector(bias)}, {self.mat(residual)}, {out.buffer.name}"
        self.call(f"{kernel}(par, {_rows(domain)}, {operands})", "columns", reads)
        out.buffer.first = out.buffer.last = self.epoch

    def quantize(self, x: fx.Node, k: int, format: str) -> Buffer:
        """The int8 form of a value for weights of a format, made once however many products read it."""
        value, domain = self.values[x], self.domain(x)
        key = (value.buffer.name, value.column, k, format)
        if key not in self.quantized:
            padded = -(-k // GROUP) * GROUP
            name = f"{x.name}_q{len(self.quantized)}"
            buffer = self.buffer(name, domain, quant_bytes(padded, format), format, private=True)
            kernel = f"quantize<{k}, Fmt::{format}>"
            text = f"{kernel}({_team(domain, True)}, {_rows(domain)}, {self.mat(x)}, {name})"
            self.call(text, domain, [value], private=True)
            buffer.first = buffer.last = self.epoch
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
        text = f"rms_norm_add<1, {width}>({{par}}, {_rows(domain)}, {operands}, {{out}})"
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
        base = f"e.kv + {sum(s.page_bytes for s in self.program.kv_slots):#x} * e.num_pages"
        self.program.kv_slots.append(slot)
        shape = f"{slot.heads}, {slot.head_dim}, Kv::{slot.dtype}"
        write = f"kv_write<{shape}>(par, b, {self.mat(k)}, {self.mat(v)}, {base})"
        self.call(write, "tokens", [self.values[k], self.values[v]])
        params = f"AttentionParams{{{_f(scale)}, {window}, {_f(softcap)}, {self.vector(sinks)}}}"
        kernel = f"attention<{self.values[q].shape[0]}, {shape}>"
        scratch = "{e.scratch, par.nt * sample_scratch_bytes(kVocab)}"  # the sampler's, which comes later
        text = f"{kernel}(par, b, {self.mat(q)}, {base}, {params}, {{out}}, {scratch})"
        self.emit(node, text, "attention", [q], "tokens")

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
        text = f"select_rows<{self.values[x].width}>({{par}}, R, b.rows, {self.mat(x)}, {{out}})"
        self.emit(node, text, "rows", [x], "rows")


def quant_bytes(width: int, format: str) -> int:
    """Bytes per row of an int8 form: elements (of two bytes for w8 on AVX2), and a scale and a sum per group."""
    return width * (2 if format == "w8" else 1) + width // GROUP * 8


def quant_width(size: int, format: str) -> int:
    """The width that `quant_bytes` was asked for."""
    return size * GROUP // quant_bytes(GROUP, format)


def _private_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Values by rows that nothing reads but matrix products, or other such values made row by row from them."""
    private: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        by_row = _NAMES.get(node.target) in _BY_ROW and len(node.users) > 0
        if by_row and all(_reads_privately(user, node, private) for user in node.users):
            private.add(node)
    return private


def _reads_privately(user: fx.Node, node: fx.Node, private: set[fx.Node]) -> bool:
    if user.target is aten.view.default:
        return all(_reads_privately(reader, user, private) for reader in user.users)
    if _NAMES.get(user.target) == "linear":
        return user.args[0] is node and node not in user.args[1:]
    return user in private and _NAMES[user.target] != "select_rows"


def _team(domain: str, private: bool) -> str:
    return f"own_{domain}" if private else "par"


def _rows(domain: str) -> str:
    return "T" if domain == "tokens" else "R"


def _f(value: Any) -> str:
    """A float32 literal that is exactly the nearest float32."""
    number = float(value)
    if not math.isfinite(number):
        raise UserError(f"the model has a constant of {number}")
    return f"{number.hex()}f" if number else "0.0f"
