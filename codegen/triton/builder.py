"""Buffers, operands and launches of a GPU program under construction.

Activations are float32 in memory, so that accuracy is the CPU target's. What feeds a matrix product takes the
product's own form ("q8", "half"; kernels/triton/store.py): written so by the kernel that makes it if that is its only
use, else converted once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from llmc.codegen.cost import node_costs
from llmc.codegen.triton.launch import ACTIVATIONS, Arg, Buffer, Dim, GpuProgram, Launch, pow2, round_up
from llmc.codegen.triton.signature import parameters
from llmc.codegen.triton.weights import DeviceMatrix, DeviceWeights
from llmc.codegen.values import Value
from llmc.codegen.weights import WeightTable
from llmc.errors import UserError
from llmc.kernels.formats import F32, Format
from llmc.kernels.ops import Linear
from llmc.passes.match import aten, is_call
from llmc.runtime.cost import Cost

Args = dict[str, tuple[str, Arg]]
"""Parameter name -> (pointer type, where it points)."""
MAX_ROW = 32768
"""Elements of a row that one program holds in registers."""


class Builder:
    """`values` has the float32 form of every node that has one, `forms` the others by (node, form)."""

    def __init__(self, graph: fx.Graph, table: WeightTable, half: str) -> None:
        self.table, self.half = table, half
        self.program = GpuProgram(half)
        self.weights = DeviceWeights(half)
        self.values: dict[fx.Node, Value[Buffer]] = {}
        self.forms: dict[tuple[fx.Node, str], Buffer] = {}
        self.needs = needed_forms(graph)
        self.costs = node_costs(graph)
        self.path = ""
        self.result = next(root(n.args[0]) for n in graph.nodes if n.op == "output")

    def buffer(self, name: str, domain: str, form: str, width: int) -> Buffer:
        """A buffer of `width` elements a row, written by the next launch."""
        width = round_up(width, 32) if form == "q8" else width
        size = {"f32": 4 * width, "half": 2 * width, "q8": width + width // 32 * 8}[form]
        at = len(self.program.launches)
        buffer = Buffer(f"{name}.{form}", domain, size, form, width, at, at)
        if domain != "logits":
            self.program.buffers.append(buffer)
        return buffer

    def new(self, node: fx.Node, domain: str, native: tuple[str, ...] = ()) -> Buffer:
        """The buffer that a node's kernel writes: in the one form that is needed, if the kernel can store it
        (`native`), else in float32."""
        shape = tuple(node.meta["shape"][1:])
        needs = self.needs.get(node, set())
        form = next(iter(needs)) if len(needs) == 1 and needs <= set(native) else "f32"
        final = node is self.result and domain == "rows"
        buffer = self.buffer(node.name, "logits" if final else domain, form, math.prod(shape))
        if form == "f32":
            self.values[node] = Value(buffer, 0, shape)
        else:
            self.forms[node, form] = buffer
        return buffer

    def operand(self, node: fx.Node, form: str) -> Buffer:
        """A node's value as whole rows in a form; converted, once, if no kernel made it so."""
        source = root(node)
        if (source, form) in self.forms:
            return self.forms[source, form]
        value = self.values[node]
        whole = value.column == 0 and value.width == value.buffer.width
        if form == "f32" and whole:
            return value.buffer
        if value.width > MAX_ROW:
            raise UserError(f"a row of {value.width} elements at {self.path} is too long for the GPU's kernels")
        buffer = self.buffer(f"{node.name}_copy", value.buffer.domain, form, value.width)
        constants = {"C": value.width, "W": pow2(value.width, 32), "XC": value.column, "LDX": value.buffer.width,
                     "LDY": buffer.width, "COUNT": count(buffer), "OUT": form}  # fmt: skip
        args = {"x": ("*fp32", self.place(value.buffer))} | self.outputs(buffer)
        self.emit(f"convert to {form} {value.width}", "rows.convert", args, constants, buffer, [value.buffer])
        if whole:
            self.forms[source, form] = buffer
        return buffer

    # ---- arguments

    def place(self, buffer: Buffer, offset: int = 0) -> Arg:
        """Where a buffer (or, `offset` bytes per row into it, a part) lies; `archive.py` resolves it."""
        return ("logits",) if buffer.domain == "logits" else ("buffer", buffer.name, offset)

    def pointer(self, form: str) -> str:
        return {"f32": "*fp32", "half": f"*{self.half}", "q8": "*i8"}[form]

    def inputs(self, buffer: Buffer, name: str = "x") -> Args:
        """The arguments x, xs, xsum (y, ys, ysum) for a buffer's form."""
        data = {name: (self.pointer(buffer.form), self.place(buffer))}
        if buffer.form != "q8":
            return data
        scale, groups = buffer.width, buffer.width // 32
        return data | {f"{name}s": ("*fp32", self.place(buffer, scale)),
                       f"{name}sum": ("*fp32", self.place(buffer, scale + 4 * groups))}  # fmt: skip

    def outputs(self, buffer: Buffer) -> Args:
        return self.inputs(buffer, "y")

    def vector(self, node: Any, name: str) -> Args:
        if node is None:
            return {}
        meta = node.meta
        entry = self.table.constant(meta["constant"]) if "constant" in meta else self.table.vector(meta["weight"])
        return {name: ("*fp32", self.weights.vector(entry))}

    def matrix(self, node: fx.Node, format: Format, gated: bool) -> tuple[DeviceMatrix, Args]:
        """A stored matrix, and the arguments w and ws."""
        matrix = self.weights.matrix(self.table.matrix(node.meta["weight"], format, gated))
        words: Args = {"ws": ("*i32", matrix.words)} if matrix.words is not None else {}
        return matrix, {"w": (matrix.pointer, matrix.data), **words}

    def emit(
        self,
        op: str,
        function: str,
        args: Args,
        constants: Mapping[str, Any],
        output: Buffer | None,
        reads: list[Buffer],
        grid: tuple[Dim, ...] | None = None,
        *,
        tiles: str = "row",
        when: str = "always",
        cost: Cost = ACTIVATIONS,
    ) -> None:
        """Appends a launch; `grid` is one program per row if not given. Parameters that are neither in `args` nor in
        `constants` are absent pointers. The activations of `cost` are what it reads and writes, if it does not say."""
        at = len(self.program.launches)
        for buffer in reads:
            buffer.last = at
        if output is not None:
            output.last = at
        if not cost.activation_bytes:
            cost = replace(cost, activation_bytes=sum(b.size for b in (*reads, *([output] if output else []))))
        if output is not None:
            cost = replace(cost, rows="T" if output.domain == "tokens" else "R")
        args = {**args, "meta": ("*i32", ("batch", "meta"))}
        names = parameters(function)
        if unknown := args.keys() - set(names):
            raise KeyError(f"{function} has no parameters {sorted(unknown)}")
        ordered = tuple((name, *args[name]) for name in names if name in args)
        launch = Launch(op, function, ordered, dict(constants), grid or ((cost.rows, 1),), self.path, tiles, when, cost)
        self.program.launches.append(launch)


def count(buffer: Buffer) -> int:
    """The index in `meta` of the number of rows of a buffer's domain."""
    return 0 if buffer.domain == "tokens" else 1


def root(node: fx.Node) -> fx.Node:
    """The node whose storage a chain of views names."""
    while is_call(node, aten.view.default):
        node = node.args[0]
    return node


def operand_form(format: Format) -> str:
    """The form of activations that a product with weights of a format reads."""
    return "q8" if format.integer_products else "f32" if format is F32 else "half"


def needed_forms(graph: fx.Graph) -> dict[fx.Node, set[str]]:
    """In which forms the users of every value read it."""
    needs: dict[fx.Node, set[str]] = {}
    for node in graph.nodes:
        if is_call(node, aten.view.default):
            continue
        linear = Linear.match(node)
        for used in node.all_input_nodes:
            forms = needs.setdefault(root(used), set())
            if linear is not None and used is linear.x:
                forms.add(operand_form(linear.format))
            if linear is None or used is not linear.x or used is linear.residual:
                forms.add("f32")
    return needs
