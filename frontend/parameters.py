"""Which checkpoint tensor each parameter of a transformers model is loaded from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from llmc.errors import UserError
from llmc.frontend.architecture import refusal
from llmc.frontend.checkpoint import Checkpoint, TensorInfo
from llmc.frontend.merged import Merged, add_part, merged_recipes
from llmc.frontend.text_part import left_out, text_tensors
from llmc.kernels.weights import Stored, WeightRef, transposed

_SHOWN = 3  # names in a message
_FLOATS = ("F32", "F16", "BF16")
_INTEGERS = re.compile(r"^(F64|[IU]\d+|BOOL|C64|F[468]_.*|F4)$")
# Buffers that transformers once saved and now computes: rotary frequencies, position numbers, causal masks.
_LEGACY_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.masked_bias$")
_COMPARE_ROWS = 4096


def match_parameters(
    ckpt: Checkpoint, model: Any, tell: Callable[[str], None] = lambda line: None
) -> dict[str, WeightRef]:
    """{parameter or persistent buffer of `model` (on any device, usually meta): recipe from the tensors of `ckpt`}.

    A tensor may be called as the parameter is, with or without the base model's prefix, or by an older name
    that transformers still knows; several may make one parameter (merged.py). A tied parameter gets the tensor of its
    partner. Where the checkpoint holds both and they differ, the two are untied *in the model*, as transformers does on
    loading. Of a multimodal checkpoint only the tensors of its language model are looked at. `tell` gets a line about
    what is left out, or untied. Raises UserError for missing, extra, mis-shaped and non-float tensors.
    """
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    names = {name: name for name in ckpt.tensors}
    if ckpt.is_multimodal:
        names = text_tensors(ckpt.tensors, wanted, model.base_model_prefix)
        if others := left_out(ckpt.tensors, names.values()):
            tell(f"the text part of a multimodal model is built; left out: {others}")
    found, merged, extra = _by_name(ckpt, model, wanted, names)
    _resolve_ties(ckpt, model, found, tell)
    where = ckpt.source_label
    _refuse(
        where,
        "lacks",
        sorted(wanted.keys() - found.keys() - merged.keys()),
        "it is not complete, or of another architecture",
    )
    _refuse(where, "holds", _unexpected(ckpt, model, extra), "no parameter of the model answers to that name")
    recipes = {name: _recipe(ckpt.tensors[tensor], model, name) for name, tensor in found.items()}
    wrong = [
        f"{found[name]} {list(ckpt.tensors[found[name]].shape)} (the configuration needs {list(shape)})"
        for name, shape in sorted(wanted.items())
        if name in found and recipes[name].shape != shape
    ]
    _refuse(where, "mis-shapes", wrong, "weights and config.json do not belong together")
    made = merged_recipes(ckpt, merged, wanted)
    used = [*found.values(), *(name for parts in merged.values() for name in parts.names)]
    typed = [f"{info.name} ({info.dtype})" for info in map(ckpt.tensors.__getitem__, used) if _not_float(info)]
    _refuse(where, "stores in an unsupported type", sorted(set(typed)), "convert it to F32, F16 or BF16")
    return made | recipes


def _recipe(info: TensorInfo, model: Any, name: str) -> WeightRef:
    """A tensor as the parameter has it: the matrix of a linear layer is transposed for a module that has it so."""
    from transformers.pytorch_utils import Conv1D

    stored = Stored(info.shape, info.name)
    owner = model.get_submodule(name.rpartition(".")[0])
    return transposed(stored) if info.linear and isinstance(owner, Conv1D) else stored


def _by_name(
    ckpt: Checkpoint, model: Any, wanted: dict[str, tuple[int, ...]], names: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, Merged], list[str]]:
    """({parameter: tensor} by name alone, those made of several, the tensors left over). names: of tensors by what the
    model may call them."""
    found = {name: names[name] for name in wanted if name in names}
    left = [name for name in names if name not in found]
    if not left:
        return found, {}, []
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, apply_renamings, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    prefix, state = model.base_model_prefix or None, model.state_dict()
    extra: list[str] = []
    merged: dict[str, Merged] = {}
    unknown: list[str] = []
    for name in left:
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if pattern is not None:
            renamed = apply_renamings(name, renamings)
            if target not in wanted or not add_part(merged, target, pattern, names[name], renamed, converters):
                unknown.append(names[name])
        elif target in wanted and target not in found:
            found[target] = names[name]
        else:
            extra.append(names[name])
    if unknown:
        shown = ", ".join(unknown[:_SHOWN]) + (", …" if len(unknown) > _SHOWN else "")
        raise refusal(type(model).__name__, [f"tensors that must be merged or split on loading ({shown})"])
    for twice in merged.keys() & found.keys():
        extra += merged.pop(twice).names
    return found, merged, extra


def _resolve_ties(ckpt: Checkpoint, model: Any, found: dict[str, str], tell: Callable[[str], None]) -> None:
    """Gives tied parameters one tensor; unties in the model what the checkpoint holds with other values."""
    ties = dict(getattr(model, "all_tied_weights_keys", None) or {})
    for target, source in ties.items():
        if target in found and source in found:
            if _equal(ckpt, found[target], found[source]):
                found[target] = found[source]
            else:
                tell(f"config.json ties {target} to {source}, but other values are stored for it: they are used")
                _untie(model, target)
        elif source in found:
            found[target] = found[source]
        elif target in found:
            found[source] = found[target]
    for target, source in ties.items():  # a third partner of a source that was itself found by way of another
        if source in found:
            found.setdefault(target, found[source])


def _equal(ckpt: Checkpoint, one: str, other: str) -> bool:
    """Whether two tensors hold the same values, compared a few rows at a time."""
    shape = ckpt.tensors[one].shape
    if one == other or shape != ckpt.tensors[other].shape:
        return one == other
    steps = range(0, shape[0] if shape else 1, _COMPARE_ROWS)
    stops = [min(step + _COMPARE_ROWS, shape[0] if shape else 1) for step in steps]
    return all(
        bool((ckpt.read(one, step, stop) == ckpt.read(other, step, stop)).all())
        for step, stop in zip(steps, stops, strict=True)
    )


def _untie(model: Any, target: str) -> None:
    """Gives the parameter `target` a storage of its own."""
    import torch

    parent, _, leaf = target.rpartition(".")
    module = model.get_submodule(parent)
    setattr(module, leaf, torch.nn.Parameter(torch.empty_like(getattr(module, leaf)), requires_grad=False))
    model.all_tied_weights_keys.pop(target, None)


def _unexpected(ckpt: Checkpoint, model: Any, extra: list[str]) -> list[str]:
    """The left-over tensors that mean something is wrong: not those which transformers ignores too."""
    ignored = [*(model._keys_to_ignore_on_load_unexpected or ()), *_LEGACY_BUFFERS]
    pattern = re.compile("|".join(f"({rule})" for rule in ignored))
    buffers = {name for name, _ in model.named_buffers()}
    prefix = (model.base_model_prefix or "") + "."

    def harmless(name: str) -> bool:
        return bool(pattern.search(name)) or name in buffers or prefix + name in buffers or _is_mask(ckpt.tensors[name])

    return sorted(name for name in extra if not harmless(name))


def _is_mask(info: TensorInfo) -> bool:
    """A causal mask of [1, 1, N, N], which old checkpoints carry in every attention."""
    shape = info.shape
    return info.name.endswith(".bias") and len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]


def _not_float(info: TensorInfo) -> bool:
    return info.dtype not in _FLOATS and bool(_INTEGERS.match(info.dtype))


def _refuse(where: str, verb: str, names: list[str], why: str) -> None:
    """Raises UserError naming the first few of `names`, if there are any."""
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        plural = "s" if len(names) > 1 else ""
        raise UserError(f"{where} {verb} {len(names)} tensor{plural}: {', '.join(names[:_SHOWN])}{more}; {why}")
