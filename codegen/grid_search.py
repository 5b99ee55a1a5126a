"""Grids of 4-bit weights that lose least of what a linear's inputs weigh.

Rounding to the nearest of 16 levels between a group's least and greatest weight spends them on outliers, and on columns
whose inputs are small. Here a group's scale and minimum minimise the error of the output, sum_k E[x_k^2] dw_k^2, over
ranges shrunk from both ends, each refitted by weighted least squares: the search of llama.cpp's importance matrices
(`make_qkx3_quants`), with E[x^2] from `llmc/calibration.py`. Grids that hold a group exactly stay.

The search is kernels/cpu/grid_search.cpp, compiled for this machine; all machines find the same.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

from llmc.codegen.cpu.compile import KERNEL_DIR, compile_unit
from llmc.kernels.codes import Array, Codes, quantize
from llmc.kernels.formats import W4
from llmc.runtime.cpu.targets import runnable_targets
from llmc.runtime.threads import default_threads

_AT_ONCE = 1 << 13
"""Groups that a thread searches at once (1 MiB)."""


def search_grids(rows: Array, importance: Array) -> Codes:
    """rows [n, K] float32 as int4. importance [K] > 0, float32: E[x^2] of the inputs, up to a factor.

    Raises ValueError for a weight that float16 cannot reach, RuntimeError when this machine runs no target.
    """
    codes = quantize(W4, rows)
    assert codes.minimum is not None
    n, groups, size = codes.q.shape
    padded = np.zeros((n, groups * size), np.float32)
    padded[:, : codes.k] = rows
    values = padded.reshape(n, groups, size)
    stored = codes.q * codes.scale.astype(np.float32)[..., None] + codes.minimum.astype(np.float32)[..., None]
    inexact = (stored != values).any(axis=-1)
    weight = np.zeros(groups * size, np.float32)
    weight[: codes.k] = importance
    which = np.nonzero(inexact)
    scale, minimum, q = _search(
        values[which], weight.reshape(groups, size), which[1].astype(np.int32),
        codes.scale[which].astype(np.float32), codes.minimum[which].astype(np.float32),
    )  # fmt: skip
    codes.scale[which], codes.minimum[which], codes.q[which] = scale, minimum, q
    return codes


def _search(values: Array, weight: Array, which: Any, scale: Array, minimum: Array) -> tuple[Array, Array, Any]:
    """values [n, 32], weight [m, 32], which [n]; grids to begin with [n] -> (scale, minimum, codes), in threads."""
    function = _compiled().llmc_search_grids
    codes = np.empty(values.shape, np.uint8)
    values = np.ascontiguousarray(values)

    def part(start: int) -> None:
        stop = min(start + _AT_ONCE, len(values))
        arrays = (a.ctypes.data for a in (scale[start:], minimum[start:], codes[start:]))
        function(values[start:].ctypes.data, weight.ctypes.data, which[start:].ctypes.data, stop - start, *arrays)

    with ThreadPoolExecutor(default_threads()) as pool:
        list(pool.map(part, range(0, len(values), _AT_ONCE)))
    return scale, minimum, codes


@cache
def _compiled() -> ctypes.CDLL:
    targets = runnable_targets()
    if not targets:
        raise RuntimeError("the search for grids runs on none of this machine's targets")
    code = compile_unit((KERNEL_DIR / "grid_search.cpp").read_text(), targets[0])
    fd = os.memfd_create("llmc-grid-search", os.MFD_CLOEXEC)
    with open(fd, "wb", closefd=False) as file:
        file.write(code)
    library = ctypes.CDLL(f"/proc/self/fd/{fd}")  # fd stays open: the loader knows libraries by name
    pointer = ctypes.c_void_p
    library.llmc_search_grids.argtypes = [pointer, pointer, pointer, ctypes.c_ssize_t, pointer, pointer, pointer]
    library.llmc_search_grids.restype = None
    return library
