"""compressed-tensors, FP8 and MXFP4: matrices [N, K] as the model has them, packed or not along K.

compressed-tensors
  pack-quantized   weight_packed int32 [N, K * bits / 32], q + 2^(bits - 1), the lowest bits first; weight_scale
                   [N, groups]; weight_zero_point likewise, packed along N: [N * bits / 32, groups]; weight_shape [2]
  int-quantized    weight int8, weight_scale [N, 1], [N, groups] or [1]; weight_zero_point as weight_scale
  float-quantized  weight e4m3, weight_scale as above, or in blocks
  nvfp4-pack       weight_packed uint8 [N, K / 2], low nibble first; weight_scale e4m3 [N, K / 16], divided by
                   weight_global_scale [1]
  mxfp4-pack       weight_packed likewise; weight_scale uint8 [N, K / 32], a power of two
FP8                weight e4m3, weight_scale_inv, which multiplies blocks of e.g. 128 x 128
MXFP4              *_blocks uint8 [..., N, K / 32, 16], low nibble first; *_scales uint8 [..., N, K / 32]: 2^(e - 127)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from llmc.frontend.gguf_codes import E2M1_DOUBLED
from llmc.frontend.quantised import Companions, Floats, Levels, Quantised, group_order, unpack, whole_groups
from llmc.frontend.raw_tensor import RawTensor
from llmc.kernels.formats import W4, W8

_SCALES = ("F16", "BF16", "F32")


def pack_quantized(parts: Companions) -> Quantised:
    """Integers of 4 or 8 bits in words."""
    packed = parts.get("weight_packed", ("I32",), (None, None))
    n, k = (int(x) for x in parts.get("weight_shape", ("I64", "I32"), (2,)).rows())
    words = packed.shape[1]
    bits = next((b for b in (4, 8) if n == packed.shape[0] and k > 0 and words == -(-k * b // 32)), 0)
    if not bits:
        raise parts.refuse(f"has {list(packed.shape)} words for a matrix {[n, k]}: only 4 and 8 bits are supported")
    scales = parts.get("weight_scale", _SCALES, (n, None))
    groups = scales.shape[1]
    group, order = whole_groups(parts, k, groups, None), None
    if "weight_g_idx" in parts:
        order = group_order(parts, parts.get("weight_g_idx", ("I32", "I64"), (k,)), groups, group)
    half = 1 << bits - 1
    zeros = None
    if "weight_zero_point" in parts:
        packed_zeros = parts.get("weight_zero_point", ("I32", "I8")).dtype == "I32"
        zeros = parts.get("weight_zero_point", ("I32", "I8"), (-(-n * bits // 32) if packed_zeros else n, groups))

    def read(start: int, stop: int) -> tuple[Levels, Floats]:
        levels = unpack(packed.rows(start, stop), bits)[:, :k].astype(np.int16) - half
        z = _zeros(zeros, bits, start, stop)
        scale = scales.floats(start, stop)
        if order is not None:
            return levels - (0 if z is None else z[:, order]), scale[:, order]
        return levels if z is None else levels - np.repeat(z, group, axis=1)[:, :k], scale

    kind = f"compressed-tensors int{bits}" + (", act-order" if order is not None else "")
    format = W4 if bits == 4 and order is None else W8
    return Quantised(kind, (n, k), format, 1 if order is not None else group, read, scales)


def int_quantized(parts: Companions) -> Quantised:
    """int8, one scale per row, group of a row, or matrix."""
    weight = parts.get("weight", ("I8",), (None, None))
    n, k = weight.shape
    scales, group, scale_of = _scales(parts, "weight_scale", n, k)
    zeros = parts.get("weight_zero_point", ("I8",), scales.shape) if "weight_zero_point" in parts else None

    def read(start: int, stop: int) -> tuple[Levels, Floats]:
        levels: npt.NDArray[np.integer] = weight.rows(start, stop)
        if zeros is not None:
            z = zeros.rows(start, stop) if zeros.shape[:1] == (n,) else np.full(stop - start, zeros.rows().item())
            spread = z.reshape(stop - start, zeros.shape[1] if len(zeros.shape) == 2 else 1)
            levels = levels.astype(np.int16) - np.repeat(spread, group, axis=1)[:, :k]
        return levels, scale_of(start, stop)

    return Quantised("compressed-tensors int8", (n, k), W8, group, read, scales)


def float_quantized(parts: Companions, suffix: str, kind: str, block: tuple[int, int] | None) -> Quantised:
    """e4m3, with scales per row, matrix or block that multiply. suffix: of the scales. block: rows and columns of one,
    as the configuration states it."""
    weight = parts.get("weight", ("F8_E4M3",), (None, None))
    n, k = weight.shape
    types = (*_SCALES, "F8_E8M0")
    scales = parts.get(suffix, types)
    if math.prod(scales.shape) == 1 or block is None:
        _, group, scale_of = _scales(parts, suffix, n, k)
    else:
        parts.get(suffix, types, (-(-n // block[0]), -(-k // block[1])))
        group, scale_of = block[1], partial(_block_scales, scales, block[0])

    def read(start: int, stop: int) -> tuple[Levels, Floats]:
        return weight.floats(start, stop), scale_of(start, stop)

    return Quantised(kind, (n, k), W8, group, read, scales)


def _block_scales(scales: RawTensor, height: int, start: int, stop: int) -> Floats:
    """Of rows start:stop, each block's scales serving `height` rows."""
    first = start // height
    return scales.floats(first, -(-stop // height))[np.arange(start, stop) // height - first]


def nvfp4(parts: Companions) -> Quantised:
    """e2m1 in groups of 16, scales in e4m3 over one global scale."""
    packed = parts.get("weight_packed", ("U8",), (None, None))
    n, k = packed.shape[0], packed.shape[1] * 2
    scales = parts.get("weight_scale", ("F8_E4M3",), (n, k // 16))
    whole = parts.get("weight_global_scale", ("F32",))
    if k % 16 or math.prod(whole.shape) != 1:
        raise parts.refuse(f"has rows of {k} and {math.prod(whole.shape)} global scales; groups are of 16, under one")

    def read(start: int, stop: int) -> tuple[Levels, Floats]:
        scale = scales.floats(start, stop) / (2 * whole.floats().reshape(()))
        return _e2m1(packed.rows(start, stop)), scale.astype(np.float32)

    return Quantised("compressed-tensors NVFP4", (n, k), W8, 16, read, scales)


def mxfp4(parts: Companions, blocks: str, scale: str, kind: str) -> Quantised:
    """e2m1 in groups of 32 with powers of two. blocks, scale: the suffixes. Leading dimensions count as rows."""
    packed = parts.get(blocks, ("U8",))
    *lead, inner = packed.shape if blocks == "weight_packed" else (*packed.shape[:-2], math.prod(packed.shape[-2:]))
    n, k = math.prod(lead), inner * 2
    if len(packed.shape) < 2 or k % 32 or (blocks != "weight_packed" and packed.shape[-1] != 16):
        raise parts.refuse(f"has blocks {list(packed.shape)}: their last 16 bytes must hold 32 elements of a row")
    scales = parts.get(scale, ("U8", "F8_E8M0"), (*lead, k // 32))
    each = n // packed.shape[0] if packed.shape[0] else 1

    def rows(tensor: RawTensor, start: int, stop: int) -> npt.NDArray[np.uint8]:
        first = start // each
        found = tensor.rows(first, -(-stop // each)).reshape(-1, math.prod(tensor.shape) // max(n, 1))
        return found[start - first * each : stop - first * each]

    def read(start: int, stop: int) -> tuple[Levels, Floats]:
        exponent = rows(scales, start, stop).astype(np.int32)
        power = np.where(exponent == 255, np.nan, np.ldexp(1.0, exponent - 128))  # of half the doubled levels
        return _e2m1(rows(packed, start, stop)), power.astype(np.float32)

    return Quantised(kind, (n, k), W8, 32, read, scales, tuple(lead) if len(lead) > 1 else ())


def _scales(parts: Companions, suffix: str, n: int, k: int) -> tuple[RawTensor, int, Callable[[int, int], Floats]]:
    """(the scales, elements of a group, their rows [n, groups]) where they are per matrix, per row or in groups."""
    scales = parts.get(suffix, _SCALES)
    if math.prod(scales.shape) == 1:
        group = whole_groups(parts, k, 1, None)
        return scales, group, lambda lo, hi: np.full((hi - lo, 1), scales.floats().item(), np.float32)
    parts.get(suffix, _SCALES, (n, None) if len(scales.shape) == 2 else (n,))
    groups = scales.shape[1] if len(scales.shape) == 2 else 1
    group = whole_groups(parts, k, groups, None)
    return scales, group, lambda lo, hi: scales.floats(lo, hi).reshape(hi - lo, groups)


def _zeros(zeros: RawTensor | None, bits: int, start: int, stop: int) -> npt.NDArray[np.int16] | None:
    """Zero points [n, groups] of rows start:stop, signed as the levels are."""
    if zeros is None:
        return None
    if zeros.dtype == "I8":
        return zeros.rows(start, stop).astype(np.int16)
    per_word = 32 // bits
    first = start // per_word
    words = zeros.rows(first, -(-stop // per_word))
    fields = unpack(words.T, bits).T  # [words * per_word, groups]
    return fields[start - first * per_word : stop - first * per_word].astype(np.int16) - (1 << bits - 1)


def _e2m1(octets: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    """uint8 [n, b] to twice the values [n, 2 b], the low nibble first."""
    return E2M1_DOUBLED[unpack(octets, 4)]
