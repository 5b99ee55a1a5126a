"""What a model's architecture has that llmc lacks, in words: from its configuration, its modules and its attention.

Nothing here knows a family of models. What is looked for are mechanisms: experts, a state that goes from token to
token, an encoder. What only the traced graph shows is named where it is met (`tokens_major.py`, `passes/verify.py`).
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from llmc.errors import UserError
from llmc.frontend.experts import is_routed

_SHOWN = 4  # layers in a message
_EXPERTS = re.compile(r"(^|\.)experts$")
_CROSS = re.compile(r"\.(cross_?attn|cross_?attention|encoder_attn)$")
_DECAYS = {"A_log": "state-space or linear-attention layers", "time_decay": "recurrent layers"}
"""name of a parameter that makes a state fade from token to token -> what has it"""
_ATTENTION_TYPES = re.compile(r"(?!linear)\w*attention|global|local|dense|sparse|moe")


def check_config_kind(config: Any) -> None:
    """Raises UserError for a configuration of no decoder; before transformers builds anything of it."""
    if getattr(config, "is_encoder_decoder", False):
        raise refusal(config.model_type, ["an encoder beside its decoder (is_encoder_decoder in config.json)"])


def check_modules(model: Any) -> None:
    """Raises UserError naming every mechanism of the model (on any device) that llmc has no code for."""
    found = [*_experts(model), *_states(model), *_alibi(model), *_indexers(model), *_cross_attention(model)]
    if found:
        raise refusal(type(model).__name__, found)


def refusal(name: str, lacks: Sequence[str]) -> UserError:
    """The error of an architecture. name: of its class or model type; lacks: what it has, as nouns."""
    return UserError(f"llmc cannot build this architecture: {name} has {' and '.join(lacks)}")


def _experts(model: Any) -> Iterator[str]:
    """Experts that do not go through transformers' experts interface (`experts.py`)."""
    paths = [(path, module) for path, module in model.named_modules() if _EXPERTS.search(path)]
    paths += [(path, module) for path, module in model.named_modules() if type(module).__name__.endswith("Experts")]
    paths = [(path, module) for path, module in paths if not is_routed(module)]
    if paths:
        path, module = paths[0]
        stacks = [p.shape[0] for p in module.parameters() if p.ndim == 3]
        count = len(module) if isinstance(module, torch.nn.ModuleList) else stacks[0] if stacks else None
        number = f"{count} experts, " if count else ""
        yield f"a mixture of experts of its own kind ({number}{path.removesuffix('.experts')})"


def _states(model: Any) -> Iterator[str]:
    """Layers that carry something from token to token, for which a runtime keeps no pages."""
    kinds = getattr(model.config, "layer_types", None) or getattr(model.config, "layers_block_type", None) or []
    others = [(i, kind) for i, kind in enumerate(kinds) if not _ATTENTION_TYPES.fullmatch(str(kind))]
    names = {name.rpartition(".")[::2] for name, _ in model.named_parameters()}
    decays = [(owner, word) for owner, leaf in sorted(names) for name, word in _DECAYS.items() if leaf == name]
    convolutions = [path for path, m in _in_layers(model) if isinstance(m, torch.nn.Conv1d)]
    if decays:
        yield f"{decays[0][1]} ({decays[0][0]})"
    elif convolutions:
        yield f"convolutions over the tokens ({convolutions[0]})"
    elif others:
        yield f"layers of type {str(others[0][1])[:40]!r} ({_layers([i for i, _ in others])})"


def _alibi(model: Any) -> Iterator[str]:
    settings = [value for owner in (model.config, getattr(model.config, "attn_config", None)) if owner is not None
                for name, value in vars(owner).items() if "alibi" in name]  # fmt: skip
    builders = [path for path, m in model.named_modules() if any("build_alibi" in name for name in dir(m)) and path]
    if any(settings) or (builders and not settings):
        yield "position biases on its attention (ALiBi)"


def _indexers(model: Any) -> Iterator[str]:
    found = [path for path, _ in model.named_modules() if path.endswith(".indexer")]
    if found:
        yield f"sparse attention whose keys an indexer chooses ({found[0]})"


def _cross_attention(model: Any) -> Iterator[str]:
    found = [path for path, _ in model.named_modules() if _CROSS.search(path)]
    if found:
        yield f"attention to another input than its tokens ({found[0]})"


def layer_count(model: Any) -> int:
    """Layers of the model that makes text, whatever its configuration is wrapped in; 0 where it counts none."""
    return int(getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0))


