"""Selects GPU kernels: from the lowered graph to a list of launches over buffers; one method per op of the dialect."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from llmc.codegen.memory import place_buffers
from llmc.codegen.triton.attention import emit_attention, fusible_ropes
from llmc.codegen.triton.builder import MAX_ROW, Builder, count, operand_form
from llmc.codegen.triton.launch import GpuProgram, pow2
from llmc.codegen.triton.sampling import emit_sampling
from llmc.codegen.weights import WeightTable
from llmc.errors import UserError
from llmc.kernels import ops
from llmc.kernels.formats import F32
from llmc.kernels.ops import op_name
from llmc.passes.match import aten

_BLOCK = 1024


def select_launches(graph: fx.Graph, table: WeightTable, half: str) -> GpuProgram:
    """half: "bf16" or "fp16", the type of tensor-core operands. `table` gets the weights that the program reads.

    Raises UserError for a layout, shape or type that no GPU kernel handles, naming the op and module.
    """
    return _Selector(graph, Builder(graph, table, half)).run()


class _Selector:
    def __init__(self, graph: fx.Graph, out: Builder) -> None:
        self.graph, self.out = graph, out
        self.fused = fusible_ropes(graph)
        self.kernels: dict[str, Callable[[fx.Node], None]] = {
            "embed": self.embed, "linear": self.linear, "rms_norm": self.norm, "layer_norm": self.norm,
            "rms_norm_add": self.norm, "rope_table": self.rope_table, "rope": self.rope,
            "attention": self.attention, "act": self.elementwise, "gated_act": self.elementwise,
            "add": self.elementwise, "mul": self.elementwise, "scale": self.elementwise,
            "softcap": self.elementwise, "select_rows": self.select_rows,
        }  # fmt: skip

    def run(self) -> GpuProgram:
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            self.out.path = node.meta.get("path", "?")
            if node.target is aten.view.default:
                self.view(node)
            elif node.target is aten.slice.Tensor:
                self.slice(node)
            elif (name := op_name(node)) in self.kernels:
                self.kernels[str(name)](node)
            else:
                raise UserError(
                    f"op {node.target} at {self.out.path}: the GPU backend has no kernel for it; name CPU targets only "
                    "(--target)"
                )
        return self.finish()

    def finish(self) -> GpuProgram:
        """The sampler, and the placement of all buffers."""
        out, program = self.out, self.out.program
        logits = out.values.get(out.result)
        if logits is None or logits.buffer.domain != "logits":
            raise UserError("the model's output is not one row of logits per sampled token")
        program.vocab_size, out.path = logits.width, "sampling"
        emit_sampling(out, logits.width)
        program.offsets, program.arena = place_buffers(program.buffers)
        program.weights, program.weight_bytes = out.weights.items, out.weights.size
        return program

    def view(self, node: fx.Node) -> None:
        source = self.out.values.get(node.args[0])
        if source is not None:  # else the value exists in another form alone
            self.out.values[node] = source.viewed(tuple(node.meta["shape"][1:]))

    def slice(self, node: fx.Node) -> None:
        x, dim, lo, hi = node.args
        source = self.out.values[x]
        if dim != 1:
            raise UserError(f"a slice across heads at {self.out.path} is not contiguous; the GPU backend cannot use it")
        self.out.values[node] = source.sliced(lo, hi)

    # ---- kernels

    def embed(self, node: fx.Node) -> None:
        out = self.out
        op = ops.Embed.of(node)
        matrix, args = out.matrix(op.weight, op.format, False)
        k = op.weight.meta["weight"].shape[1]
        y = out.new(node, "tokens")
        constants = {"K": k, "W": _row(k, out.path), "KP": matrix.kp, "ROWS": matrix.rows, "OFFSET": op.offset,
                     "SCALE": float(op.scale), "FORMAT": op.format.name}  # fmt: skip
        args = {"ids": ("*i32", ("batch", str(op.ids)))} | args | out.outputs(y)
        out.emit(f"embed {op.format} {k}", "rows.embed", args, constants, y, [], cost=out.costs[node])

    def linear(self, node: fx.Node) -> None:
        out = self.out
        op = ops.Linear.of(node)
        shape, format = op.weight.meta["weight"].shape, op.format
        n, k = shape[0] // (2 if op.gated else 1), shape[1]
        x = out.operand(op.x, operand_form(format))
        plus = out.operand(op.residual, "f32") if op.residual is not None else None
        matrix, args = out.matrix(op.weight, format, op.gated)
        y = out.new(node, x.domain, ("half", "q8"))
        constants = {
            "N": n, "K": k, "LDX": x.width, "LDR": plus.width if plus else 0, "LDY": y.width, "ROWS": matrix.rows,
            "KP": matrix.kp, "COUNT": count(x), "FORMAT": format.name, "ACT": op.act, "GATED": op.gated, "OUT": y.form,
            "HALF": "fp32" if format is F32 else out.half,
        }  # fmt: skip
        inputs = dict(out.inputs(x))
        if format.integer_products and format.symmetric:  # no minimum to multiply the sums with
            del inputs["xsum"]
        args = inputs | args | out.vector(op.bias, "bias") | out.outputs(y)
        if plus is not None:
            args |= {"residual": ("*fp32", out.place(plus))}
        reads = [x] if plus is None else [x, plus]
        moved = sum(b.size for b in (*reads, y))
        cost = replace(out.costs[node], weight_bytes=matrix.bytes, activation_bytes=moved)
        parts = [f"linear {format} {n}x{k}", "gated" if op.gated else "", op.act if op.act != "none" else "",
                 "+ bias" if op.bias is not None else "", "+ residual" if plus is not None else "",
                 f"to {y.form}" if y.form != "f32" else "", "of samples" if count(x) else ""]  # fmt: skip
        label = " ".join(filter(None, parts))
        grid = (("R" if count(x) else "T", "BT"), (f"={n}", "BN"))
        out.emit(label, "linear.linear", args, constants, y, reads, grid, tiles=f"linear {format}", cost=cost)

    def norm(self, node: fx.Node) -> None:
        out = self.out
        op = ops.RmsNorm.match(node) or ops.RmsNormAdd.match(node) or ops.LayerNorm.of(node)
        plus = out.operand(op.residual, "f32") if isinstance(op, ops.RmsNormAdd) else None
        value = out.values[op.x]
        heads, c = math.prod(value.shape[:-1]), value.shape[-1]
        y = out.new(node, value.buffer.domain, ("half", "q8") if heads == 1 else ("half",))
        constants = {
            "C": c, "W": _row(c, out.path), "XC": value.column, "LDX": value.buffer.width, "LDY": y.width,
            "LDR": plus.width if plus else 0, "COUNT": count(y),
            "KIND": "layer" if isinstance(op, ops.LayerNorm) else "rms", "EPS": float(op.eps), "OUT": y.form,
        }  # fmt: skip
        args = {"x": ("*fp32", out.place(value.buffer))} | out.outputs(y)
        args |= out.vector(op.weight, "weight")
        if isinstance(op, ops.LayerNorm):
            args |= out.vector(op.bias, "bias")
        if plus is not None:
            args |= {"residual": ("*fp32", out.place(plus))}
        reads = [value.buffer] if plus is None else [value.buffer, plus]
        grid = (("R" if count(y) else "T", 1), heads)
        out.emit(f"{op.op} {c} to {y.form}", "rows.norm", args, constants, y, reads, grid)

    def rope_table(self, node: fx.Node) -> None:
        out = self.out
        op = ops.RopeTable.of(node)
        y = out.new(node, "tokens")
        args = {"positions": ("*i32", ("batch", "positions")), "table": ("*fp32", out.place(y))}
        constants = {"ROT": y.width, "W": pow2(y.width // 2), "SCALE": float(op.scale)}
        out.emit(
            f"rope_table {y.width}", "rope.rope_table", args | out.vector(op.inv_freq, "inv_freq"), constants, y, []
        )

    def rope(self, node: fx.Node) -> None:
        if node in self.fused:
            return
        out = self.out
        op = ops.Rope.of(node)
        x, table = out.values[op.x], out.values[op.table]
        heads, dim = x.shape
        y = out.new(node, "tokens")
        constants = {"D": dim, "DP": pow2(dim), "ROT": table.width, "INTERLEAVED": op.interleaved,
                     "XC": x.column, "LDX": x.buffer.width, "LDY": y.width}  # fmt: skip
        args = {"x": ("*fp32", out.place(x.buffer)), "table": ("*fp32", out.place(table.buffer))} | out.outputs(y)
        out.emit(f"rope {heads}x{dim}", "rope.rope", args, constants, y, [x.buffer, table.buffer], (("T", 1), heads))

    def attention(self, node: fx.Node) -> None:
        emit_attention(self.out, node, self.fused)

    def elementwise(self, node: fx.Node) -> None:
        out = self.out
        op = ops.Scale.match(node) or ops.Softcap.match(node)
        value = op.value if isinstance(op, ops.Scale) else op.cap if op is not None else 0.0
        activation = ops.Act.match(node) or ops.GatedAct.match(node)
        operands = [out.values[n] for n in node.args if isinstance(n, fx.Node)]
        a, b = operands[0], operands[-1]
        y = out.new(node, a.buffer.domain)
        constants: dict[str, Any] = {
            "C": a.width, "AC": a.column, "BC": b.column, "LDA": a.buffer.width, "LDB": b.buffer.width,
            "COUNT": count(y), "KIND": op_name(node), "ACT": activation.kind if activation else "none",
            "VALUE": float(value), "BLOCK": _BLOCK,
        }  # fmt: skip
        args = {"a": ("*fp32", out.place(a.buffer))} | out.outputs(y)
        if len(operands) == 2:
            args |= {"b": ("*fp32", out.place(b.buffer))}
        grid = (("R" if count(y) else "T", 1), -(-a.width // _BLOCK))
        reads = [v.buffer for v in operands]
        out.emit(f"{op_name(node)} {a.width}", "rows.elementwise", args, constants, y, reads, grid)

    def select_rows(self, node: fx.Node) -> None:
        out = self.out
        x = out.values[ops.SelectRows.of(node).x]
        y = out.new(node, "rows")
        constants = {"C": x.width, "XC": x.column, "LDX": x.buffer.width, "BLOCK": _BLOCK}
        args = {"x": ("*fp32", out.place(x.buffer)), "rows": ("*i32", ("batch", "rows"))} | out.outputs(y)
        grid = (("R", 1), -(-x.width // _BLOCK))
        out.emit(f"select_rows {x.width}", "rows.select_rows", args, constants, y, [x.buffer], grid)


def _row(width: int, path: str) -> int:
    """`width` padded to a power of two that one program can hold. Raises UserError when it cannot."""
    if width > MAX_ROW:
        raise UserError(f"a row of {width} elements at {path} is too long for the GPU's kernels (at most {MAX_ROW})")
    return pow2(width, 32)
