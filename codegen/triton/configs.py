"""Which tiles a kernel is compiled with, by capability and size of the step.

The first entry of a list is the default, the others are what `llmc tune` times against it on the GPU. Entries of one
launch differ in speed alone: integer products are exact, and floating ones keep to one kind of tensor-core instruction,
so that their sums run in one order (see docs/gpu.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmc.codegen.triton.launch import Launch
from llmc.kernels.formats import F32, Format, find_format


@dataclass(frozen=True)
class Config:
    """constants: those of the kernel that the configuration sets."""

    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int = 3


@dataclass(frozen=True)
class Bucket:
    """Configurations for steps of at most `limit` rows (None: any number)."""

    limit: int | None
    configs: tuple[Config, ...]


_SAMPLE_WARPS = {"stats": 4, "adjust": 8, "rows": 16}
_ASYNC_MMA = (90, 100)
"""Capabilities whose tensor cores take 64 rows at a time (wgmma, tcgen05): the floor of BN for floating products."""


def buckets(launch: Launch, capability: int) -> tuple[Bucket, ...]:
    """The configurations of a launch on a compute capability, e.g. 90."""
    kind, _, detail = launch.tiles.partition(" ")
    if kind == "linear":
        return _linear(find_format(detail), bool(launch.constants["GATED"]), capability)
    if kind == "attention":
        return (Bucket(None, _attention(int(detail), launch.function.endswith("prefill"), capability)),)
    if kind == "warp":
        return (Bucket(None, (Config({}, 1),)),)
    if kind == "sample":  # the block is part of the sums' order: one for all
        return (Bucket(None, (Config({} if detail == "stats" else {"BLOCK": 1024}, _SAMPLE_WARPS[detail]),)),)
    assert kind == "row", kind
    width = launch.constants.get("W", launch.constants.get("BLOCK", 256))
    return (Bucket(None, (Config({}, 4 if width <= 4096 else 16 if width > 16384 else 8),)),)


def _tile(bn: int, bt: int, warps: int, stages: int, bk: int = 64, widen: bool = False) -> Config:
    return Config({"BN": bn, "BT": bt, "BK": bk, "WIDEN": widen, "STAGES": stages}, warps, stages)


def _linear(format: Format, gated: bool, capability: int) -> tuple[Bucket, ...]:
    """Few tokens: narrow tiles, deep pipelines, as the weights' bytes decide. Many: tiles that fill tensor cores."""
    if format is F32:
        few = (_tile(64, 16, 4, 3, 32), _tile(64, 16, 4, 2, 32))
        return (Bucket(16, few), Bucket(None, (_tile(64, 32, 4, 2, 32), _tile(64, 32, 8, 2, 32))))
    free = format.integer_products or capability not in _ASYNC_MMA
    few = (_tile(64, 16, 4, 4), _tile(32, 16, 2, 6) if free else _tile(64, 16, 4, 6))
    some = (_tile(64, 64, 4, 3), _tile(128, 32, 4, 3))
    many: tuple[Config, ...]
    if format.integer_products:
        many = (_tile(128, 64, 8, 3), _tile(64, 64, 4, 3))
        if capability == 100:  # its integer tensor cores are slow; the products are exact in 16-bit floats too
            many = (_tile(64, 64, 8, 2, widen=True), *many)
    elif gated:
        many = (_tile(128, 64, 8, 3), _tile(64, 64, 4, 3), _tile(64, 64, 4, 2))
    else:
        many = (_tile(128, 128, 8, 3), _tile(128, 64, 4, 3), _tile(64, 64, 4, 2))
    return (Bucket(16, few), Bucket(64, some), Bucket(None, many))


def _attention(head_dim: int, prefill: bool, capability: int) -> tuple[Config, ...]:
    """Prompts and single tokens get the same number of warps: it shapes the sums of the softmax."""
    wide = head_dim > (128 if capability in _ASYNC_MMA else 64)
    warps = 8 if wide else 4
    return tuple(Config({}, warps, stages) for stages in ((3, 2, 1) if prefill else (1,)))
