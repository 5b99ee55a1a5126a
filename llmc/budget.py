"""Precision by budget: which linears get four bits and which eight, so that the weights fit and least is lost.

Every linear's loss in int4 is measured (`sensitivity.py`); linears get eight bits in the order of the loss that they
save per byte, as long as the weights fit. Losses of single linears add up, nearly: the sum is the prediction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from llmc.errors import UserError
from llmc.kernels import pack
from llmc.kernels.formats import Format
from llmc.kernels.ops import Embed, Linear, Moe
from llmc.kernels.weights import Reader, WeightRef
from llmc.sensitivity import Sensitivity, Values, measure, units_of

WINDOW, WINDOWS = 256, 2
"""Tokens that losses are measured on: so many, from so many places of the text."""


def windows_of(tokens: Sequence[int], max_len: int) -> list[Sequence[int]]:
    """WINDOWS parts of a text, from its beginning on, evenly spread; one where it is short."""
    length = min(WINDOW, max_len, len(tokens))
    count = WINDOWS if len(tokens) >= WINDOWS * length else 1
    return [tokens[len(tokens) * i // count :][:length] for i in range(count)]


@dataclass(frozen=True)
class Choice:
    """formats: of every linear but the head. predicted_kl: KL(float32 || plan), nats, but for what activations that are
    not inputs of linears and the KV cache lose. weight_bytes: of all weights."""

    formats: Mapping[WeightRef, Format]
    predicted_kl: float
    weight_bytes: int
    max_weight_bytes: int
    high: Format

    def manifest(self) -> dict[str, Any]:
        high = sum(math.prod(ref.shape) for ref, format in self.formats.items() if format is self.high)
        return {
            "max_weight_bytes": self.max_weight_bytes,
            "predicted_kl": float(f"{self.predicted_kl:.4g}"),
            "linears": {f.name: sum(g is f for g in self.formats.values()) for f in sorted(
                set(self.formats.values()), key=lambda f: f.bits)},
            "high_share": round(high / max(1, sum(math.prod(ref.shape) for ref in self.formats)), 4),
        }  # fmt: skip


def weight_bytes(graph: fx.Graph, formats: Mapping[WeightRef, Format], head: Format) -> int:
    """Bytes of all weights of an exact graph in a plan: linears in `formats`, head and token embedding in `head`."""
    sizes: dict[Any, int] = {}
    for node in graph.nodes:
        linear, embed = Linear.match(node), Embed.match(node)
        if linear is not None:
            ref = linear.weight.meta.get("weight")
            if ref is not None:
                sizes[ref, linear.gated] = matrix_bytes(ref, formats.get(ref, head).stored, linear.gated)
        elif embed is not None and embed.ids.name == "tokens" and "weight" in embed.weight.meta:
            sizes[embed.weight.meta["weight"], False] = matrix_bytes(embed.weight.meta["weight"], head.stored, False)
    matrices = {ref for ref, _ in sizes}
    for node in graph.nodes:
        ref = node.meta.get("weight") if node.op == "placeholder" else None
        if ref is not None and ref not in matrices:
            sizes[ref, False] = 4 * math.prod(ref.shape)
        elif node.op == "placeholder" and "constant" in node.meta:
            sizes[node, False] = 4 * node.meta["constant"].numel()
    return sum(sizes.values())


def matrix_bytes(ref: WeightRef, format: Format, gated: bool) -> int:
    """Bytes of a packed matrix."""
    return pack.packed_layout(format, ref.shape[0] // (2 if gated else 1), ref.shape[1], gated).size


def decide(
    graph: fx.Graph,
    reader: Reader,
    tokens: list[Sequence[int]],
    values: Values,
    formats: tuple[Format, Format, Format],
    max_weight_bytes: int,
    unit_done: Callable[[], None],
) -> Choice:
    """Measures and chooses. formats: low, high, and that of head and token embedding.

    Raises UserError for a budget that is too small, before anything is measured, and for a mixture of experts.
    """
    low, high, head = formats
    if any(Moe.match(node) is not None for node in graph.nodes):
        raise UserError("--max-weight-bytes: is not there for mixtures of experts yet; give --int4 or --int8")
    _check_least(weight_bytes(graph, dict.fromkeys(map(_ref, units_of(graph)), low), head), max_weight_bytes)
    found = measure(graph, reader, tokens, values, low, high, unit_done)
    return choose(graph, found, low, high, head, max_weight_bytes)


def _ref(node: fx.Node) -> WeightRef:
    ref: WeightRef = Linear.of(node).weight.meta["weight"]
    return ref


def _check_least(least: int, max_weight_bytes: int) -> None:
    if least > max_weight_bytes:
        raise UserError(
            f"--max-weight-bytes {max_weight_bytes}: the weights take {least} bytes with every linear in 4 bits; give "
            "that or more"
        )


def choose(
    graph: fx.Graph, found: Sensitivity, low: Format, high: Format, head: Format, max_weight_bytes: int
) -> Choice:
    """Raises UserError when all linears in the low format are too large."""
    units = {_ref(node): Linear.of(node) for node in units_of(graph)}
    formats = dict.fromkeys(units, low)
    size = weight_bytes(graph, formats, head)
    _check_least(size, max_weight_bytes)
    extra = {
        ref: matrix_bytes(ref, high.stored, linear.gated) - matrix_bytes(ref, low.stored, linear.gated)
        for ref, linear in units.items()
    }
    for ref in sorted(units, key=lambda ref: (-found.units[ref] / max(1, extra[ref]), ref.describe())):
        if size + extra[ref] <= max_weight_bytes:
            size += extra[ref]
            formats[ref] = high
    kl = found.base + sum(found.units[ref] for ref, format in formats.items() if format is low)
    return Choice(formats, kl, size, max_weight_bytes, high)
