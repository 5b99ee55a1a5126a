"""Launches of one attention layer: rotation and writing of the pages, prompts, single tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from llmc.codegen.triton.builder import Builder
from llmc.codegen.triton.launch import Arg, Buffer, KVLayer, pow2
from llmc.codegen.values import Value
from llmc.errors import UserError
from llmc.kernels.ops import Attention, Rope
from llmc.kv_page import PAGE_SIZE
from llmc.passes.kv_layout import KVSlot

ROWS = 64
"""Rows in a tile; equal to ROWS of kernels/triton/attention.py."""
MAX_HEAD_DIM = 256
_BATCH = ("positions", "starts", "tables", "seqs", "decode_seqs", "decode_blocks")


def fusible_ropes(graph: fx.Graph) -> set[fx.Node]:
    """The rotations of queries and keys that only their attention layer reads: `rope_kv_write` does them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        attention = Attention.match(node)
        if attention is None:
            continue
        q, k = Rope.match(attention.q), Rope.match(attention.k)
        if q is None or k is None or q.table is not k.table or q.interleaved != k.interleaved:
            continue
        if all(list(x.users) == [node] for x in (attention.q, attention.k)):
            found |= {attention.q, attention.k}
    return found


def emit_attention(out: Builder, node: fx.Node, fused: set[fx.Node]) -> None:
    """Raises UserError for a head size or group that the kernels cannot do."""
    op = Attention.of(node)
    slot: KVSlot = node.meta["kv"]
    heads = node.meta["shape"][1]
    _check(slot, heads, out.path)
    index = len(out.program.kv)
    out.program.kv.append(_kv_layer(slot))
    out.program.partials = max(out.program.partials, heads * (_padded(slot) + 2))
    kv = _kv_arguments(out, slot, index)
    queries = _write(out, node, slot, kv, fused)
    native = ("half", "q8") if slot.head_dim % 32 == 0 else ("half",)
    y = out.new(node, "tokens", native)
    shape = {"HQ": heads, "HKV": slot.heads, "D": slot.head_dim, "DP": _padded(slot)}
    math = {"SCALE": float(op.scale), "WINDOW": int(op.window), "SOFTCAP": float(op.softcap), "HALF": _half(out, slot)}
    batch = {name: ("*i32", ("batch", name)) for name in _BATCH}
    read = {"q": (out.pointer(queries.form), out.place(queries))} | kv
    tail = out.vector(op.sinks, "sinks") | out.outputs(y)
    label, kind = f"{heads}/{slot.heads}x{slot.head_dim} {slot.dtype}", f"attention {slot.head_dim}"
    cost = replace(out.costs[node], activation_bytes=queries.size + y.size)

    tiles = _tile_table(out, heads // slot.heads)
    prefill = {"tiles": ("*i32", ("batch", f"tiles{tiles}"))} | {k: batch[k] for k in ("positions", "starts", "tables")}
    out.emit(
        f"attention prefill {label}", "attention.attention_prefill", read | tail | prefill,
        shape | math | {"TILES": 6 + tiles, "OUT": y.form}, y, [queries], ((f"tiles{tiles}", 1), slot.heads),
        tiles=kind, when="prefill", cost=cost,
    )  # fmt: skip
    decode = {"partials": ("*fp32", ("partials",))} | {k: batch[k] for k in _BATCH if k != "seqs"}
    out.emit(
        f"attention decode {label}", "attention.attention_decode", read | decode, shape | math, None, [queries],
        (("programs", 1),), tiles=kind, when="decode", cost=replace(cost, activation_bytes=queries.size),
    )  # fmt: skip
    combine = {k: v for k, v in decode.items() if k != "tables"}
    constants = {k: v for k, v in shape.items() if k != "HKV"} | {"WINDOW": int(op.window), "OUT": y.form, "STAGES": 4}
    out.emit(
        f"attention combine {label}", "attention.attention_combine", combine | tail, constants, y, [],
        (("D", 1), heads), tiles="warp", when="decode",
    )  # fmt: skip


def _write(out: Builder, node: fx.Node, slot: KVSlot, kv: dict[str, tuple[str, Arg]], fused: set[fx.Node]) -> Buffer:
    """Rotates the queries into the type of the product, and writes keys and values; returns the queries' buffer."""
    op = Attention.of(node)
    q, k, v = op.q, op.k, op.v
    table: Value[Buffer] | None = None
    interleaved = q in fused and Rope.of(q).interleaved
    if q in fused:
        table = out.values[Rope.of(q).table]
        q, k = Rope.of(q).x, Rope.of(k).x
    values = [out.values[x] for x in (q, k, v)]
    heads = node.meta["shape"][1]
    form = "f32" if slot.dtype == "f32" else "half"
    queries = out.buffer(f"{node.name}_q", "tokens", form, heads * slot.head_dim)
    constants: dict[str, Any] = {"HQ": heads, "HKV": slot.heads, "D": slot.head_dim, "DP": _padded(slot)}
    constants |= {"ROT": table.width if table is not None else 0, "INTERLEAVED": interleaved}
    for name, value in zip("QKV", values, strict=True):
        constants |= {f"{name}C": value.column, f"LD{name}": value.buffer.width}
    args = {name: ("*fp32", out.place(value.buffer)) for name, value in zip("qkv", values, strict=True)}
    args |= {"q_out": (out.pointer(form), out.place(queries))} | kv
    args |= {name: ("*i32", ("batch", name)) for name in ("positions", "seqs", "tables")}
    reads = [value.buffer for value in values]
    if table is not None:
        args |= {"table": ("*fp32", out.place(table.buffer))}
        reads.append(table.buffer)
    grid = (("T", 1), heads + 2 * slot.heads)
    label = f"rope + KV write {heads}/{slot.heads}x{slot.head_dim}"
    out.emit(label, "rope.rope_kv_write", args, constants, queries, reads, grid, tiles="warp")
    return queries


def _kv_arguments(out: Builder, slot: KVSlot, index: int) -> dict[str, tuple[str, Arg]]:
    pointer = {"f32": "*fp32", "bf16": f"*{out.half}", "int8": "*i8"}[slot.dtype]
    args: dict[str, tuple[str, Arg]] = {"keys": (pointer, ("kv", index, "key")),
                                        "values": (pointer, ("kv", index, "value"))}  # fmt: skip
    if slot.dtype == "int8":
        args |= {"key_scales": ("*fp32", ("kv", index, "key_scale")),
                 "value_scales": ("*fp32", ("kv", index, "value_scale"))}  # fmt: skip
    return args


def _kv_layer(slot: KVSlot) -> KVLayer:
    values = slot.value_bytes
    if slot.dtype != "int8":
        return KVLayer(slot.page_bytes, values, None, None)
    return KVLayer(slot.page_bytes, values, 2 * values, 2 * values + PAGE_SIZE * slot.heads * 4)


def _check(slot: KVSlot, heads: int, path: str) -> None:
    if slot.head_dim > MAX_HEAD_DIM:
        raise UserError(
            f"attention at {path}: heads of {slot.head_dim}; the GPU kernels do at most {MAX_HEAD_DIM}; "
            "build for the CPU only"
        )
    if heads // slot.heads > ROWS:
        raise UserError(f"attention at {path}: {heads // slot.heads} query heads per KV head; at most {ROWS} on a GPU")


def _padded(slot: KVSlot) -> int:
    return pow2(slot.head_dim, 16)


def _half(out: Builder, slot: KVSlot) -> str:
    return "fp32" if slot.dtype == "f32" else out.half


def _tile_table(out: Builder, group: int) -> int:
    """The index of the tile table whose tiles hold 64 rows of `group` heads."""
    tokens, known = ROWS // group, out.program.tile_tokens
    if tokens not in known:
        if len(known) == 3:
            raise UserError(f"attention at {out.path}: more than three different sizes of query groups in one model")
        known.append(tokens)
    return known.index(tokens)
