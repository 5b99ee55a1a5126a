"""What the compiler needs of a checkpoint, whatever file format it comes in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as Hugging Face names and shapes it. `dtype` is the stored type: "F32", "BF16", "F16", "Q4_1" …"""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Checkpoint(Protocol):
    """A validated checkpoint whose weights are read lazily: opening it allocates nothing of their size."""

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the model, normalised (see `normalise_config`)."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """By Hugging Face name, e.g. "model.layers.0.self_attn.q_proj.weight", in sorted order."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> npt.NDArray[np.float32]:
        """Rows start:stop along the first dimension as float32 (dequantised). Raises UserError on NaN or Inf."""
        ...

    @property
    def digest(self) -> str:
        """sha256 (hex) over everything that can change the built plan: weights, config, tokenizer, template."""
        ...
