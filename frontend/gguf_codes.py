"""GGUF's quantised blocks that are grids of a scale, or a scale and a minimum, as exact codes.

Layouts: ggml-common.h of llama.cpp. A block holds 32 elements of a row.

Q4_0  float16 d, 16 bytes: value = d * (u - 8), that is d * u + (-8 d)
Q4_1  float16 d, float16 m, 16 bytes: value = d * u + m
Q8_0  float16 d, 32 int8: value = d * q
Byte j of four-bit blocks holds element j in its low bits and element 16 + j in its high ones.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from llmc.kernels.codes import Codes

_HEADER = {"Q4_0": 2, "Q4_1": 4, "Q8_0": 2}
CODED = frozenset(_HEADER)
"""The kinds that `block_codes` knows."""


def block_codes(kind: str, rows: npt.NDArray[np.uint8], k: int) -> Codes | None:
    """rows [n, bytes of a row] of one of CODED, k elements each. None: a scale is not finite, or -8 d is no float16."""
    n, header = len(rows), _HEADER[kind]
    data = 32 if kind == "Q8_0" else 16
    blocks = rows.reshape(n, -1, header + data)
    heads = np.ascontiguousarray(blocks[..., :header]).view(np.float16)
    scale, body = heads[..., 0], blocks[..., header:]
    minimum = None
    if kind == "Q8_0":
        q: npt.NDArray[np.integer] = np.ascontiguousarray(body).view(np.int8)
    else:
        q = np.concatenate([body & 15, body >> 4], axis=-1)
        with np.errstate(over="ignore"):
            minimum = heads[..., 1] if kind == "Q4_1" else scale * np.float16(-8)
    if not np.isfinite(scale).all() or (minimum is not None and not np.isfinite(minimum).all()):
        return None
    return Codes(q, scale, minimum, k)
