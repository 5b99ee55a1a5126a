"""Experts through transformers' experts interface: two ops per mixture (kernels/experts.py) instead of its loop.

What stands between them, activation and gate, is the module's own code and is traced as it is.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from llmc.errors import UserError
from llmc.kernels.experts import DOWN, UP

_IMPLEMENTATION = "llmc"


def _experts_forward(module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Stands in for every experts implementation (the signature is transformers' ExpertsInterface)."""
    if module.has_post_expert_norm:
        raise UserError(f"{type(module).__name__} normalises what each expert gives, which llmc cannot compile")
    first = "gate_up_proj" if module.has_gate else "up_proj"
    biases = [getattr(module, f"{name}_bias") if module.has_bias else None for name in (first, "down_proj")]
    h = UP(x, index, getattr(module, first), biases[0], module.is_transposed)
    h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
    result: Tensor = DOWN(h, index, weights, module.down_proj, biases[1], module.is_transposed)
    return result


def is_routed(module: Any) -> bool:
    """Whether a module goes through the experts interface, which gives each the same attributes."""
    return hasattr(module, "_is_expert_parallel")


def _expert_modules(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if is_routed(module)]


def use_experts(model: Any) -> None:
    """Replaces the experts of a transformers model, if it has some, by llmc's ops."""
    if _expert_modules(model):
        from transformers.integrations.moe import ExpertsInterface

        ExpertsInterface.register(_IMPLEMENTATION, _experts_forward)
        model.set_experts_implementation(_IMPLEMENTATION)


def check_experts(graph: fx.Graph, model: Any) -> None:
    """One pair of ops per module, or experts are computed in a way that llmc did not see. Raises UserError."""
    modules = _expert_modules(model)
    found = [sum(n.target is op for n in graph.nodes) for op in (UP, DOWN)]
    if found != [len(modules)] * 2:
        raise UserError(
            f"{type(model).__name__}: found {min(found)} experts nodes for {len(modules)} mixtures of experts; this "
            "architecture does not route its experts through transformers' experts interface"
        )
