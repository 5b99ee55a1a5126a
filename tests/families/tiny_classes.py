"""A tiny random model of every class in transformers' causal mapping, its configuration derived from the class alone.

Sizes are shrunk by the names that configurations share; the few that a class checks against each other are data below.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers import logging as transformers_logging

from llmc.codegen.backend import CPU
from llmc.codegen.weights import WeightTable
from llmc.errors import UserError
from llmc.frontend.architecture import check_config_kind
from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.export import build_meta_model, export_model
from llmc.frontend.open import match_parameters, open_checkpoint
from llmc.frontend.source import Source
from llmc.frontend.tokens_major import import_graph
from llmc.kernels.interpret import run_graph
from llmc.kernels.weights import Reader
from llmc.passes.pipeline import probe_batch, run_pipeline
from llmc.passes.result import PassContext

transformers_logging.disable_progress_bar()
TOLERANCE = 1e-3
"""of the largest logit"""
VOCAB = 211
_SIZES = {
    r"(decoder_)?vocab_size(_per_layer_input)?|unpadded_vocab_size": VOCAB,
    r"hidden_size|n_embd|d_model|emb_dim|embedding_dim|attention_hidden_size|word_embed_proj_dim|lru_width"
    r"|backbone_hidden_size|(input_|output_)?embedding_size|router_hidden_size|adapter_(in|out)_dim"
    r"|adapter_input_size": 64,
    r"\w*intermediate_size(_mlp)?|n_inner|(decoder_|encoder_)?ffn_dim|d_inner|dff|dim_ff|feed_forward_size"
    r"|(expert_)?ffn_hidden_size": 96,
    r"num_hidden_layers|n_layers?|num_layers|num_(en|de)coder_layers|(en|de)coder_layers|num_blocks"
    r"|num_layers_per_stack|n_(input|output|recurrent)_layers": 2,
    r"(num|n)_(attention_)?heads?|((en|de)coder_)?attention_heads|num_(en|de)coder_attention_heads"
    r"|swa_num_attention_heads|linear_num_(key_|value_)?heads|index_n_heads|num_kv_heads": 4,
    r"num_key_value_heads|swa_num_key_value_heads|num_query_groups": 2,
    r"(swa_|attention_|linear_|linear_key_|linear_value_|index_|mamba_)?head_dim|v_head_dim|qk_nope_head_dim|d_head"
    r"|dim_head|attention_head_size|kv_channels|mamba_d_head|mamba_headdim|global_head_dim": 16,
    r"qk_rope_head_dim|rotary_dim": 8,
    r"qk_head_dim": 24,
    r"\w*_lora_rank|d_rel|\w*_rank|hc_lowrank": 8,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|model_max_length|max_target_positions"
    r"|max_source_positions": 128,
    r"(num|n)_(local_|routed_)?experts|moe_num_experts": 4,
    r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts": 2,
    r"n_shared_experts|num_shared_experts|moe_num_shared_experts|n_group|topk_group|num_expert_group"
    r"|zero_expert_num|first_k_dense_replace|num_dense_layers": 1,
    r"sliding_window(_size)?|attention_window_size|window_size|local_attention|attention_chunk_size"
    r"|keep_window_size": 8,
    r"mamba_d_state|state_size|ssm_state_size": 16,
    r"image_size": 32,
}  # fmt: skip
"""names of fields (regular expressions) -> a tiny value, where the class has one."""

_SSM = {"mamba_n_heads": 8, "mamba_d_head": 16}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": _SSM,
    "cohere_compass_text": {"rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
                            "layer_types": ["sliding_attention", "full_attention"]},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2},
             "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96}},
    "dory": {"num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1,
             "layer_types": ["full_attention"] * 3},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon_h1": _SSM | {"mamba_d_ssm": 128},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": _SSM,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "qwen4_exp_text": {"indexer_budget": 16, "indexer_compress_ratio": 4, "indexer_n_heads": 4, "indexer_kv_heads": 1,
                       "indexer_head_dim": 16},
    "reformer": {"axial_pos_embds_dim": [16, 48], "axial_pos_shape": [8, 16], "attn_layers": ["local", "lsh"]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""model_type -> what its configuration class checks against its other fields, or needs to have every kind of layer."""


