"""From a transformers model on the meta device to an FX graph with one attention node per layer.

No weight is read: the module is built from `config.json` on the meta device, its attention is replaced through
transformers' attention-interface registry by one `llmc_frontend::attention` call, and `torch.export` traces it with a
symbolic number of tokens T. Buffers that the module computes itself (rotary frequencies, embedding scales) are
computed for real and kept as constants.
"""

from __future__ import annotations

import copy
import logging
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmc.errors import UserError
from llmc.frontend.architecture import (
    check_attention,
    check_config_kind,
    check_modules,
    first_line,
    refusal,
    trace_failure,
)
from llmc.frontend.config import quiet_transformers
from llmc.frontend.experts import check_experts, use_experts
from llmc.frontend.text_part import causal_class

_IMPLEMENTATION = "llmc"
KNOWN_ROPE_TYPES = {"default", "linear", "llama3", "yarn", "proportional"}
"""Rope types whose frequencies do not depend on the sequence, so that a constant table is right."""

_LIB = torch.library.Library("llmc_frontend", "DEF")
_LIB.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, float scale, int window, float softcap, int layer)"
    " -> Tensor"
)


def _attention_shape(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


_LIB.impl("attention", _attention_shape, "CompositeExplicitAutograd")
ATTENTION = torch.ops.llmc_frontend.attention.default


@dataclass(frozen=True)
class ExportedModel:
    """graph: FX graph over tokens [T] and positions [T] with batch dimension 1, output logits [T, V].
    parameters: placeholder -> parameter name of the module. constants: placeholder -> value."""

    graph: torch.fx.Graph
    parameters: dict[str, str]
    constants: dict[str, Tensor]


_traced_layers: list[int] = []
"""Of the attention calls of the trace that is going on: known even where the trace then fails."""


def _attention_forward(
    module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Stands in for every attention implementation (the signature is transformers' AttentionInterface)."""
    if attention_mask is not None:
        raise refusal(type(module).__name__, ["an attention mask of its own: it passes an explicit attention mask, and "
                      "only causal and sliding-window attention are known"])  # fmt: skip
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise refusal(type(module).__name__, ["bidirectional attention: it is not causal (if it is a decoder, "
                      "config.json may lack is_decoder)"])  # fmt: skip
    if q.shape[3] != v.shape[3]:
        raise refusal(type(module).__name__, [f"query heads of {q.shape[3]} and value heads of {v.shape[3]}: "
                      "different head sizes are not supported"])  # fmt: skip
    scaling = kwargs.get("scaling")
    scale = float(scaling) if scaling is not None else q.shape[-1] ** -0.5
    window = int(kwargs.get("sliding_window") or 0)
    softcap = float(kwargs.get("softcap") or 0.0)
    layer = int(module.layer_idx)
    _traced_layers.append(layer)
    return ATTENTION(q, k, v, kwargs.get("s_aux"), scale, window, softcap, layer), None


def build_meta_model(config: Any) -> Any:
    """A transformers causal LM on the meta device, in eval mode, with llmc's attention. Never runs remote code.

    Raises UserError when transformers has no causal LM for the config or the config is inconsistent.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM

    check_config_kind(config)
    _check_rope(config)
    config = copy.deepcopy(config)  # setting the attention implementation below writes into it
    AttentionInterface.register(_IMPLEMENTATION, _attention_forward)
    make = getattr(causal_class(config), "_from_config", AutoModelForCausalLM.from_config)
    try:
        with torch.device("meta"), quiet_transformers():
            model = make(config, dtype=torch.float32)
            model.set_attn_implementation(_IMPLEMENTATION)
            use_experts(model)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise UserError(f"config.json: transformers cannot build this model: {first_line(error)}") from error
    check_modules(model)
    model.config.use_cache = False
    return model.eval()


def _check_rope(config: Any) -> None:
    """Refuses rope types whose frequencies change with the sequence: an export would silently freeze them."""
    parameters = getattr(config, "rope_parameters", None) or {}
    per_layer_type = [p for p in parameters.values() if isinstance(p, dict)] if parameters else []
    for rope in per_layer_type or [parameters]:
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in KNOWN_ROPE_TYPES:
            raise UserError(
                f"llmc cannot build this architecture: rope type {str(kind)[:40]!r} depends on the sequence length "
                f"and cannot be compiled (config.json; known: {', '.join(sorted(KNOWN_ROPE_TYPES))})"
            )


def _materialise_buffers(model: Any) -> dict[str, Tensor]:
    """The values of the buffers that are not in a checkpoint, computed as transformers does when it loads one."""
    owners = {}
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner_name, _, leaf = name.rpartition(".")
        owners[owner_name] = owner = model.get_submodule(owner_name)
        owner.register_buffer(leaf, torch.zeros_like(buffer, device="cpu"), persistent=False)
    for name, owner in owners.items():
        inner = name
        while not hasattr(model.get_submodule(inner), "_init_weights"):  # of the model that the owner is nearest to
            inner = inner.rpartition(".")[0]
        model.get_submodule(inner)._init_weights(owner)
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers() if not buffer.is_meta}


class _Step(torch.nn.Module):
    """The forward pass as a function of one sequence's tokens and positions."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.model(tokens[None], position_ids=positions[None], use_cache=False).logits[0]


def export_model(model: Any) -> ExportedModel:
    """Traces a model from `build_meta_model`. Raises UserError when torch.export cannot, naming the reason."""
    example = tuple(torch.zeros(8, dtype=torch.int64, device="meta") for _ in range(2))
    tokens = torch.export.Dim("T", min=2, max=1 << 20)
    shapes = {"tokens": {0: tokens}, "positions": {0: tokens}}
    logging.getLogger("torch.export").setLevel(logging.ERROR)
    _traced_layers.clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Without gradients the traced graph needs no decomposition, which would take twice as long as tracing.
            with torch.no_grad():
                program = torch.export.export(_Step(model), example, dynamic_shapes=shapes, strict=False)
    except UserError:
        raise
    except Exception as error:  # torch.export raises many types; all mean "this model cannot be traced"
        raise trace_failure(model, error, _traced_layers) from error
    check_attention(model, [int(n.args[7]) for n in program.graph.nodes if n.target is ATTENTION])
    check_experts(program.graph, model)
    values = _materialise_buffers(model)
    constants = {}
    for placeholder, name in program.graph_signature.inputs_to_buffers.items():
        name = name.removeprefix("model.")
        if name in values:
            constants[placeholder] = values[name]
    for placeholder, name in program.graph_signature.inputs_to_lifted_tensor_constants.items():
        value = program.constants[name]
        if not isinstance(value, Tensor) or value.is_meta:
            where = name.removeprefix("model.").rpartition(".")[0]
            raise refusal(type(model).__name__, [f"a tensor that its forward pass makes of a number ({where})"])
        constants[placeholder] = value
    parameters = {
        placeholder: name.removeprefix("model.")
        for placeholder, name in (
            *program.graph_signature.inputs_to_parameters.items(),
            *program.graph_signature.inputs_to_buffers.items(),
        )
        if placeholder not in constants
    }
    return ExportedModel(program.graph, parameters, constants)
