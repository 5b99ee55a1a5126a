"""Opening a resolved model, and matching its tensors to the parameters of the transformers model."""

from __future__ import annotations

from collections.abc import Callable

from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.gguf_checkpoint import GgufCheckpoint
from llmc.frontend.parameters import match_parameters
from llmc.frontend.safetensors_checkpoint import SafetensorsCheckpoint
from llmc.frontend.source import Source

__all__ = ["match_parameters", "open_checkpoint"]


def open_checkpoint(source: Source, tell: Callable[[str], None] = lambda line: None) -> Checkpoint:
    """The checkpoint of `source`, validated; no weight is read. `tell` gets a line about what is there and not used.

    Raises UserError when it is not usable.
    """
    if source.kind == "gguf":
        return GgufCheckpoint(source.path, source.label)
    return SafetensorsCheckpoint(source.path, source.label, tell)
