"""Gives every attention layer its place in the paged KV pool.

A page holds 16 positions of every layer. Nothing is rewritten: attention nodes get meta["kv"], a `KVSlot`, and the
keys and values that reach the node are written to the pool before it reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from llmc.errors import UserError
from llmc.kernels.dialect import OPS
from llmc.passes.match import calls, shape
from llmc.passes.result import PassContext, PassResult

PAGE_SIZE = 16
_BYTES = {"f32": 4, "bf16": 2}


@dataclass(frozen=True)
class KVSlot:
    """layer, KV heads, head size, element type, and bytes of one page of this layer (keys and values)."""

    layer: int
    heads: int
    head_dim: int
    dtype: str

    @property
    def page_bytes(self) -> int:
        return 2 * PAGE_SIZE * self.heads * self.head_dim * _BYTES[self.dtype]


def run(graph: fx.Graph, ctx: PassContext) -> PassResult:
    layers = []
    for node in calls(graph, OPS["attention"]):
        _, heads, dim = shape(node.args[1])
        query_heads = shape(node.args[0])[1]
        if dim % 8 or dim > 512 or query_heads % heads:
            raise UserError(
                f"attention at {node.meta.get('path')}: {query_heads} query heads over {heads} KV heads of size {dim};"
                " the head size must be a multiple of 8 up to 512, and the KV heads must divide the query heads"
            )
        node.meta["kv"] = KVSlot(node.args[9], heads, dim, ctx.kv_dtype)
        layers.append(node.args[9])
    return PassResult(len(layers))
