"""Runs Triton kernels over guarded buffers, with weights repacked as the loader does it: in the interpreter, or where
LLMC_TEST_DEVICE says (see gpu_launch.py).

The interpreter multiplies the bits of bfloat16 as integers, so that float16 and float32 stand for it there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl

from llmc.kernels import pack
from llmc.kernels.formats import find_format
from llmc.kernels.triton import repack, rows

DEVICE = os.environ.get("LLMC_TEST_DEVICE", "")
if DEVICE not in ("", "cuda", "interpreted"):
    raise ValueError(f"LLMC_TEST_DEVICE={DEVICE}: cuda, interpreted, or not set")
if DEVICE:
    import gpu_launch

TRITON_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
F16 = torch.bfloat16 if DEVICE == "cuda" else torch.float16
"""The 16-bit type of products, keys and values."""
SLACK = 8 if DEVICE == "cuda" else 1
"""Factor of tolerances: bfloat16 has three bits less than float16, and a GPU's functions are not correctly rounded."""
GUARD = 64
"""Elements before and after every output that must stay as they were."""
PATTERN = 0x5A


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


def pow2(n: int, least: int = 1) -> int:
    return max(least, 1 << (n - 1).bit_length())


class Output:
    """An array that a kernel fills. Bytes that it must not touch hold a pattern; `checked` looks at them."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.count = shape, int(np.prod(shape))
        size = torch.empty(0, dtype=dtype).element_size()
        self.memory = torch.full(((self.count + 2 * GUARD) * size,), PATTERN, dtype=torch.uint8)
        self.data = self.memory.view(dtype)[GUARD : GUARD + self.count].view(shape)
        self.guard = GUARD * size

    def checked(self, written: int | None = None) -> torch.Tensor:
        """The array; its rows from `written` on, and the guards, must be untouched."""
        per_row = (len(self.memory) - 2 * self.guard) // max(self.shape[0], 1)
        end = self.guard + (self.shape[0] if written is None else written) * per_row
        assert (self.memory[: self.guard] == PATTERN).all(), "written before the start"
        assert (self.memory[end:] == PATTERN).all(), "written behind the end"
        return self.data[:written]


def launch(kernel: Any, grid: tuple[int, ...], **args: Any) -> None:
    """Runs a kernel; pointers that are not given are None, as in a kernel compiled without them. No grid is empty on a
    device either: runtime/cuda/launches.py leaves such launches out."""
    if min(grid) == 0:
        return
    for name in kernel.arg_names:
        if name.islower() and name not in args:
            args[name] = None
    args = {k: v.data if isinstance(v, Output) else v for k, v in args.items()}
    assert set(args) == set(kernel.arg_names), set(args) ^ set(kernel.arg_names)
    if DEVICE:
        gpu_launch.launch(kernel, grid, args)
    else:
        kernel[grid](**args)


def meta(**values: int) -> torch.Tensor:
    """The `meta` array of a step by the names of its numbers."""
    at = {"tokens": 0, "rows": 1, "seqs": 2, "decodes": 3, "items": 4, "stride": 5, "tiles": 6}
    m = torch.zeros(16, dtype=torch.int32)
    for name, value in values.items():
        m[at[name]] = value
    return m


@dataclass
class Form:
    """An activation as a kernel leaves it: values, and for "q8" scales and sums. `rows` of them are valid."""

    kind: str
    y: Output
    ys: Output | None
    ysum: Output | None
    rows: int
    n: int

    @classmethod
    def empty(cls, kind: str, capacity: int, rows: int, n: int, half: torch.dtype) -> Form:
        ld = round_up(n, 32) if kind == "q8" else n
        dtype = {"q8": torch.int8, "half": half, "f32": torch.float32}[kind]
        scales = [Output((capacity, ld // 32), torch.float32) if kind == "q8" else None for _ in range(2)]
        return cls(kind, Output((capacity, ld), dtype), *scales, rows, n)

    @property
    def ld(self) -> int:
        return self.y.shape[1]

    def outputs(self) -> dict[str, Any]:
        return {"y": self.y, "ys": self.ys, "ysum": self.ysum}

    def inputs(self) -> dict[str, Any]:
        return {"x": self.y, "xs": self.ys, "xsum": self.ysum}

    def values(self) -> torch.Tensor:
        """[rows, n] float32, after checking what lies around; "q8": its sums and padding are right too."""
        y = self.y.checked(self.rows).float()
        if self.ys is None or self.ysum is None:
            return y
        grouped = y.view(self.rows, -1, 32)
        assert torch.equal(grouped.sum(-1), self.ysum.checked(self.rows)), "wrong sums"
        assert not y[:, self.n :].any(), "padding is not 0"
        return (grouped * self.ys.checked(self.rows)[..., None]).view(self.rows, -1)[:, : self.n]

    def bits(self) -> list[torch.Tensor]:
        """All that the kernel wrote, to be compared bit for bit."""
        parts = [p.checked(self.rows) for p in (self.y, self.ys, self.ysum) if p is not None]
        return [p.view(torch.int32) if p.dtype == torch.float32 else p.view(torch.int8) for p in parts]


def same_bits(a: Form, b: Form) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.bits(), b.bits(), strict=True))


def converted(x: torch.Tensor, kind: str, half: torch.dtype, capacity: int | None = None) -> Form:
    """x [T, C] float32 in another form, made by the `convert` kernel."""
    t, c = x.shape
    form = Form.empty(kind, t if capacity is None else capacity, t, c, half)
    launch(
        rows.convert, (t,), x=x, meta=meta(tokens=t), C=c, W=pow2(c, 32), XC=0, LDX=c, LDY=form.ld, COUNT=0,
        OUT=kind, **form.outputs(),
    )  # fmt: skip
    return form


class DeviceWeight:
    """A matrix [N, K] (gated: with `up`) packed as in a plan, then repacked as on the device.

    `dtype`: of the values of f32 and bf16 weights on the device.
    """

    def __init__(
        self, fmt: str, w: np.ndarray, up: np.ndarray | None = None, dtype: torch.dtype = torch.float32, bk: int = 64
    ) -> None:
        self.fmt, self.gated = fmt, up is not None
        self.n, self.k = w.shape
        self.n_rows = round_up(self.n, 16)
        self.rows, self.kp = self.n_rows * (2 if self.gated else 1), round_up(self.k, 64)
        packed = torch.frombuffer(bytearray(pack.pack(find_format(fmt), w, up)), dtype=torch.uint8)
        layout = pack.packed_layout(find_format(fmt), self.n, self.k, self.gated)
        self.regions = {r.name: packed[r.offset : r.offset + r.size] for r in layout.regions}
        shape = {"KP": self.kp, "N_ROWS": self.n_rows, "GATED": self.gated}
        grid = (self.rows // 16, ceil_div(self.kp, bk))
        self.ws: Output | None = None
        if fmt in ("f32", "bf16"):
            self.w = Output((self.rows, self.kp), dtype)
            source = self.regions["data"].view(torch.float32 if fmt == "f32" else torch.int16)
            launch(repack.repack_float, grid, source=source, w=self.w, K=self.k, FORMAT=fmt, BK=bk, **shape)
            return
        kernel = repack.repack_w8 if fmt == "w8" else repack.repack_w4
        bits = {"w8": 8, "w4": 4}[fmt]
        self.w = Output((self.rows, self.kp * bits // 8), torch.int8 if fmt == "w8" else torch.uint8)
        k32 = round_up(self.k, 32)
        launch(kernel, grid, source=self.regions["data"], w=self.w, K32=k32, BK=bk, **shape)
        self._words(k32, shape)

    def _words(self, k32: int, shape: dict[str, Any]) -> None:
        words = self.kp // (64 if self.fmt == "w8" else 32)
        self.ws = Output((words, self.rows), torch.int32)
        low = self.regions["scale"].view(torch.int16)
        high = self.regions["min"].view(torch.int16) if self.fmt == "w4" else None
        launch(
            repack.repack_words, (self.rows // 16, ceil_div(words, 4)), low=low, high=high, words=self.ws, K32=k32,
            ROWS=self.rows, PAIRS=self.fmt == "w8", BG=4, **shape,
        )  # fmt: skip

    def levels(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of w8 and w4, by the definition of the device layout: integers [ROWS, KP], and scales and minima
        [ROWS, KP / 32] float32 (of w8, minima are 0)."""
        assert self.ws is not None
        w, words = self.w.checked().numpy(), self.ws.checked().numpy().view(np.uint32)
        halves = [words & 0xFFFF, words >> 16]
        low, high = (h.astype(np.uint16).view(np.float16).astype(np.float32) for h in halves)
        if self.fmt == "w8":
            scale = np.stack([low, high], axis=1).reshape(-1, self.rows).T
            return w, scale, np.zeros_like(scale)
        pairs = w.reshape(self.rows, -1, 1, 32)
        return np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(self.rows, self.kp), low.T, high.T

    def values(self) -> np.ndarray:
        """The float32 values [ROWS, KP] that the device layout stands for."""
        if self.ws is None:
            return self.w.checked().float().numpy()
        levels, scale, low = self.levels()
        return levels.astype(np.float32) * np.repeat(scale, 32, axis=1) + np.repeat(low, 32, axis=1)
