"""Models in the shapes that GPU kernels are checked for, lowered without weights: compilation needs shapes alone.

All layers of these models are alike, so that two of them need every kernel that the whole model needs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from families import own_weights
from transformers import AutoConfig

from llmc.build_options import PRECISIONS
from llmc.codegen.triton.launch import GpuProgram
from llmc.codegen.triton.select import select_launches
from llmc.codegen.weights import WeightTable
from llmc.frontend.export import build_meta_model, export_model
from llmc.frontend.tokens_major import import_graph
from llmc.kernels.formats import W4A16, W8, W8A16
from llmc.passes.pipeline import run_pipeline
from llmc.passes.result import PassContext

SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
                     "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True},
    "Qwen2.5-0.5B": {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
                     "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "Llama-3.2-1B": {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
                     "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True},
    "Llama-3.1-8B": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                     "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False},
}  # fmt: skip
WEIGHT_ONLY = {"int8 weight-only": (W8A16, W8A16, "bf16"), "int4 weight-only": (W4A16, W8A16, "bf16"),
               "int8, int8 KV": (W8, W8, "int8")}  # fmt: skip


@cache
def program(model: str, precision: str) -> GpuProgram:
    """The launches of a model with two layers."""
    settings = SHAPES[model] | {"num_hidden_layers": 2, "max_position_embeddings": 8192}
    config = AutoConfig.for_model(**settings)
    meta = build_meta_model(config)
    graph = import_graph(export_model(meta), own_weights(meta))
    run_pipeline(graph, PassContext(*(PRECISIONS | WEIGHT_ONLY)[precision]))
    return select_launches(graph, WeightTable(), "bf16")