def check_attention(model: Any, layers: Sequence[int]) -> None:
    """Raises UserError unless each layer computed attention once. layers: of the attention calls that were seen."""
    expected = layer_count(model)
    found = sorted(layers)
    if found == list(range(expected)):
        return
    name, seen = type(model).__name__, f"found {len(found)} attention nodes for {expected} layers"
    if not expected:
        raise refusal(name, ["no single stack of layers (num_hidden_layers in config.json)"])
    missing = [i for i in range(expected) if i not in found]
    if missing:
        raise refusal(name, [f"{_mixer(model, missing)}, not through transformers' attention interface: {seen}"])
    double = sorted({i for i in found if found.count(i) > 1 or i >= expected})
    raise refusal(name, [f"layers that compute attention several times ({_layers(double)}): {seen}"])


def _stack(model: Any) -> tuple[str, Any] | None:
    """(path, module) of the list of the model's layers: of those that are as long, the outermost."""
    count = layer_count(model)
    lists = [(p, m) for p, m in model.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    return min(lists, key=lambda found: found[0].count("."), default=None)


def _in_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """(path, module) of everything inside the layers."""
    if (stack := _stack(model)) is not None:
        yield from stack[1].named_modules(prefix=stack[0])


def _mixer(model: Any, missing: list[int]) -> str:
    """What the layers without a known attention do instead: the first part of such a layer that has matrices."""
    what, stack = f"{_layers(missing)} whose tokens are mixed", _stack(model)
    if stack is None:
        return f"{what} in another way"
    path, layer = f"{stack[0]}.{missing[0]}", stack[1][missing[0]]
    parts = [(n, m) for n, m in layer.named_children() if any(p.ndim > 1 for p in m.parameters())]
    if parts and next(parts[0][1].children(), None) is not None:
        path, layer = f"{path}.{parts[0][0]}", parts[0][1]
    return f"{what} by {type(layer).__name__} ({path})"


def _layers(indices: Sequence[int]) -> str:
    """ "layer 3" or "layers 0, 1, 2, 3, …"."""
    shown = ", ".join(map(str, indices[:_SHOWN])) + (", …" if len(indices) > _SHOWN else "")
    return f"layer{'s' if len(indices) > 1 else ''} {shown}"


def trace_failure(model: Any, error: Exception, layers: Sequence[int]) -> UserError:
    """What it means that torch.export cannot trace the model; torch's own words are of no use to its user.

    layers: of the attention calls that were seen before the failure.
    """
    name = type(model).__name__
    path = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    last = traceback.extract_tb(error.__traceback__)[-1]
    if "/torch/" not in last.filename and (last.line or "").startswith("raise "):  # the model refuses by itself
        return refusal(name, [f"a forward pass that torch.export cannot trace: {first_line(error)}"])
    if type(error).__module__.startswith("torch") and "onstraint" in str(error):
        if not set(range(layer_count(model))) <= set(layers):
            check_attention(model, layers)
        return refusal(name, ["a forward pass that is another one for other numbers of tokens (a loop, a branch or a "
                              "table of a fixed size)"])  # fmt: skip
    if "data-dependent" in str(error):
        return refusal(name, ["shapes or branches that depend on the values of its inputs"])
    if "same device" in str(error) or "expected device" in str(error):
        return refusal(name, ["tensors that its forward pass makes on a device of its own"])
    own = [f.f_code for f in path if "/transformers/models/" in f.f_code.co_filename]
    where = f": {own[-1].co_name} of {Path(own[-1].co_filename).name}" if own else ""
    return refusal(name, [f"a forward pass that cannot be traced{where}"])


_OP_MEANINGS = {
    "gather": "values looked up per token (token types or relative positions)",
    "index": "a table looked up by position",
    "topk": "a choice among values (a router)",
    "cumsum": "a running sum over the tokens",
    "softplus": "the activation softplus",
    "floor": "a scale that depends on the position in steps",
    "clamp": "activations that are clamped",
    "view_as_complex": "a rotary embedding in complex numbers",
    "polar": "a rotary embedding in complex numbers",
    "view_as": "values reshaped like others",
    "expand": "values repeated over another dimension",
    "ones": "a tensor of ones that its forward pass makes",
    "bmm": "a matrix product of two activations",
    "matmul": "a matrix product of two activations",
}
_NEIGHBOURS = ("repeat_interleave", "slice", "stack", "flatten")


def op_meaning(node: torch.fx.Node) -> str:
    """What it says of an architecture that llmc has no rule for an op, as a noun."""
    op = str(node.target).removeprefix("aten.").split(".")[0]
    rotary = "rotary" in f"{node.meta.get('stack_trace')} {node.meta.get('path')}"
    if rotary and op in _NEIGHBOURS:
        return "a rotary embedding that rotates neighbouring values"
    return _OP_MEANINGS.get(op, "an operation without a rule")


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
