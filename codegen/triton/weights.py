"""Where weights lie on the device, and the launches that bring them there from the plan's layout.

The plan holds a matrix once, in the tiles that the CPU kernels read; kernels/triton/repack.py turns it into row-major
matrices while it is loaded. So a plan for CPU and GPU costs no second copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmc.codegen.triton.launch import Arg, DeviceWeight, Launch, round_up
from llmc.codegen.weights import Entry
from llmc.kernels.formats import F32

_BLOCK_K = 256
_BLOCK_GROUPS = 16


@dataclass(frozen=True)
class DeviceMatrix:
    """A repacked matrix: what `linear` and `embed` take. pointer: type of its elements."""

    data: Arg
    words: Arg | None
    pointer: str
    rows: int
    kp: int
    bytes: int


class DeviceWeights:
    """The weights region on the device under construction."""

    def __init__(self, half: str) -> None:
        self.half, self.size = half, 0
        self.items: list[DeviceWeight] = []
        self._matrices: dict[int, DeviceMatrix] = {}
        self._vectors: dict[int, Arg] = {}

    def vector(self, entry: Entry) -> Arg:
        """A float32 vector, copied as it is."""
        if entry.offset not in self._vectors:
            at = self._place(entry.size)
            self.items.append(DeviceWeight(entry.offset, entry.size, at, ()))
            self._vectors[entry.offset] = ("weight", at)
        return self._vectors[entry.offset]

    def matrix(self, entry: Entry) -> DeviceMatrix:
        """A matrix of any stored format."""
        if entry.offset not in self._matrices:
            self._matrices[entry.offset] = self._add_matrix(entry)
        return self._matrices[entry.offset]

    def _place(self, size: int) -> int:
        at = self.size
        self.size = at + round_up(size, 256)
        return at

    def _add_matrix(self, entry: Entry) -> DeviceMatrix:
        assert entry.ref is not None
        n, k = entry.ref.shape
        rows = round_up(n // 2, 16) * 2 if entry.gated else round_up(n, 16)
        kp = round_up(k, 64)
        shape = {"KP": kp, "N_ROWS": rows // 2 if entry.gated else rows, "GATED": entry.gated}
        if not entry.format.group:
            return self._add_float(entry, rows, k, shape)
        return self._add_integer(entry, rows, k, shape)

    def _add_float(self, entry: Entry, rows: int, k: int, shape: dict[str, Any]) -> DeviceMatrix:
        pointer, kp = "*fp32" if entry.format is F32 else f"*{self.half}", shape["KP"]
        size = rows * kp * entry.format.bits // 8
        at = self._place(size)
        source = ("*fp32" if entry.format is F32 else "*i16", self._staged(entry, "data"))
        constants = {"K": k} | shape | {"FORMAT": entry.format.name, "BK": _BLOCK_K}
        launch = Launch(
            f"repack {entry.format} {rows}x{k}", "repack.repack_float",
            (("source", *source), ("w", pointer, ("weight", at))),
            constants, (rows // 16, -(-kp // _BLOCK_K)), "load",
        )  # fmt: skip
        self.items.append(DeviceWeight(entry.offset, entry.size, at, (launch,)))
        return DeviceMatrix(("weight", at), None, pointer, rows, kp, size)

    def _add_integer(self, entry: Entry, rows: int, k: int, shape: dict[str, Any]) -> DeviceMatrix:
        format = entry.format
        kp, k32 = shape["KP"], round_up(k, format.group)
        pointer = "*i8" if format.symmetric else "*u8"
        words = kp // (format.group * (2 if format.symmetric else 1))  # of two scales, or of scale and minimum
        data_bytes = rows * kp * format.bits // 8
        at = self._place(data_bytes)
        words_at = self._place(words * rows * 4)
        data = Launch(
            f"repack {entry.format} {rows}x{k}", f"repack.repack_{entry.format}",
            (("source", "*u8", self._staged(entry, "data")), ("w", pointer, ("weight", at))),
            {"K32": k32} | shape | {"BK": _BLOCK_K}, (rows // 16, -(-kp // _BLOCK_K)), "load",
        )  # fmt: skip
        args: list[tuple[str, str, Arg]] = [("low", "*i16", self._staged(entry, "scale"))]
        if not format.symmetric:
            args.append(("high", "*i16", self._staged(entry, "min")))
        args.append(("words", "*i32", ("weight", words_at)))
        constants = {"K32": k32, "ROWS": rows} | shape | {"PAIRS": format.symmetric, "BG": _BLOCK_GROUPS}
        scales = Launch(
            f"repack {entry.format} scales {rows}x{k}", "repack.repack_words", tuple(args),
            constants | ({"high": None} if format.symmetric else {}), (rows // 16, -(-words // _BLOCK_GROUPS)), "load",
        )  # fmt: skip
        self.items.append(DeviceWeight(entry.offset, entry.size, at, (data, scales)))
        return DeviceMatrix(("weight", at), ("weight", words_at), pointer, rows, kp, data_bytes + words * rows * 4)

    @staticmethod
    def _staged(entry: Entry, region: str) -> Arg:
        offset = entry.region(region)
        assert offset is not None
        return ("staging", offset - entry.offset)
