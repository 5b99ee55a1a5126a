"""The GPU code of a plan: segment `code/cuda:sm_…`, one launch list with its kernels for one compute capability.

`archive_format.py` says how the segment is laid out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from llmc.runtime.cuda.archive_format import archive_fields, unpack_archive

SYMBOLS = ("T", "R", "S", "D", "tiles0", "tiles1", "tiles2", "programs")
BATCH_ARRAYS = ("meta", "tokens", "positions", "seqs", "starts", "rows", "decode_seqs", "decode_blocks",
                "tiles0", "tiles1", "tiles2", "sampling", "tables", "extra")  # fmt: skip
_OFFSETS = ("tokens", "rows", "weight", "staging")
_NAMES = {"batch": BATCH_ARRAYS, "out": ("tokens", "logprobs"), "kv": ("key", "value", "key_scale", "value_scale")}
_PLAIN = ("partials", "adjusted", "stats", "logits")
_WHEN = ("always", "decode", "prefill", "adjust")
_MAX_THREADS = 1024


class Arg(NamedTuple):
    """A pointer argument. kind: an arena ("tokens", "rows": `at` in bytes per row), "weight" or "staging" (`at` in
    bytes), "kv" (`at` is the layer, `name` the array), "batch" or "out" (`name`), or a scratch area."""

    kind: str
    at: int = 0
    name: str = ""


class Dim(NamedTuple):
    """A dimension of a grid: ceil(symbol / per), or `per` itself where symbol is empty."""

    symbol: str
    per: int


@dataclass(frozen=True)
class Kernel:
    """name: symbol in the binary `code`. op: what it computes, for people and for the keys of tuned choices."""

    name: str
    op: str
    code: memoryview
    threads: int
    shared: int
    grid: tuple[Dim, Dim, Dim]
    num_args: int


@dataclass(frozen=True)
class Variant:
    """Kernels (indices) that compute the same up to `limit` rows (None: any number); the first unless tuned."""

    limit: int | None
    kernels: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One launch of the list. rows: "T" or "R", what the variants' limits count. when: see `Launcher.run`."""

    op: str
    path: str
    rows: str
    when: str
    variants: tuple[Variant, ...]
    args: tuple[Arg, ...]


@dataclass(frozen=True)
class WeightItem:
    """Bytes [source, source + size) of the weights segment; with `calls` they go to the staging area and the calls
    write the device's layout, without they are copied to offset `device` of the weights region."""

    source: int
    size: int
    device: int
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class KvLayer:
    """Bytes per page of one layer, and where in them its arrays start (None: this KV format has no scales)."""

    page_bytes: int
    offsets: dict[str, int | None]


@dataclass(frozen=True)
class Archive:
    """A launch list. arena: bytes per row of each domain. partials: float32 per decode work item. staging: bytes."""

    vocab_size: int
    arena: dict[str, int]
    partials: int
    tile_tokens: tuple[int, ...]
    kv: tuple[KvLayer, ...]
    weight_bytes: int
    weights: tuple[WeightItem, ...]
    staging: int
    kernels: tuple[Kernel, ...]
    calls: tuple[Call, ...]

    @property
    def page_bytes(self) -> int:
        """Of one KV page in all layers."""
        return sum(layer.page_bytes for layer in self.kv)


def choice_key(kernels: Sequence[Kernel], variant: Variant) -> str:
    """The name under which a plan's manifest holds the tuned choice among a variant's kernels."""
    return f"{kernels[variant.kernels[0]].op}@{variant.limit}"


def read_archive(segment: memoryview, weights_size: int) -> Archive:
    """Reads a segment. weights_size: bytes of the plan's weights segment.

    Raises UserError for anything that could not be run: nothing is looked up in vain later on.
    """
    with archive_fields():
        return _read(segment, weights_size)


def _read(segment: memoryview, weights_size: int) -> Archive:
    data, binaries = unpack_archive(segment)
    kernels = tuple(_kernel(entry, binaries) for entry in data["kernels"])
    tiles = tuple(_size(n, 1) for n in data["tile_tokens"])
    _require(1 <= len(tiles) <= 3, "the tile tables")
    region = data["weights"]
    archive = Archive(
        vocab_size=_size(data["vocab_size"], 1),
        arena={domain: _size(data["arena"][domain]) for domain in ("tokens", "rows")},
        partials=_size(data["partials"]),
        tile_tokens=tiles,
        kv=tuple(_layer(entry) for entry in data["kv"]),
        weight_bytes=_size(region["bytes"]),
        weights=tuple(
            WeightItem(_size(i["source"]), _size(i["source_size"], 1), _size(i["device"]), _calls(i["calls"], kernels))
            for i in region["items"]
        ),
        staging=_size(data["staging"]),
        kernels=kernels,
        calls=_calls(data["calls"], kernels),
    )
    _require(bool(archive.kv), "no KV layers")
    _check_weights(archive, weights_size)
    for call in archive.calls:
        _check_call(archive, call, loading=False)
    return archive


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def _size(value: Any, least: int = 0) -> int:
    """A plain integer that is at least `least` and far from the end of 64 bits."""
    _require(type(value) is int and least <= value < 1 << 48, f"a size of {value!r}")
    return int(value)


def _text(value: Any) -> str:
    _require(type(value) is str, f"{value!r} is no text")
    return str(value)


