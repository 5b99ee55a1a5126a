"""Tiny seeded random checkpoints of the families that the general path must build, as Hugging Face directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from llmc.kernels.weights import Stored

VOCAB = 211
_DIMS = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
_MHA = {k: v for k, v in _DIMS.items() if k not in ("num_key_value_heads", "head_dim")}
_WINDOWED = _DIMS | {"sliding_window": 8}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _DIMS,
    "qwen2": _DIMS,
    "qwen3": _DIMS,
    "mistral": _WINDOWED,
    "phi3": _DIMS | {"pad_token_id": 0},
    "gemma2": _WINDOWED | {"query_pre_attn_scalar": 16},
    "gemma3_text": _WINDOWED
    | {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "opt": {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "word_embed_proj_dim": 64, "max_position_embeddings": 128},
    "olmo2": _DIMS,
    "gpt_neox": _MHA,
}  # fmt: skip
"""model_type -> configuration. Odd sizes on purpose: a vocabulary of 211, windows shorter than the prompts."""


def tiny_config(family: str, **overrides: Any) -> Any:
    from transformers import AutoConfig

    settings = {"vocab_size": VOCAB, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(family, **(settings | FAMILIES[family] | overrides))


def tiny_model(family: str, **overrides: Any) -> Any:
    """A transformers model in float32 with seeded weights; norms and biases are not left at one and zero."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides)).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += torch.randn_like(parameter) * 0.2
    return model


def own_weights(model: Any) -> dict[str, Stored]:
    """Recipes for a model whose checkpoint names and shapes its tensors as the model does."""
    return {name: Stored(tuple(value.shape), name) for name, value in model.state_dict().items()}


def save_checkpoint(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory


def save_word_tokenizer(directory: Path) -> None:
    """A tokenizer that knows the words w0 … w210, divided by spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
