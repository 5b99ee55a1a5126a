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
from llmc.frontend.config import quiet_transformers
from llmc.frontend.experts import check_experts, use_experts

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


def _attention_forward(
    module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Stands in for every attention implementation (the signature is transformers' AttentionInterface)."""
    if mask is not None:
        raise UserError(
            f"{type(module).__name__} passes an explicit attention mask, which llmc cannot compile; "
            "only causal and sliding-window attention are known"
        )
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UserError(f"{type(module).__name__} is not causal: llmc builds causal language models only")
    if q.shape[3] != v.shape[3]:
        raise UserError(
            f"{type(module).__name__} has query heads of {q.shape[3]} and value heads of {v.shape[3]}: "
            "different head sizes are not supported"
        )
    scaling = kwargs.get("scaling")
    scale = float(scaling) if scaling is not None else q.shape[-1] ** -0.5
    window = int(kwargs.get("sliding_window") or 0)
    softcap = float(kwargs.get("softcap") or 0.0)
    layer = int(module.layer_idx)
    return ATTENTION(q, k, v, kwargs.get("s_aux"), scale, window, softcap, layer), None


def build_meta_model(config: Any) -> Any:
    """A transformers causal LM on the meta device, in eval mode, with llmc's attention. Never runs remote code.

    Raises UserError when transformers has no causal LM for the config or the config is inconsistent.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM

    _check_rope(config)
    config = copy.deepcopy(config)  # setting the attention implementation below writes into it
    AttentionInterface.register(_IMPLEMENTATION, _attention_forward)
    try:
        with torch.device("meta"), quiet_transformers():
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=torch.float32)
            model.set_attn_implementation(_IMPLEMENTATION)
            use_experts(model)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise UserError(f"config.json: transformers cannot build this model: {_first_line(error)}") from error
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
                f"config.json: rope type {kind!r} depends on the sequence length and cannot be compiled "
                f"(known: {', '.join(sorted(KNOWN_ROPE_TYPES))})"
            )


def _materialise_buffers(model: Any) -> dict[str, Tensor]:
    """The values of the buffers that are not in a checkpoint, computed as transformers does when it loads one."""
    owners = set()
    for name, buffer in list(model.named_non_persistent_buffers()):
        owner_name, _, leaf = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        owner.register_buffer(leaf, torch.zeros_like(buffer, device="cpu"), persistent=False)
        owners.add(owner)
    for owner in owners:
        model._init_weights(owner)
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
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Without gradients the traced graph needs no decomposition, which would take twice as long as tracing.
            with torch.no_grad():
                program = torch.export.export(_Step(model), example, dynamic_shapes=shapes, strict=False)
    except UserError:
        raise
    except Exception as error:  # torch.export raises many types; all mean "this model cannot be traced"
        raise UserError(
            f"{type(model).__name__}: torch.export cannot trace this architecture: {_first_line(error)}"
        ) from error
    _check_attention(program.graph, model)
    check_experts(program.graph, model)
    values = _materialise_buffers(model)
    constants = {}
    for placeholder, name in program.graph_signature.inputs_to_buffers.items():
        name = name.removeprefix("model.")
        if name in values:
            constants[placeholder] = values[name]
    for placeholder, name in program.graph_signature.inputs_to_lifted_tensor_constants.items():
        constants[placeholder] = _lifted_constant(program.constants[name], name)
    parameters = {
        placeholder: name.removeprefix("model.")
        for placeholder, name in (
            *program.graph_signature.inputs_to_parameters.items(),
            *program.graph_signature.inputs_to_buffers.items(),
        )
        if placeholder not in constants
    }
    return ExportedModel(program.graph, parameters, constants)


def _lifted_constant(value: Any, name: str) -> Tensor:
    if not isinstance(value, Tensor) or value.is_meta:
        raise UserError(f"the graph holds a constant {name} whose value is only known at run time")
    return value


def _check_attention(graph: torch.fx.Graph, model: Any) -> None:
    """One attention node per layer, or the model computes attention in a way that llmc did not see."""
    layers = sorted(n.args[7] for n in graph.nodes if n.target is ATTENTION)
    expected = int(model.config.num_hidden_layers)
    if layers != list(range(expected)):
        raise UserError(
            f"{type(model).__name__}: found {len(layers)} attention nodes for {expected} layers; this "
            "architecture does not route its attention through transformers' attention interface"
        )


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
