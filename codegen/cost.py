"""The cost of every op of a lowered graph: the one place where bytes and multiply-adds are counted.

Backends give their calls and launches these costs; where one keeps weights or activations in a form of its own, it
replaces their bytes.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import fx

from llmc.kernels.ops import Attention, Embed, Linear, Moe, op_name
from llmc.kernels.pack import LANES, packed_layout
from llmc.kv_page import PAGE_SIZE
from llmc.passes.kv_layout import KVSlot
from llmc.passes.shapes import PROBE_T
from llmc.runtime.cost import Cost


def node_costs(graph: fx.Graph) -> dict[fx.Node, Cost]:
    """The cost of every node that calls an op of the dialect."""
    return {node: _cost(node) for node in graph.nodes if op_name(node) is not None}


def _cost(node: fx.Node) -> Cost:
    rows = "T" if node.meta["shape"][0] == PROBE_T else "R"
    activations = sum(_row_bytes(n) for n in (node, *node.all_input_nodes) if n.op == "call_function")
    linear, embed, attention = Linear.match(node), Embed.match(node), Attention.match(node)
    moe = Moe.match(node)
    if linear is not None:
        n, k = linear.weight.meta["shape"]
        tiles = n // (2 if linear.gated else 1)
        stored = packed_layout(linear.format, tiles, k, linear.gated).size
        return Cost(rows, stored, activation_bytes=activations, macs=n * k, arithmetic=linear.format.arithmetic)
    if moe is not None:
        up, down = product_costs(moe)
        stored, macs = up.weight_bytes + down.weight_bytes, up.macs + down.macs
        return replace(up, rows=rows, weight_bytes=stored, macs=macs, activation_bytes=activations)
    if embed is not None:
        n, k = embed.weight.meta["shape"]
        stored = packed_layout(embed.format, n, k).size
        row = stored // (-(-n // LANES) * LANES)
        return Cost(rows, row_bytes=row, activation_bytes=activations)
    if attention is not None:
        slot: KVSlot = node.meta["kv"]
        heads = node.meta["shape"][1]
        return Cost(
            rows, activation_bytes=activations, kv_bytes=slot.page_bytes // PAGE_SIZE,
            attention_macs=2 * heads * slot.head_dim, window=attention.window,
            arithmetic="float32" if slot.dtype == "f32" else "float16",
        )  # fmt: skip
    return Cost(rows, activation_bytes=activations)


def product_costs(moe: Moe) -> tuple[Cost, Cost]:
    """The cost of the two products of a mixture's experts, by token, without that of activations."""
    experts = moe.logits.meta["shape"][1]

    def cost(matrix: fx.Node) -> Cost:
        n, k = matrix.meta["shape"]
        stored = packed_layout(moe.format, n, k).size
        macs = n * k // experts * moe.top_k
        return Cost("T", stored, macs=macs, arithmetic=moe.format.arithmetic, experts=experts, top_k=moe.top_k)

    return cost(moe.up), cost(moe.down)


def _row_bytes(node: fx.Node) -> int:
    """Bytes per row of a value in float32."""
    return 4 * math.prod(node.meta["shape"][1:])
