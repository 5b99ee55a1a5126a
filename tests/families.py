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
    "cohere": {k: v for k, v in _DIMS.items() if k != "head_dim"},
    "glm": _DIMS | {"pad_token_id": 0},
    "nemotron": _DIMS,
}  # fmt: skip
"""model_type -> configuration. Odd sizes on purpose: a vocabulary of 211, windows shorter than the prompts."""
_EXPERTS = _DIMS | {
    "moe_intermediate_size": 32, "num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0,
}  # fmt: skip
_WIDE = _EXPERTS | {"intermediate_size": 32}
_GROUPED = _EXPERTS | {
    "n_routed_experts": 12, "num_experts": 12, "num_local_experts": 12, "n_group": 4, "topk_group": 2,
    "num_experts_per_tok": 3, "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": _WIDE,
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 48},
    "qwen3_moe": _EXPERTS | {"norm_topk_prob": True, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "olmoe": _WIDE | {"num_experts_per_tok": 5},
    "flex_olmo": _WIDE,
    "granitemoe": _WIDE | {"residual_multiplier": 0.5},
    "granitemoeshared": _WIDE | {"shared_intermediate_size": 48},
    "glm4_moe": _GROUPED,
    "dots1": _GROUPED | {"norm_topk_prob": False, "n_group": 1, "topk_group": 1},
    "hunyuan_v1_moe": _WIDE | {"moe_topk": 2},
    "minimax_m2": _WIDE,
    "lfm2_moe": _EXPERTS | {"num_dense_layers": 1, "layer_types": ["full_attention"] * 2},
}
"""The same for mixtures of experts: 6 or 12 of width 32, of which 2, 3 or 5 are chosen."""


def tiny_config(family: str, **overrides: Any) -> Any:
    from transformers import AutoConfig

    settings = {"vocab_size": VOCAB, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(family, **(settings | (FAMILIES | MIXTURES)[family] | overrides))


def tiny_model(family: str, **overrides: Any) -> Any:
    """A transformers model in float32 with seeded weights; norms, biases and corrections of routers are not left at one
    and zero."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides)).eval()
    for value in model.state_dict().values():
        if value.ndim == 1:
            value += torch.randn_like(value) * 0.2
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
