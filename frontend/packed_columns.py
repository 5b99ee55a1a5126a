"""GPTQ and AWQ: int32 words of 4 or 8 bits in matrices that are transposed, [K, N], as are their scales [groups, N].

GPTQ  qweight [K * bits / 32, N] packed along K, the lowest bits first; qzeros [groups, N * bits / 32]; g_idx [K], the
      group of each element of K. value = scale * (u - z). "gptq" stores z - 1, "gptq_v2" z. What is stored as z - 1 is
      mended on whole words, as the libraries do: a carry out of one zero reaches the next.
AWQ   (gemm) qweight [K, N / 8] and qzeros [groups, N / 8] packed along N in the order 0, 2, 4, 6, 1, 3, 5, 7.
      value = scale * (u - z).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.frontend.quantised import Companions, Floats, Levels, Quantised, group_order, unpack, whole_groups
from llmc.frontend.raw_tensor import RawTensor, widen
from llmc.kernels.formats import W4, W8

_SCALES = ("F16", "BF16", "F32")
_AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Where in a word element i stands."""
_ALIGN = 8
"""Columns are read in whole words of packed ones."""


def gptq(parts: Companions, settings: Mapping[str, Any], stores_z: bool) -> Quantised:
    """stores_z: zeros are stored as they are ("gptq_v2"). Raises UserError for what does not fit together."""
    qweight = parts.get("qweight", ("I32",), (None, None))
    n = qweight.shape[1]
    qzeros = parts.get("qzeros", ("I32",), (None, None))
    bits = qzeros.shape[1] * 32 // max(n, 1)
    if bits not in (4, 8) or bits * n != qzeros.shape[1] * 32:
        raise parts.refuse(f"has zeros of {bits} bits for {n} outputs: only 4 and 8 bits are supported")
    k, groups = qweight.shape[0] * 32 // bits, qzeros.shape[0]
    scales = parts.get("scales", _SCALES, (groups, n))
    group, order = whole_groups(parts, k, groups, settings.get("group_size")), None
    if "g_idx" in parts or settings.get("desc_act"):
        order = group_order(parts, parts.get("g_idx", ("I32", "I64"), (k,)), groups, group)
    correction = np.uint32(0 if stores_z else 0x11111111 if bits == 4 else 0x01010101)

    def read(start: int, stop: int) -> tuple[Levels, Floats]:
        words = qweight.columns(start, stop).T  # [n, K * bits / 32]
        u = unpack(np.ascontiguousarray(words), bits)
        lo, hi = _aligned(start, stop, n)
        packed = qzeros.columns(lo * bits // 32, hi * bits // 32).view(np.uint32) + correction
        z = unpack(packed, bits).T[start - lo : stop - lo]
        scale = _scale_columns(scales, start, stop)
        return _levels(u, z, scale, group, order)

    kind = f"GPTQ int{bits}" + (", act-order" if order is not None else "")
    format = W4 if bits == 4 and order is None else W8
    return Quantised(kind, (n, k), format, 1 if order is not None else group, read, scales)


def awq(parts: Companions, settings: Mapping[str, Any]) -> Quantised:
    """Raises UserError for what does not fit together."""
    qweight = parts.get("qweight", ("I32",), (None, None))
    k, n = qweight.shape[0], qweight.shape[1] * 8
    qzeros = parts.get("qzeros", ("I32",), (None, n // 8))
    scales = parts.get("scales", _SCALES, (qzeros.shape[0], n))
    group = whole_groups(parts, k, qzeros.shape[0], settings.get("group_size"))

    def read(start: int, stop: int) -> tuple[Levels, Floats]:
        lo, hi = _aligned(start, stop, n)

        def columns(tensor: RawTensor) -> npt.NDArray[np.uint8]:
            found = unpack(tensor.columns(lo // 8, hi // 8), 4)
            ordered = found.reshape(len(found), (hi - lo) // 8, 8)[..., _AWQ_ORDER].reshape(found.shape)
            return np.ascontiguousarray(ordered.T[start - lo : stop - lo])

        return _levels(columns(qweight), columns(qzeros), _scale_columns(scales, start, stop), group, None)

    return Quantised("AWQ int4", (n, k), W4, group, read, scales)


def _aligned(start: int, stop: int, n: int) -> tuple[int, int]:
    return start // _ALIGN * _ALIGN, min(-(-stop // _ALIGN) * _ALIGN, n)


def _scale_columns(scales: RawTensor, start: int, stop: int) -> Floats:
    return np.ascontiguousarray(widen(scales.columns(start, stop), scales.dtype).T)


def _levels(
    u: npt.NDArray[np.uint8], z: npt.NDArray[np.uint8], scale: Floats, group: int, order: npt.NDArray[np.int64] | None
) -> tuple[Levels, Floats]:
    """u [n, K], z and scale [n, groups] -> u - z and scales, of every element where the groups are out of order."""
    if order is None:
        spread = np.repeat(z, group, axis=1)[:, : u.shape[1]]
    else:
        spread, scale = z[:, order], scale[:, order]
    return u.astype(np.int16) - spread, scale
