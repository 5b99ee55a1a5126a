"""Gives every attention layer its place in the paged KV pool.

A page holds 16 positions of every layer, on every backend in as many bytes. Nothing is rewritten: attention nodes get
meta["kv"], a `KVSlot`, and the keys and values that reach the node are written to the pool before it reads them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from llmc.errors import UserError
from llmc.kernels.dialect import OPS
from llmc.kernels.ops import Attention
from llmc.kv_page import PAGE_SIZE
from llmc.passes.match import calls, shape
from llmc.passes.result import PassContext, PassResult

_BYTES = {"f32": 4, "bf16": 2, "int8": 1}
_SCALE_BYTES = 4


@dataclass(frozen=True)
class KVSlot:
    """layer, KV heads, head size, element type ("int8": with a float32 scale per position and head)."""

    layer: int
    heads: int
    head_dim: int
    dtype: str

    @property
    def value_bytes(self) -> int:
        """Bytes of the values (or keys) of one page, without scales."""
        return PAGE_SIZE * self.heads * self.head_dim * _BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of this layer: keys, values and their scales."""
        scales = PAGE_SIZE * self.heads * _SCALE_BYTES if self.dtype == "int8" else 0
        return 2 * (self.value_bytes + scales)


def run(graph: fx.Graph, ctx: PassContext) -> PassResult:
    layers = []
    for node in calls(graph, OPS["attention"]):
        attention = Attention.of(node)
        _, heads, dim = shape(attention.k)
        query_heads = shape(attention.q)[1]
        if dim % 8 or dim > 512 or query_heads % heads:
            raise UserError(
                f"attention at {node.meta.get('path')}: {query_heads} query heads over {heads} KV heads of size {dim};"
                " the head size must be a multiple of 8 up to 512, and the KV heads must divide the query heads"
            )
        node.meta["kv"] = KVSlot(attention.layer, heads, dim, ctx.kv_dtype)
        layers.append(attention.layer)
    return PassResult(len(layers))
