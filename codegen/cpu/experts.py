"""The calls of a mixture of experts: route, gather, two products with an int8 form before each, combine.

Choices, gathered rows and int8 forms are private, as what only products read: in a step of few tokens each thread makes
all of them for itself, and the only barriers are those around the products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from llmc.codegen.cost import product_costs
from llmc.codegen.cpu.call import NO_VECTOR, Buffer, Enum, Name, Operand, Pairs, quant_bytes
from llmc.errors import UserError
from llmc.kernels import ops
from llmc.kernels.formats import Format
from llmc.kernels.pack import LANES
from llmc.runtime.cost import Cost

if TYPE_CHECKING:
    from llmc.codegen.cpu.program import Selector

_CHOICE_BYTES = 12
"""Of one chosen expert of a token: kernels/cpu/experts.h."""


def emit_moe(out: Selector, node: fx.Node) -> None:
    """Appends the calls of a node. Raises UserError for experts that are not whole tiles."""
    op = ops.Moe.of(node)
    out.check_format(op.format)
    _Mixture(out, node, op).run()


class _Mixture:
    """One mixture: E experts of width n over rows of k."""

    def __init__(self, out: Selector, node: fx.Node, op: ops.Moe) -> None:
        self.out, self.node, self.op = out, node, op
        self.experts = op.logits.meta["shape"][1]
        self.k, self.n = op.x.meta["shape"][1], op.down.meta["shape"][1]
        if self.k % LANES or self.n % LANES:
            raise UserError(
                f"experts at {out.path}: rows of {self.k} and experts of width {self.n}: the CPU backend needs "
                f"multiples of {LANES}"
            )

    def run(self) -> None:
        out, op, top_k = self.out, self.op, self.op.top_k
        costs = product_costs(op)
        x: Operand = out.quantize(op.x, self.k, op.format) if op.format.integer_products else out.values[op.x]
        choices = self.route()
        gathered = self.gather(x, choices)
        h = self.buffer("up", top_k * self.n * 4)
        template = (self.n, self.k, Enum("Act", op.act), op.gated)
        self.product(template, choices, gathered, (op.up, op.up_bias), costs[0], h)
        inner: Operand = self.quantize(h) if op.format.integer_products else Pairs(h, top_k)
        y = self.buffer("down", top_k * self.k * 4)
        template = (self.k, self.n, Enum("Act", "none"), False)
        self.product(template, choices, inner, (op.down, op.down_bias), costs[1], y)
        result = out.new(self.node, "tokens")
        operands = (Name("T"), choices, Pairs(y, top_k), result)
        out.call("combine_pairs", (self.k, top_k), operands, "tokens", Cost(), result.buffer)

    def buffer(self, name: str, size: int, format: Format | None = None, private: bool = False) -> Buffer:
        return self.out.buffer(f"{self.node.name}_{name}", "tokens", size, format, private)

    def route(self) -> Buffer:
        """The choices of every token."""
        out, router = self.out, self.op.router
        choices = self.buffer("choices", router.top_k * _CHOICE_BYTES, private=True)
        template = (
            self.experts, router.top_k, Enum("Scores", router.scores), router.groups, router.top_groups,
            router.group_best, router.normalise,
        )  # fmt: skip
        correction = out.vector(self.op.correction) or NO_VECTOR
        numbers = (router.floor, router.eps, router.scale)
        operands = (Name("T"), out.values[self.op.logits], correction, *numbers, choices)
        out.call("route", template, operands, "tokens", Cost(), choices, private=True)
        return choices

    def gather(self, x: Operand, choices: Buffer) -> Operand:
        """The rows of x by expert."""
        top_k, format = self.op.top_k, self.op.format
        if format.integer_products:
            padded = -(-self.k // format.group) * format.group
            buffer = self.buffer("rows", quant_bytes(top_k * padded, format), format, private=True)
        else:
            buffer = self.buffer("rows", top_k * self.k * 4, private=True)
        rows: Operand = buffer if format.integer_products else Pairs(buffer, top_k)
        template = (self.experts, top_k, self.k, Enum("Fmt", format.name))
        self.out.call("gather_pairs", template, (Name("T"), x, choices, rows), "pairs", Cost(), buffer, private=True)
        return rows

    def product(
        self,
        template: tuple[int, int, Enum, bool],
        choices: Buffer,
        x: Operand,
        matrices: tuple[fx.Node, fx.Node | None],
        cost: Cost,
        y: Buffer,
    ) -> None:
        out, (matrix, bias), gated = self.out, matrices, template[3]
        entry = out.program.weights.matrix(matrix.meta["weight"], self.op.format, gated)
        operands = (Name("T"), choices, x, entry, out.vector(bias) or NO_VECTOR, Pairs(y, self.op.top_k))
        arguments = (Enum("Fmt", self.op.format.name), *template, self.experts, self.op.top_k)
        out.call("expert_linear", arguments, operands, "columns", cost, y)

    def quantize(self, h: Buffer) -> Buffer:
        """The int8 form of the rows of pairs."""
        top_k, format = self.op.top_k, self.op.format
        padded = -(-self.n // format.group) * format.group
        buffer = self.buffer("up_q", quant_bytes(top_k * padded, format), format, private=True)
        operands = (Name(f"T * {top_k}"), Pairs(h, top_k), buffer)
        template = (self.n, Enum("Fmt", format.name))
        self.out.call("quantize", template, operands, "pairs", Cost(), buffer, private=True)
        return buffer
