"""GGUF's quantised blocks that are grids of a scale, or a scale and a minimum, as exact codes.

Layouts: ggml-common.h of llama.cpp. A block holds 32 elements of a row, of Q4_K 8 times 32.

Q4_0    float16 d, 16 bytes: value = d * (u - 8), that is d * u + (-8 d)
Q4_1    float16 d, float16 m, 16 bytes: value = d * u + m
Q4_K    float16 d, float16 m, 8 pairs of 6 bits s and t, 128 bytes: value = d * s * u - m * t; both products round here
        to float16
Q5_0    float16 d, 32 high bits, 16 bytes: value = d * (u - 16)
Q8_0    float16 d, 32 int8: value = d * q
IQ4_NL  float16 d, 16 bytes: value = d * table[u]
MXFP4   byte e, 16 bytes: value = 2^(e - 128) * table[u], the table being twice e2m1's values
Byte j of four-bit blocks holds element j in its low bits and element 16 + j in its high ones. Of Q4_K 32 bytes hold two
groups in that way, the first in the low bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from llmc.kernels.codes import Codes, grid_codes
from llmc.kernels.formats import W4, W8, Format

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
_Grid = tuple[npt.NDArray[np.integer], Floats, Floats | None]
"""q [n, groups, 32], scale and minimum [n, groups] as the file means them."""
_IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the values of a 4-bit float with a sign, two bits of exponent and one of mantissa."""
_PLAIN = frozenset({"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"})


def grid_format(kind: str) -> Format | None:
    """The format that a kind of block is taken in as stored, None for a kind that is not quantised. Kinds without codes
    are rounded to 8 bits."""
    if kind in _PLAIN:
        return None
    return W4 if kind in ("Q4_0", "Q4_1", "Q4_K") else W8


def block_codes(kind: str, rows: Bytes, k: int) -> Codes | None:
    """rows [n, bytes of a row] of k elements each. None: a kind without codes, or a scale or minimum that is not finite
    or that float16 does not hold."""
    if kind not in _READERS:
        return None
    read, size = _READERS[kind]
    q, scale, minimum = read(rows.reshape(len(rows), rows.shape[1] // size, size))
    return grid_codes(q, scale, minimum, k)


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at a byte of every block."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _nibbles(body: Bytes) -> Bytes:
    return np.concatenate([body & 15, body >> 4], axis=-1)


def _q4_0(blocks: Bytes) -> _Grid:
    scale = _half(blocks, 0)
    return _nibbles(blocks[..., 2:]), scale, -8 * scale


def _q4_1(blocks: Bytes) -> _Grid:
    return _nibbles(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)


def _q4_k(blocks: Bytes) -> _Grid:
    n = len(blocks)
    packed, body = blocks[..., 4:16], blocks[..., 16:].reshape(n, -1, 4, 32)
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    s = np.concatenate([low & 63, high & 15 | low >> 2 & 48], axis=-1)
    t = np.concatenate([middle & 63, high >> 4 | middle >> 2 & 48], axis=-1)
    u = np.stack([body & 15, body >> 4], axis=3)
    scale, minimum = _half(blocks, 0)[..., None] * s, -_half(blocks, 2)[..., None] * t
    return u.reshape(n, -1, 32), scale.reshape(n, -1), minimum.reshape(n, -1)


def _q5_0(blocks: Bytes) -> _Grid:
    fifth = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
    u = _nibbles(blocks[..., 6:]) | fifth << 4
    return u.astype(np.int8) - np.int8(16), _half(blocks, 0), None


def _q8_0(blocks: Bytes) -> _Grid:
    return np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _half(blocks, 0), None


def _iq4_nl(blocks: Bytes) -> _Grid:
    return _IQ4_NL[_nibbles(blocks[..., 2:])], _half(blocks, 0), None


def _mxfp4(blocks: Bytes) -> _Grid:
    scale = np.ldexp(np.float32(1), blocks[..., 0].astype(np.int32) - 128)
    return E2M1_DOUBLED[_nibbles(blocks[..., 1:])], scale.astype(np.float32), None


_READERS: dict[str, tuple[Callable[[Bytes], _Grid], int]] = {
    "Q4_0": (_q4_0, 18), "Q4_1": (_q4_1, 20), "Q4_K": (_q4_k, 144), "Q5_0": (_q5_0, 22), "Q8_0": (_q8_0, 34),
    "IQ4_NL": (_iq4_nl, 18), "MXFP4": (_mxfp4, 17),
}  # fmt: skip
"""kind -> (reader of its blocks, bytes of a block)"""