def _one_of(value: Any, known: Sequence[str]) -> str:
    _require(value in known, f"{value!r} is none of {', '.join(known)}")
    return str(value)


def _kernel(entry: dict[str, Any], binaries: memoryview) -> Kernel:
    offset, size = _size(entry["offset"]), _size(entry["size"], 1)
    name = _text(entry["name"])
    _require(name.isascii() and name.isidentifier(), f"a kernel of the name {name!r}")
    _require(offset + size <= len(binaries), f"kernel {name} lies outside the segment")
    x, y, z = (_dim(dim) for dim in entry["grid"])
    threads = 32 * _size(entry["warps"], 1)
    _require(threads <= _MAX_THREADS, f"kernel {name} of {threads} threads")
    _require(all(_text(kind).startswith("*") for kind in entry["args"]), f"kernel {name} takes more than pointers")
    return Kernel(
        name, _text(entry["op"]), binaries[offset : offset + size], threads, _size(entry["shared"]), (x, y, z),
        len(entry["args"]),
    )  # fmt: skip


def _dim(value: Any) -> Dim:
    if isinstance(value, list):
        symbol, per = value
        return Dim(_one_of(symbol, SYMBOLS), _size(per, 1))
    return Dim("", _size(value))


def _layer(entry: dict[str, Any]) -> KvLayer:
    page = _size(entry["page_bytes"], 1)
    found = {"value": entry["value_offset"], "key_scale": entry["key_scale_offset"],
             "value_scale": entry["value_scale_offset"]}  # fmt: skip
    offsets: dict[str, int | None] = {"key": 0}
    for name, offset in found.items():
        offsets[name] = None if offset is None and name != "value" else _size(offset)
    known = [offset for offset in offsets.values() if offset is not None]
    _require(all(o % 16 == 0 and o < page for o in known) and page % 16 == 0, "a KV layer's offsets")
    return KvLayer(page, offsets)


def _calls(entries: Any, kernels: tuple[Kernel, ...]) -> tuple[Call, ...]:
    return tuple(_call(entry, kernels) for entry in entries)


def _call(entry: dict[str, Any], kernels: tuple[Kernel, ...]) -> Call:
    args = tuple(_arg(value) for value in entry["args"])
    variants = []
    for variant in entry["variants"]:
        limit = None if variant["max"] is None else _size(variant["max"], 1)
        indices = tuple(_size(index) for index in variant["kernels"])
        _require(bool(indices) and max(indices) < len(kernels), f"call {entry['op']!r} has no kernel")
        _require(all(kernels[i].num_args == len(args) for i in indices), f"the arguments of {kernels[indices[0]].op}")
        variants.append(Variant(limit, indices))
    limits = [v.limit for v in variants]
    _require(bool(limits) and None not in limits[:-1], f"the variants of {entry['op']!r}")
    return Call(
        _text(entry["op"]), _text(entry["path"]), _one_of(entry["rows"], ("T", "R")), _one_of(entry["when"], _WHEN),
        tuple(variants), args,
    )  # fmt: skip


def _arg(value: Any) -> Arg:
    kind, *rest = value
    if kind in _OFFSETS:
        (offset,) = rest
        return Arg(kind, _size(offset))
    if kind == "kv":
        layer, name = rest
        return Arg(kind, _size(layer), _one_of(name, _NAMES[kind]))
    if kind in _NAMES:
        (name,) = rest
        return Arg(kind, 0, _one_of(name, _NAMES[kind]))
    _require(kind in _PLAIN and not rest, f"argument {value!r}")
    return Arg(kind)


def _check_weights(archive: Archive, weights_size: int) -> None:
    for item in archive.weights:
        _require(item.source + item.size <= weights_size, "a weight lies outside the weights segment")
        if item.calls:
            _require(item.size <= archive.staging, "a weight is larger than the staging area")
        else:
            _require(item.device + item.size <= archive.weight_bytes, "a weight lies outside the weights region")
        for call in item.calls:
            _check_call(archive, call, loading=True)


def _check_call(archive: Archive, call: Call, loading: bool) -> None:
    """Every argument lies in its area; a call that repacks weights (`loading`) depends on no batch."""
    limits = {"tokens": archive.arena["tokens"], "rows": archive.arena["rows"], "weight": archive.weight_bytes,
              "staging": archive.staging, "kv": len(archive.kv)}  # fmt: skip
    where = f"an argument of {call.op} ({call.path})"
    for arg in call.args:
        _require(arg.at == 0 or arg.at < limits[arg.kind], where)
        _require(arg.kind not in ("weight", "staging") or arg.at % 16 == 0, where)
        _require((arg.kind in ("weight", "staging")) if loading else arg.kind != "staging", where)
        _require(arg.kind != "kv" or archive.kv[arg.at].offsets[arg.name] is not None, where)
        _require(not arg.name.startswith("tiles") or int(arg.name[5:]) < len(archive.tile_tokens), where)
    symbols = {d.symbol for v in call.variants for i in v.kernels for d in archive.kernels[i].grid} - {"", "programs"}
    known = {"T", "R", "S", "D", *(f"tiles{i}" for i in range(len(archive.tile_tokens)))}
    _require(symbols <= (set() if loading else known), f"the grid of {call.op} ({call.path})")
