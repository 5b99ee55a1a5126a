"""What the weight formats (kernels/formats.py) mean in numbers: the one definition that the dialect's reference, the
packer and the accuracy report share.

f32   as is. bf16: rounded to nearest even.
w8    symmetric int8, groups of 32 along K, scale in float16 rounded up, so that |q| <= 127.
w4    asymmetric uint4, groups of 32 along K: value = scale * q + minimum, both float16.
w8a16, w4a16  those weights, with activations that are not quantised.
Activations of w8 and w4 are int8, symmetric, per token and group of 32, scale float32.
K is padded with zeros to a multiple of 32.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llmc.kernels import pack
from llmc.kernels.formats import F32, GROUP, Format


def fake_quantize(w: Tensor, format: Format) -> Tensor:
    """The float32 values [N, K] that a weight has after it was stored in `format`."""
    return w if format is F32 else torch.from_numpy(pack.fake_quantize(format, w.detach().numpy()))


def fake_quantize_activations(x: Tensor) -> Tensor:
    """Activations [T, K] after symmetric int8 quantisation per token and group of 32."""
    rows, k = x.shape
    grouped = torch.nn.functional.pad(x, (0, -k % GROUP)).view(rows, -1, GROUP)
    step = grouped.abs().amax(-1, keepdim=True) / 127
    q = torch.where(step > 0, torch.round(grouped / step), 0).clamp(-127, 127)
    return (q * step).view(rows, -1)[:, :k]


def to_float32(a: npt.NDArray[np.float32]) -> Tensor:
    """A numpy array as a torch tensor without a copy when it is writable."""
    return torch.from_numpy(a if a.flags.writeable else a.copy())
