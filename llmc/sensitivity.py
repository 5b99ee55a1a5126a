"""How much each linear loses in a format: KL of the float32 graph with that one linear quantised.

The graph runs once. When it comes to a linear, its tokens are doubled: one copy goes on as before, the other with this
linear quantised; both see their own keys and values, as sequences of one ragged batch do. So every weight is read once,
and a variant costs what lies behind its linear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from llmc.kernels.formats import Format
from llmc.kernels.interpret import Body, downstream, evaluate, is_weight, last_uses
from llmc.kernels.ops import Linear
from llmc.kernels.quant import fake_quantize_activations, to_float32
from llmc.kernels.weights import Reader, WeightRef

Values = Callable[[WeightRef, Format], Any]
"""(weight, format) -> the float32 values [N, K] that it has in a plan."""
ROWS = 128
"""Logits of a variant that are in memory at once."""


@dataclass(frozen=True)
class Sensitivity:
    """KL(float32 || variant) in nats, mean over tokens. units: of one weight in the low format. base: of all of them in
    the high one at once."""

    units: Mapping[WeightRef, float]
    base: float


def units_of(graph: fx.Graph) -> list[fx.Node]:
    """The linears whose format may differ from linear to linear: all but the head, in order. A weight that several
    share counts once."""
    tail = downstream(graph, "rows")
    found: dict[WeightRef, fx.Node] = {}
    for node in graph.nodes:
        linear = Linear.match(node)
        if linear is not None and node not in tail and "weight" in linear.weight.meta:
            found.setdefault(linear.weight.meta["weight"], node)
    return list(found.values())


def measure(
    graph: fx.Graph,
    reader: Reader,
    windows: Sequence[Sequence[int]],
    values: Values,
    low: Format,
    high: Format,
    unit_done: Callable[[], None] = lambda: None,
) -> Sensitivity:
    """windows: token ids of the sequences that are measured on, all of one length."""
    with torch.no_grad():
        run = _Run(graph, reader, windows, values, low, high)
        run.body(unit_done)
        found: Sensitivity = run.divergences()
    return found


class _Run:
    """One run of the graph over a batch that grows. The first `n` tokens are the float32 model's; the next n those of
    the model in the high format; then n for every unit so far, in order."""

    def __init__(
        self, graph: fx.Graph, reader: Reader, windows: Any, values: Values, low: Format, high: Format
    ) -> None:
        self.graph, self.reader, self.quantised, self.low, self.high = graph, reader, values, low, high
        self.units = units_of(graph)
        self.length, self.sequences = len(windows[0]), len(windows)
        self.n = self.length * self.sequences
        self.copies = 2
        self.tokens = torch.tensor([token for window in windows for token in window])
        self.live: dict[fx.Node, Any] = {}

    def inputs(self) -> dict[str, Tensor]:
        return {
            "tokens": self.tokens.repeat(self.copies),
            "positions": torch.arange(self.length).repeat(self.copies * self.sequences),
            "query_start": torch.arange(0, self.copies * self.n + 1, self.length),
            "rows": torch.arange(0),
        }

    def body(self, unit_done: Callable[[], None]) -> None:
        """Runs up to the head; unit_done is called after each unit."""
        tail, last, units = downstream(self.graph, "rows"), last_uses(self.graph), set(self.units)
        for node in self.graph.nodes:
            if node.op == "placeholder" and not is_weight(node):
                self.live[node] = self.inputs().get(node.name)
            elif node.op == "call_function" and node not in tail:
                self.live[node] = evaluate(node, self.live, self.reader)
                if node in units:
                    self.fork(node)
                    unit_done()
                for used in node.all_input_nodes:
                    if last[used] is node:
                        self.live.pop(used, None)

    def fork(self, node: fx.Node) -> None:
        """Sets the rows of the model in the high format, and appends a copy whose `node` is in the low one."""
        linear, n = Linear.of(node), self.n
        second = slice(n, 2 * n)
        self.live[node][second] = self.linear(linear, second, self.high)
        variant = self.linear(linear, slice(0, n), self.low)
        self.copies += 1
        fresh = self.inputs()
        for other, value in self.live.items():
            if other is node:
                self.live[other] = torch.cat([value, variant])
            elif other.op == "placeholder":
                self.live[other] = fresh.get(other.name)
            else:
                self.live[other] = torch.cat([value, value[:n]])

    def linear(self, linear: Linear, rows: slice, format: Format) -> Tensor:
        """The op in a format, of some rows."""
        ref = linear.weight.meta["weight"]
        x = self.live[linear.x][rows]
        x = fake_quantize_activations(x) if format.integer_products else x
        bias = None if linear.bias is None else to_float32(linear.bias.meta["weight"].read(self.reader))
        residual = None if linear.residual is None else self.live[linear.residual][rows]
        weight = torch.from_numpy(self.quantised(ref, format))
        result: Tensor = linear.target(x, weight, bias, residual, linear.act, linear.gated, "f32")
        return result

    def divergences(self) -> Sensitivity:
        sums = torch.zeros(self.copies, dtype=torch.float64)
        for start in range(0, self.n, ROWS):
            rows = torch.arange(start, min(start + ROWS, self.n))
            every = torch.cat([rows + copy * self.n for copy in range(self.copies)])
            blocks = Body(self.graph, self.reader, every, self.live).logits(len(rows))
            log_p = torch.log_softmax(next(blocks), -1)
            p = log_p.exp()
            for copy, logits in enumerate(blocks, 1):
                sums[copy] += (p * (log_p - torch.log_softmax(logits, -1))).sum(-1).double().sum()
        base, *units = (sums[1:] / self.n).tolist()
        return Sensitivity({node.args[1].meta["weight"]: kl for node, kl in zip(self.units, units, strict=True)}, base)
