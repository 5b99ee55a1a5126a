"""Tiny Llamas in the formats of quantised checkpoints, packed element by element from the layouts' descriptions.

Nothing of llmc's readers is used. A packer gets a generator and the shape of a matrix [N, K], and returns the tensors
of the module, the values that they stand for, and the whole numbers and scales where there are such.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from frontend_builders import tiny_llama
from safetensors.torch import save_file

DIMS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@dataclass(frozen=True)
class Grid:
    """tensors: by the end of their name. values float32 [N, K]. q [N, K] and scale [N, K / group]: what codes hold."""

    tensors: dict[str, torch.Tensor]
    values: np.ndarray
    q: np.ndarray | None = None
    scale: np.ndarray | None = None


def words(fields: np.ndarray, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Unsigned fields [a, b] along the last axis into int32 words, the first in the lowest bits unless `order` says
    which element of a word's comes next."""
    per = 32 // bits
    out = np.zeros((fields.shape[0], -(-fields.shape[1] // per)), np.uint64)
    for place in range(out.shape[1] * per):
        word, inner = divmod(place, per)
        element = word * per + (order[inner] if order else inner)
        if element < fields.shape[1]:
            out[:, word] |= fields[:, element].astype(np.uint64) << np.uint64(bits * inner)
    return torch.from_numpy(out.astype(np.uint32).view(np.int32))


def _scales(rng: np.random.Generator, n: int, groups: int) -> np.ndarray:
    return rng.uniform(0.005, 0.02, (n, groups)).astype(np.float16)


def _integers(
    rng: np.random.Generator, n: int, k: int, bits: int, group: int, zeros: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(u [n, k], scale [n, groups], values)."""
    u = rng.integers(0, 2**bits, (n, k))
    scale = _scales(rng, n, k // group) / np.float16(1 if bits == 4 else 16)
    wide = np.repeat(scale, group, axis=1).astype(np.float32)
    return u, scale, ((u - np.repeat(zeros, group, axis=1)) * wide).astype(np.float32)


def gptq(bits: int, version: int, group: int = 32, act_order: bool = False) -> Callable[..., Grid]:
    def pack(rng: np.random.Generator, n: int, k: int) -> Grid:
        groups = k // group
        zeros = rng.integers(1, 2**bits, (n, groups))
        u, scale, values = _integers(rng, n, k, bits, group, zeros)
        g_idx = np.arange(k) // group
        q: np.ndarray | None = u - np.repeat(zeros, group, axis=1)
        if act_order:
            g_idx = rng.permutation(g_idx)
            q, values = None, ((u - zeros[:, g_idx]) * scale.astype(np.float32)[:, g_idx]).astype(np.float32)
        stored = zeros - 1 if version == 1 else zeros
        tensors = {
            ".qweight": words(u, bits).T.contiguous(), ".qzeros": words(stored.T, bits),
            ".scales": torch.from_numpy(scale.T.copy()), ".g_idx": torch.from_numpy(g_idx.astype(np.int32)),
        }  # fmt: skip
        return Grid(tensors, values, q, scale)

    return pack


def awq(rng: np.random.Generator, n: int, k: int) -> Grid:
    zeros = rng.integers(0, 16, (n, k // 32))
    u, scale, values = _integers(rng, n, k, 4, 32, zeros)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {
        ".qweight": words(u.T, 4, order), ".qzeros": words(zeros.T, 4, order),
        ".scales": torch.from_numpy(scale.T.copy()),
    }  # fmt: skip
    return Grid(tensors, values, u - np.repeat(zeros, 32, axis=1), scale)


def pack_quantized(bits: int, group: int, symmetric: bool) -> Callable[..., Grid]:
    def pack(rng: np.random.Generator, n: int, k: int) -> Grid:
        size, half = group or k, 2 ** (bits - 1)
        zeros = np.full((n, k // size), half) if symmetric else rng.integers(0, 2**bits, (n, k // size))
        u, scale, values = _integers(rng, n, k, bits, size, zeros)
        tensors = {
            ".weight_packed": words(u, bits), ".weight_scale": torch.from_numpy(scale),
            ".weight_shape": torch.tensor([n, k]),
        }  # fmt: skip
        if not symmetric:
            tensors[".weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        return Grid(tensors, values, u - np.repeat(zeros, size, axis=1), scale)

    return pack


def int_quantized(rng: np.random.Generator, n: int, k: int) -> Grid:
    q = rng.integers(-128, 128, (n, k))
    scale = torch.from_numpy(_scales(rng, n, 1) / 16).to(torch.bfloat16)
    tensors = {".weight": torch.from_numpy(q.astype(np.int8)), ".weight_scale": scale}
    wide = scale.float().numpy()
    return Grid(tensors, q.astype(np.float32) * wide, q, wide)


def fp8(block: tuple[int, int] | None, suffix: str) -> Callable[..., Grid]:
    """block None: a scale for each row."""

    def pack(rng: np.random.Generator, n: int, k: int) -> Grid:
        weight = torch.from_numpy(rng.standard_normal((n, k)).astype(np.float32) * 50).to(torch.float8_e4m3fn)
        height, width = block or (1, k)
        scale = rng.uniform(0.0005, 0.002, (-(-n // height), -(-k // width))).astype(np.float32)
        values = weight.float().numpy().copy()
        for i in range(n):
            for j in range(k):
                values[i, j] *= scale[i // height, j // width]
        return Grid({".weight": weight, suffix: torch.from_numpy(scale)}, values)

    return pack


def _e2m1(rng: np.random.Generator, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(codes [n, k], values)."""
    code = rng.integers(0, 16, (n, k))
    return code, np.array([(-1 if c & 8 else 1) * E2M1[c & 7] for c in code.reshape(-1)], np.float32).reshape(n, k)


def _bytes(code: np.ndarray) -> torch.Tensor:
    return torch.from_numpy((code[:, ::2] | code[:, 1::2] << 4).astype(np.uint8))


def nvfp4(rng: np.random.Generator, n: int, k: int) -> Grid:
    code, values = _e2m1(rng, n, k)
    scale = torch.from_numpy(rng.uniform(50, 400, (n, k // 16)).astype(np.float32)).to(torch.float8_e4m3fn)
    whole = 12000.0
    tensors = {".weight_packed": _bytes(code), ".weight_scale": scale, ".weight_global_scale": torch.tensor([whole])}
    return Grid(tensors, values * np.repeat(scale.float().numpy() / np.float32(whole), 16, axis=1))


def mxfp4(packed: str, scales: str) -> Callable[..., Grid]:
    def pack(rng: np.random.Generator, n: int, k: int) -> Grid:
        code, values = _e2m1(rng, n, k)
        exponent = rng.integers(118, 124, (n, k // 32))
        octets = _bytes(code)
        tensors = {packed: octets if packed == ".weight_packed" else octets.reshape(n, k // 32, 16),
                   scales: torch.from_numpy(exponent.astype(np.uint8))}  # fmt: skip
        power = 2.0 ** (exponent - 127)
        values = values * np.repeat(power, 32, axis=1).astype(np.float32)
        return Grid(tensors, values, (values / np.repeat(power / 2, 32, axis=1)).astype(int), power / 2)

    return pack


def _group(kind: str, bits: int, **more: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, "symmetric": True, **more}}


def _compressed(format: str, kind: str, bits: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
            "config_groups": {"group_0": _group(kind, bits, **more)}}  # fmt: skip


def _gptq_settings(bits: int = 4, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": False, **more}


FORMATS: dict[str, tuple[dict[str, Any], Callable[..., Grid]]] = {
    "GPTQ": (_gptq_settings(sym=True), gptq(4, 1)),
    "GPTQ v2": (_gptq_settings(checkpoint_format="gptq_v2"), gptq(4, 2)),
    "GPTQ, groups of 64": (_gptq_settings(group_size=64), gptq(4, 1, 64)),
    "GPTQ int8": (_gptq_settings(8), gptq(8, 1)),
    "GPTQ act-order": (_gptq_settings(desc_act=True), gptq(4, 1, act_order=True)),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq),
    "packed int4": (_compressed("pack-quantized", "int", 4, strategy="group"), pack_quantized(4, 32, True)),
    "packed int4, zeros": (_compressed("pack-quantized", "int", 4), pack_quantized(4, 64, False)),
    "packed int8, rows": (_compressed("pack-quantized", "int", 8), pack_quantized(8, 0, True)),
    "int8": (_compressed("int-quantized", "int", 8, strategy="channel"), int_quantized),
    "compressed FP8": (_compressed("float-quantized", "float", 8, strategy="channel"), fp8(None, ".weight_scale")),
    "compressed FP8, blocks": (
        _compressed("float-quantized", "float", 8, strategy="block", block_structure=[32, 32]),
        fp8((32, 32), ".weight_scale"),
    ),
    "NVFP4": (_compressed("nvfp4-pack-quantized", "float", 4, strategy="tensor_group"), nvfp4),
    "compressed MXFP4": (
        _compressed("mxfp4-pack-quantized", "float", 4), mxfp4(".weight_packed", ".weight_scale")
    ),
    "FP8": ({"quant_method": "fp8", "weight_block_size": [48, 40]}, fp8((48, 40), ".weight_scale_inv")),
    "MXFP4": ({"quant_method": "mxfp4"}, mxfp4(".weight_blocks", ".weight_scales")),
}  # fmt: skip
"""name -> (quantization_config, packer)."""


def quantised_llama(path: Path, name: str) -> dict[str, Grid]:
    """Saves a tiny Llama in `path` whose linears, but for the head, are quantised; returns their grids by parameter."""
    settings, pack = FORMATS[name]
    model = tiny_llama(path, tie_word_embeddings=False, **DIMS)
    rng = np.random.default_rng(7)
    state, grids = {}, {}
    for parameter, value in model.state_dict().items():
        if "_proj.weight" not in parameter:
            state[parameter] = value.to(torch.bfloat16).contiguous()
            continue
        grids[parameter] = pack(rng, *value.shape)
        module = parameter.removesuffix(".weight")
        state |= {module + suffix: tensor.contiguous() for suffix, tensor in grids[parameter].tensors.items()}
    save_file(state, path / "model.safetensors")
    configure(path, quantization_config=settings)
    return grids


def configure(path: Path, **changes: Any) -> None:
    """Writes into a checkpoint's config.json."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