def causal_classes() -> dict[str, str]:
    """model_type -> class, as transformers maps configurations to causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()))


def tiny_class_config(model_type: str) -> Any:
    """A configuration of `model_type` with two layers of width 64, as small as its class allows."""
    return _tiny(CONFIG_MAPPING[model_type])


def _tiny(kind: Any, further: Mapping[str, Any] = {}) -> Any:
    overrides = _OVERRIDES.get(kind.model_type, {}) | further
    subs = {name: _tiny(part, overrides.get(name, {})) for name, part in _parts(kind).items()}
    default = kind(**subs).to_dict()
    settings: dict[str, Any] = {}
    for name in default.keys() | inspect.signature(kind).parameters.keys():
        size = next((s for pattern, s in _SIZES.items() if re.fullmatch(pattern, name)), None)
        if size is not None and (isinstance(default.get(name), int) or name in ("head_dim", "num_key_value_heads")):
            settings[name] = size
    if "qk_rope_head_dim" in settings and "head_dim" in settings:
        settings["head_dim"] = settings["qk_rope_head_dim"]  # what they rotate
    settings |= _two_layers(default)
    settings |= {name: 1 for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in default}
    settings |= {"is_decoder": True} if default.get("is_decoder") is False else {}
    return kind(**(settings | overrides | subs))


def _parts(kind: Any) -> dict[str, Any]:
    """The classes of a configuration's parts; where any will do, the one that it takes by default."""
    defaults = getattr(kind, "sub_configs_defaults", {})
    named = {name: CONFIG_MAPPING[spec.model_type] for name, spec in defaults.items() if spec.model_type}
    return named | {n: part for n, part in (kind.sub_configs or {}).items() if hasattr(part, "model_type")}


def _two_layers(default: dict[str, Any]) -> dict[str, Any]:
    """Lists with an entry per layer, cut to the first layer and the first that differs from it."""
    counts = (default.get(name) for name in ("num_hidden_layers", "n_layer", "num_layers"))
    layers = next((count for count in counts if isinstance(count, int)), 0)
    lists = {k: v for k, v in default.items() if isinstance(v, list | tuple) and len(v) == layers > 2}
    other = next((i for i in range(layers) for v in lists.values() if v[i] != v[0]), 1)
    return {name: [value[0], value[other]] for name, value in lists.items()}


def outcome(model_type: str, directory: Path) -> str:
    """What becomes of a tiny checkpoint of a class: "works" with the logits of transformers, or why it is refused.

    The stages are those of a build up to the compiler. directory: an empty one for the checkpoint.
    """
    config = tiny_class_config(model_type)
    try:
        check_config_kind(config)  # some of these transformers cannot build without their other half
        model = _saved(config, directory)
        checkpoint = open_checkpoint(Source(directory, "dir", model_type))
        try:
            graph = lowered(checkpoint)
            CPU.select(graph, WeightTable(), None)  # the C++ of the step is generated too, and not compiled
            return _compared(graph, checkpoint.read, model)
        finally:
            checkpoint.close()
    except UserError as error:
        return str(error).replace(f"{directory}/", "")


def lowered(checkpoint: Checkpoint) -> fx.Graph:
    """The lowered float32 graph of a checkpoint."""
    model = build_meta_model(checkpoint.hf_config())
    graph = import_graph(export_model(model), match_parameters(checkpoint, model))
    run_pipeline(graph, PassContext())
    return graph


def _saved(config: Any, directory: Path) -> Any:
    """A random model, and its checkpoint; of a whole that needs a package that is not here, only the text part."""
    try:
        model = _random_model(config)
    except ImportError:
        model = _random_model(config.get_text_config())
    model.save_pretrained(directory)
    config.save_pretrained(directory)
    return model


def _random_model(config: Any) -> Any:
    """A transformers model in float32 with seeded weights; norms and biases are not left at one and zero."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0 if parameter.ndim > 1 else 1.0, 0.15)
    return model


def _compared(graph: fx.Graph, reader: Reader, model: Any) -> str:
    probe = probe_batch(VOCAB)
    found = run_graph(graph, probe, reader)
    with torch.no_grad():
        wanted = torch.cat([model(part[None]).logits[0] for part in probe["tokens"].split([7, 4])])[probe["rows"]]
    error = float((found - wanted).abs().max() / wanted.abs().max())
    return "works" if error <= TOLERANCE else f"wrong: the logits differ by {error:.1e} of their largest"
