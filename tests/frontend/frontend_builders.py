"""Tiny seeded checkpoints and files that the frontend's tests are built on."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers import logging as transformers_logging

from llmc.frontend.open import match_parameters
from llmc.kernels.weights import Stored

transformers_logging.disable_progress_bar()

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def model_of(config: Any) -> Any:
    """A seeded float32 model of `config`; norms are random too, so that a forgotten one shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1)
    return model


def meta_model(ckpt: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(ckpt.hf_config())


def tiny_llama(path: Path, **changes: Any) -> Any:
    """Saves a tiny Llama in `path` and returns the model."""
    model = model_of(LlamaConfig(**{**TINY, "tie_word_embeddings": True, **changes}))
    model.save_pretrained(path)
    return model


def write_safetensors(path: Path, header: dict[str, Any] | bytes, data: bytes = b"", length: int | None = None) -> None:
    """A safetensors file with any header, however wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def add_tensor(writer: GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    """Adds `values` to a GGUF, quantised as `kind`."""
    code = GGMLQuantizationType[kind]
    if kind == "F32":
        writer.add_tensor(name, values.astype(np.float32))
    else:
        writer.add_tensor(name, quants.quantize(values.astype(np.float32), code), raw_dtype=code)


def tiny_gguf(path: Path, kind: str = "Q8_0", tied: bool = True, scale: float = 1.0, **metadata: Any) -> Path:
    """A tiny Llama as GGUF: hidden 64, 4/2 heads, 2 layers, vocabulary 32; matrices of deviation `scale` as `kind`."""
    generator = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        put(writer, key.replace("__", "."), value)
    shapes = {"token_embd": (32, 64)}
    for layer in range(2):
        block = f"blk.{layer}."
        shapes |= {block + "attn_q": (64, 64), block + "attn_k": (32, 64), block + "attn_v": (32, 64)}
        shapes |= {block + "attn_output": (64, 64), block + "ffn_gate": (96, 64), block + "ffn_up": (96, 64)}
        shapes |= {block + "ffn_down": (64, 96), block + "attn_norm": (64,), block + "ffn_norm": (64,)}
    shapes |= {"output_norm": (64,)} | ({} if tied else {"output": (32, 64)})
    for name, shape in shapes.items():
        values = generator.standard_normal(shape) * (scale if len(shape) > 1 else 1.0)
        add_tensor(writer, name + ".weight", values, kind if len(shape) > 1 else "F32")
    return finish(writer, path)


def put(writer: GGUFWriter, key: str, value: Any) -> None:
    """One metadata pair, its type taken from the Python value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def finish(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def matched_names(ckpt: Any, model: Any) -> dict[str, str]:
    """The tensor that each parameter is loaded from, which in these checkpoints is stored as the model has it."""
    recipes = match_parameters(ckpt, model)
    assert all(isinstance(ref, Stored) and ref.shape == ckpt.tensors[ref.name].shape for ref in recipes.values())
    return {name: ref.name for name, ref in recipes.items() if isinstance(ref, Stored)}
