"""A matrix of a safetensors checkpoint that is quantised already: levels and scales, as float32 values and as codes.

What the formats have in common; how each stores its levels and scales: frontend/packed_columns.py (GPTQ, AWQ) and
frontend/packed_rows.py (compressed-tensors, FP8, MXFP4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.errors import UserError
from llmc.frontend.raw_tensor import RawTensor
from llmc.kernels.codes import Codes, grid_codes
from llmc.kernels.formats import W8, Format

Levels = npt.NDArray[np.integer] | npt.NDArray[np.float32]
Floats = npt.NDArray[np.float32]
_F16_MAX = 65504.0


@dataclass(frozen=True)
class Quantised:
    """A matrix [N, K] of a linear layer: value = level * scale.

    kind: what reports call it. format: the one that it is taken in as stored. lead: dimensions that the rows are
    divided in, () for a matrix. group: elements along K that share a
    scale. read: (first row, end row) -> levels [n, K] and scales [n, ceil(K / group)]; whole numbers where they are
    codes. scales: the tensor that holds the scales, for messages.
    """

    kind: str
    shape: tuple[int, int]
    format: Format
    group: int
    read: Callable[[int, int], tuple[Levels, Floats]]
    scales: RawTensor
    lead: tuple[int, ...] = ()

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the parameter, [*lead, K] or [N, K]."""
        return (*self.lead, self.shape[1]) if self.lead else self.shape

    @property
    def grid(self) -> Format | None:
        """The format of a matrix as stored; None for a stack of matrices, which is read as values."""
        return None if self.lead else self.format

    def values(self, start: int, stop: int) -> Floats:
        """start:stop along the first dimension as float32."""
        each = math.prod(self.lead[1:])
        found = self._values(start * each, stop * each)
        return found.reshape(stop - start, *self.full_shape[1:])

    def _values(self, start: int, stop: int) -> Floats:
        levels, scale = self._read(start, stop)
        spread = np.repeat(scale, min(self.group, self.shape[1]), axis=1)[:, : self.shape[1]]
        return levels.astype(np.float32) * spread

    def codes(self, start: int, stop: int) -> Codes | None:
        """Rows as codes on a symmetric grid in groups of 32; None where scales or levels are not of that kind."""
        width = W8.group
        if self.group % width or self.lead:
            return None
        levels, scale = self._read(start, stop)
        if not np.issubdtype(levels.dtype, np.integer):
            return None
        n, k = levels.shape
        groups = -(-k // width)
        q = np.zeros((n, groups * width), levels.dtype)
        q[:, :k] = levels
        return grid_codes(
            q.reshape(n, groups, width), np.repeat(scale, self.group // width, axis=1)[:, :groups], None, k
        )

    def _read(self, start: int, stop: int) -> tuple[Levels, Floats]:
        """Raises UserError for a scale that is not finite, or of codes one that float16 does not reach."""
        levels, scale = self.read(start, stop)
        if scale.size and not float(np.abs(scale).max()) <= _F16_MAX:
            raise UserError(
                f"{self.scales} holds a scale of {float(np.abs(scale).max()):g}, beyond float16 ({_F16_MAX:g}): "
                "the checkpoint is damaged; fetch or export it again"
            )
        return levels, scale


@dataclass(frozen=True)
class Companions:
    """The tensors of one module, by what follows its name: "qweight", "scales", … method: for messages."""

    module: str
    tensors: Mapping[str, RawTensor]
    method: str

    def __contains__(self, suffix: str) -> bool:
        return suffix in self.tensors

    def get(self, suffix: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...] | None = None) -> RawTensor:
        """A companion tensor; None in a shape is any number. Raises UserError if it is missing or of another kind."""
        tensor = self.tensors.get(suffix)
        if tensor is None:
            beside = next(iter(self.tensors.values()))
            raise UserError(
                f"{beside} has no {suffix} beside it for {self.module[:200]}, which {self.method} needs: "
                "fetch the checkpoint again"
            )
        shaped = shape is None or (
            len(shape) == len(tensor.shape) and all(a in (None, b) for a, b in zip(shape, tensor.shape, strict=True))
        )
        if tensor.dtype not in dtypes or not shaped:
            wanted = " or ".join(dtypes)
            form = "" if shape is None else " [" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
            raise UserError(
                f"{tensor} is {tensor.dtype} {list(tensor.shape)}, where {self.method} needs {wanted}{form}: "
                "its weights and its quantization_config do not belong together"
            )
        return tensor

    def refuse(self, why: str) -> UserError:
        """The error of a module that cannot be taken."""
        return UserError(f"{self.method}: {self.module[:200]} in {next(iter(self.tensors.values())).file.path} {why}")


def group_order(parts: Companions, g_idx: RawTensor, groups: int, group: int) -> npt.NDArray[np.int64] | None:
    """The group of each element of K, None if they are in order. Raises UserError for one that does not exist."""
    order = g_idx.rows().astype(np.int64)
    if order.size and not (int(order.min()) >= 0 and int(order.max()) < groups):
        wrong = int(order.min()) if int(order.min()) < 0 else int(order.max())
        raise parts.refuse(f"has g_idx {wrong}, out of range for {groups} groups: the checkpoint is damaged")
    return None if np.array_equal(order, np.arange(order.size) // group) else order


def unpack(words: npt.NDArray[Any], bits: int) -> npt.NDArray[np.uint8]:
    """Words or bytes [n, w] to unsigned numbers of 4 or 8 bits [n, fields], the lowest bits of each first."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(len(octets), 2 * octets.shape[1])


def whole_groups(parts: Companions, k: int, groups: int, stated: object) -> int:
    """The elements that share a scale in rows of k with so many groups: the multiple of 32 that the configuration
    states, else all equal; whole rows are one group. Raises UserError for others."""
    if groups == 1 and (stated in (None, -1, 0) or not isinstance(stated, int) or stated >= k):
        return -(-k // W8.group) * W8.group
    group = stated if type(stated) is int and stated > 0 else k // max(groups, 1)
    if group < 1 or group % W8.group:
        raise parts.refuse(f"has groups of {group}: only multiples of {W8.group} are supported")
    if -(-k // group) != groups:
        raise parts.refuse(f"has {groups} groups in rows of {k}, and the configuration says groups of {group}")
    return group
