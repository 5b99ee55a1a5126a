"""Safetensors checkpoints that are quantised already: what `quantization_config` says, and the matrices behind it.

Which modules are quantised, in how many bits and groups, is read off the tensors themselves; the configuration says
which format they have, and must not contradict them. Its lists of modules (`ignore`, `modules_to_not_convert`,
`dynamic`, the targets of `config_groups`) say the first again, in patterns of an untrusted file, and are not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmc.errors import UserError
from llmc.frontend import packed_columns, packed_rows
from llmc.frontend.quantised import Companions, Quantised
from llmc.frontend.raw_tensor import RawTensor

_KEYS = ("quantization_config", "compression_config")
_PLAIN = ("F32", "F16", "BF16", "F64")
_UNUSED = (
    "input_scale", "input_zero_point", "input_global_scale", "activation_scale", "q_scale", "k_scale", "v_scale",
)  # fmt: skip
"""What only quantised activations or a quantised cache need; llmc quantises those for itself."""
_INSTEAD = "give a checkpoint in GPTQ, AWQ (gemm), compressed-tensors, FP8 or MXFP4, or the unquantised one"
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class _Method:
    """A format. anchors: the names of the tensor that holds a module's levels. companions: of those beside it.
    joint: what lies between the module's name and these. read: a module's quantised matrix."""

    name: str
    anchors: tuple[str, ...]
    companions: tuple[str, ...]
    read: Callable[[Companions, Settings], Quantised]
    joint: str = "."

    def parts_of(self, tensors: Mapping[str, RawTensor]) -> dict[str, dict[str, RawTensor]]:
        """Tensors by module and by what follows its name."""
        modules: dict[str, dict[str, RawTensor]] = {}
        for name, tensor in tensors.items():
            for suffix in (*self.anchors, *self.companions):
                if name.endswith(self.joint + suffix):
                    modules.setdefault(name.removesuffix(self.joint + suffix), {})[suffix] = tensor
        return modules


def take_settings(raw: dict[str, Any], where: str) -> Settings | None:
    """Removes the description of the quantisation from a config.json, so that the plain model is built; None without
    one. Raises UserError for a format that is not supported, by name."""
    found = [settings for key in _KEYS if (settings := raw.pop(key, None))]
    if not found:
        return None
    if not isinstance(found[0], dict):
        raise UserError(f"{where}: {_KEYS[0]} must be a JSON object; fetch the checkpoint again")
    _method(found[0], where)
    return found[0]


def find_quantised(
    settings: Settings, tensors: Mapping[str, RawTensor], where: str
) -> tuple[dict[str, Quantised], set[str]]:
    """({parameter of the plain model: its quantised matrix}, the tensors that these are made of or do not need).

    Reads shapes, and of the contents no more than orders of groups. Raises UserError for tensors that are missing, of
    another shape than those beside them, or not as described.
    """
    method = _method(settings, where)
    found: dict[str, Quantised] = {}
    used = {name for name in tensors if name.rpartition(".")[2] in _UNUSED}
    for module, parts in sorted(method.parts_of(tensors).items()):
        companions = Companions(module, parts, method.name)
        anchor = next((name for name in method.anchors if name in parts and parts[name].dtype not in _PLAIN), None)
        if anchor is None:
            if any(name in parts for name in method.companions):
                companions.get(method.anchors[0], ("I32", "I8", "U8", "F8_E4M3"))
            continue
        target = module if method.joint == "_" else f"{module}.weight"
        if tensors.get(target, parts[anchor]) is not parts[anchor]:
            raise companions.refuse("is stored twice, quantised and not: remove one")
        found[target] = method.read(companions, settings)
        used |= {tensor.name for tensor in parts.values()}
    if not found:
        raise UserError(f"{where} says that the weights are quantised ({method.name}), but none is: {_INSTEAD}")
    return found, used


def _method(settings: Settings, where: str) -> _Method:
    """The format that the settings name. Raises UserError for one, or a variant, that is not supported."""
    name = str(settings.get("quant_method") or ("compressed-tensors" if "config_groups" in settings else "unknown"))
    method = _METHODS.get(name.lower())
    if method is None:
        raise _unsupported(where, name)

    def variants(*keys: str) -> list[str]:
        return [str(settings[key]).lower() for key in keys if settings.get(key)]

    if method is _METHODS["gptq"]:
        if settings.get("is_marlin_format"):
            raise _unsupported(where, "GPTQ in marlin's layout")
        _one_of(variants("checkpoint_format", "format")[:1], ("gptq", "gptq_v2"), "GPTQ", where)
        _one_of([str(settings["bits"])] if "bits" in settings else [], ("4", "8"), "GPTQ with bits =", where)
    elif method is _METHODS["awq"]:
        _one_of(variants("version", "checkpoint_format", "format"), ("gemm",), "AWQ", where)
        _one_of([str(settings.get("bits", settings.get("w_bit", 4)))], ("4",), "AWQ with bits =", where)
    elif method is _METHODS["compressed-tensors"]:
        _check_compressed(settings, variants("format"), where)
    return method


def _unsupported(where: str, what: str) -> UserError:
    return UserError(
        f"{where} says that the weights are quantised with {what[:100]}, which is not supported: {_INSTEAD}"
    )


def _one_of(found: list[str], known: tuple[str, ...], what: str, where: str) -> None:
    for value in found:
        if value not in known:
            raise _unsupported(where, f"{what} {value}")


_COMPRESSED = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision",
)  # fmt: skip


def _check_compressed(settings: Settings, formats: list[str], where: str) -> None:
    formats += [str(group["format"]) for group in _groups(settings) if group.get("format")]
    _one_of(formats, _COMPRESSED, "compressed-tensors", where)
    for key, what in (("sparsity_config", "sparsity"), ("transform_config", "transforms")):
        value = settings.get(key)
        if value and not (isinstance(value, dict) and value.get("format") == "dense"):
            raise _unsupported(where, f"compressed-tensors with {what} ({key})")


def _groups(settings: Settings) -> list[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    return [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []


def _gptq(parts: Companions, settings: Settings) -> Quantised:
    version = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    found = packed_columns.gptq(parts, settings, stores_z=str(version).lower() == "gptq_v2")
    stated = settings.get("bits")
    if stated is not None and not settings.get("dynamic") and f"int{stated}" not in found.kind:
        raise parts.refuse(f"is {found.kind}, and the configuration says {stated} bits")
    return found


def _compressed(parts: Companions, settings: Settings) -> Quantised:
    """By the types of the tensors; the schemes of `config_groups` must hold one for it."""
    schemes = [scheme for group in _groups(settings) if isinstance(scheme := group.get("weights"), dict)]
    if "weight_packed" not in parts:
        if parts.tensors["weight"].dtype == "I8":
            found, scheme = packed_rows.int_quantized(parts), ("int", 8)
        else:
            stated = next((s.get("block_structure") for s in schemes if s.get("strategy") == "block"), None)
            block = _block(parts, stated)
            found = packed_rows.float_quantized(parts, "weight_scale", "compressed-tensors FP8", block)
            scheme = ("float", 8)
    elif parts.tensors["weight_packed"].dtype == "I32":
        found = packed_rows.pack_quantized(parts)
        scheme = ("int", 4 if "int4" in found.kind else 8)
    else:
        scheme = ("float", 4)
        if "weight_global_scale" in parts:
            found = packed_rows.nvfp4(parts)
        else:
            found = packed_rows.mxfp4(parts, "weight_packed", "weight_scale", "compressed-tensors MXFP4")
    if scheme not in [(s.get("type", "int"), s.get("num_bits", 8)) for s in schemes]:
        raise parts.refuse(f"is {scheme[0]}{scheme[1]}, which none of config_groups describes")
    return found


def _fp8(parts: Companions, settings: Settings) -> Quantised:
    suffix = "weight_scale" if "weight_scale" in parts else "weight_scale_inv"
    return packed_rows.float_quantized(parts, suffix, "FP8", _block(parts, settings.get("weight_block_size")))


def _block(parts: Companions, stated: object) -> tuple[int, int] | None:
    """Rows and columns of a block that has a scale. Raises UserError for what is no such pair."""
    if stated is None:
        return None
    if not (isinstance(stated, list) and len(stated) == 2 and all(type(n) is int and 0 < n < 1 << 20 for n in stated)):
        raise parts.refuse(f"has blocks of {str(stated)[:60]}, which must be two positive numbers")
    return stated[0], stated[1]


_METHODS = {
    "gptq": _Method("GPTQ", ("qweight",), ("qzeros", "scales", "g_idx"), _gptq),
    "awq": _Method("AWQ", ("qweight",), ("qzeros", "scales"), packed_columns.awq),
    "compressed-tensors": _Method(
        "compressed-tensors", ("weight_packed", "weight"),
        ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale"), _compressed,
    ),
    "fp8": _Method("FP8", ("weight",), ("weight_scale_inv", "weight_scale"), _fp8),
    "mxfp4": _Method(
        "MXFP4", ("blocks",), ("scales",),
        lambda parts, settings: packed_rows.mxfp4(parts, "blocks", "scales", "MXFP4"), "_",
    ),
}  # fmt: skip
"""quant_method -> its format. What is not here is refused by name."""
