"""transformers in float32 with the checkpoint's own dequantised weights: what every plan is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from llmc.frontend.open import match_parameters, open_checkpoint
from llmc.frontend.source import resolve
from llmc.frontend.tokenizer import load_tokenizer
from llmc.runtime.detokenizer import TextCodec

Floats = npt.NDArray[np.float32]


@dataclass
class Reference:
    """The model as transformers runs it."""

    model: Any
    codec: TextCodec

    @classmethod
    def load(cls, name: str) -> Reference:
        from transformers import AutoModelForCausalLM

        checkpoint = open_checkpoint(resolve(name))
        model = AutoModelForCausalLM.from_config(checkpoint.hf_config(), dtype=torch.float32).eval()
        recipes = match_parameters(checkpoint, model)
        with torch.no_grad():
            for parameter, value in model.named_parameters():
                value.copy_(torch.from_numpy(recipes[parameter].read(checkpoint.read).copy()))
        assets = load_tokenizer(checkpoint)
        assert assets is not None
        checkpoint.close()
        return cls(model, TextCodec(assets.tokenizer_json))

    def logits(self, tokens: list[int]) -> Floats:
        """[T, V] for one sequence of T tokens."""
        with torch.inference_mode():
            return np.asarray(self.model(torch.tensor([tokens]), use_cache=False).logits[0].numpy())


def log_softmax(logits: Floats) -> npt.NDArray[np.float64]:
    return torch.from_numpy(logits).double().log_softmax(-1).numpy()
