"""Grids written by the libraries' own code, fetched from PyPI without their dependencies, come back to the bit.

compressed-tensors is imported in a process of its own. AutoAWQ and GPTQModel bring CUDA when they are imported: of
these the packing functions are taken out of their sources and run as they stand.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from frontend_builders import tiny_llama
from quantised_builders import DIMS, FORMATS, configure
from safetensors.torch import load_file, save_file

from llmc.frontend.open import open_checkpoint
from llmc.frontend.source import Source

pytestmark = pytest.mark.slow
PACKAGES = ("autoawq==0.2.9", "gptqmodel==7.7.0", "compressed-tensors==0.20.1", "loguru==0.7.3", "psutil==7.2.2")
N, K, GROUP = 64, 128, 32
NAME = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked packages."""
    folder = tmp_path_factory.mktemp("packers")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--dest", str(folder), *PACKAGES], check=True)
    for file in folder.glob("*.whl"):
        with zipfile.ZipFile(file) as wheel:
            wheel.extractall(folder)
    for file in folder.glob("*.tar.gz"):
        with tarfile.open(file) as archive:
            archive.extractall(folder, filter="data")
    return folder


def function_of(path: Path, name: str, scope: dict[str, Any]) -> Any:
    """A function out of a source file, without its decorators and annotations."""
    found = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef) and n.name == name]
    function = found[-1]
    function.decorator_list, function.returns = [], None
    for argument in function.args.args:
        argument.annotation = None
    exec(compile(ast.fix_missing_locations(ast.Module([function], [])), str(path), "exec"), scope)
    return scope[name]


def grid(seed: int, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(u [N, K], zeros and scales [N, groups]): random, the scales as float16 has them."""
    rng = np.random.default_rng(seed)
    scales = torch.from_numpy(rng.uniform(0.01, 0.02, (N, K // GROUP)).astype(np.float16)).float()
    zeros = torch.from_numpy(rng.integers(1, 2**bits - 1, (N, K // GROUP)))
    return torch.from_numpy(rng.integers(0, 2**bits, (N, K))), zeros, scales


def linear_of(u: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(K, N, bias=False)
    wide = (x.repeat_interleave(GROUP, 1) for x in (zeros, scales))
    zero, scale = wide
    linear.weight.data = (u - zero) * scale
    return linear


def check(
    path: Path, module: dict[str, torch.Tensor], settings: dict[str, Any], q: Any, values: Any, half: bool = False
) -> None:
    """A checkpoint whose one quantised module these tensors are gives the levels and the values. half: the library
    computes these in bfloat16."""
    model = tiny_llama(path, tie_word_embeddings=False, **DIMS)
    state = {k: v.contiguous() for k, v in model.state_dict().items() if k != f"{NAME}.weight"}
    save_file(state | {f"{NAME}.{k}": v.contiguous() for k, v in module.items()}, path / "model.safetensors")
    configure(path, quantization_config=settings)
    ckpt = open_checkpoint(Source(path, "dir", path.name))
    found = torch.from_numpy(ckpt.read(f"{NAME}.weight"))
    torch.testing.assert_close(found, values, rtol=2.0**-8 if half else 0, atol=0)
    if q is not None:
        codes = ckpt.codes(f"{NAME}.weight", 0, N)
        assert codes is not None
        np.testing.assert_array_equal(codes.q.reshape(N, K), q.numpy())


def test_autoawq(sources: Path, tmp_path: Path) -> None:
    path = sources / "autoawq-0.2.9/awq/modules/linear/gemm.py"
    pack = function_of(path, "from_linear", {"torch": torch, "get_best_device": lambda: "cpu"})
    u, zeros, scales = grid(0, 4)
    linear = linear_of(u, zeros, scales)

    def layer(bits: int, group: int, inputs: int, *_: Any) -> SimpleNamespace:
        return SimpleNamespace(w_bit=bits, group_size=group, in_features=inputs)

    made = pack(layer, linear, 4, GROUP, False, scales.T.contiguous(), zeros.T.contiguous())
    module = {name: getattr(made, name) for name in ("qweight", "qzeros", "scales")}
    check(tmp_path, module, FORMATS["AWQ"][0], u - zeros.repeat_interleave(GROUP, 1), linear.weight.data)


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [4, 8])
def test_gptqmodel(sources: Path, tmp_path: Path, bits: int, version: str) -> None:
    import transformers

    scope = {
        "t": torch, "nn": torch.nn, "np": np, "math": math, "transformers": transformers, "_ConvNd": torch.nn.Conv2d,
        "THREADPOOLCTL": SimpleNamespace(threadpool_limits=lambda n: contextlib.nullcontext()), "torch": torch,
        "BaseQuantLinear": object, "log": SimpleNamespace(info=SimpleNamespace(once=lambda *_: None)),
    }  # fmt: skip
    root = sources / "gptqmodel-7.7.0/gptqmodel"
    pack = function_of(root / "nn_modules/qlinear/__init__.py", "pack_original", scope)
    made = SimpleNamespace(
        bits=bits, pack_dtype_bits=32, pack_factor=32 // bits, maxq=2**bits - 1, planar=False, bias=None,
        pack_np_math_dtype=np.uint32, pack_np_dtype=np.int32, pack_dtype=torch.int32,
    )  # fmt: skip
    made.qzero_format = lambda format: None
    made.register_buffer = lambda name, value: setattr(made, name, value)
    u, zeros, scales = grid(1, bits)
    linear = linear_of(u, zeros, scales)
    pack(made, linear, scales, zeros, (torch.arange(K) // GROUP).to(torch.int32))
    if version == "gptq":
        old = function_of(root / "utils/model.py", "convert_gptq_v2_to_v1_format_module", scope)
        old(made, SimpleNamespace(bits=bits, pack_dtype=torch.int32))
    module = {name: getattr(made, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    settings = FORMATS["GPTQ"][0] | {"bits": bits, "checkpoint_format": version}
    levels = u - zeros.repeat_interleave(GROUP, 1)
    check(tmp_path, module, settings, levels, linear.weight.data)


_COMPRESS = """
import sys, torch
from safetensors.torch import load_file, save_file
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, QuantizationArgs
import json
format, args, path = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
compressor = BaseCompressor.get_value_from_registry(format)
packed = compressor.compress(load_file(path), scheme)
save_file({k: v.contiguous() for k, v in packed.items()}, path + ".packed")
if packed["weight_scale"].dtype is torch.float16:  # values are products in float32 here, not in half precision
    packed["weight_scale"] = packed["weight_scale"].float()
values = compressor.decompress(packed, scheme)["weight"].float().contiguous()
save_file({"weight": values}, path + ".values")
"""


@pytest.mark.parametrize("name", ["packed int4", "packed int4, zeros", "packed int8, rows", "int8", "compressed FP8",
                                  "NVFP4"])  # fmt: skip
def test_compressed_tensors(sources: Path, tmp_path: Path, name: str) -> None:
    settings = FORMATS[name][0]
    args = dict(settings["config_groups"]["group_0"]["weights"])
    bits, groups = args["num_bits"], {"group": K // GROUP, "tensor_group": K // 16}.get(args.get("strategy", ""), 1)
    if name == "packed int4, zeros":
        args, groups = args | {"strategy": "group", "symmetric": False}, K // GROUP
    args |= {"strategy": args.get("strategy", "channel")}
    args |= {"group_size": K // groups} if groups > 1 else {}
    generator = torch.Generator().manual_seed(5)
    state = {"weight": torch.randn(N, K, generator=generator) * 0.05}
    scale = torch.rand(N, groups, generator=generator) * 0.01 + 0.01
    state["weight_scale"] = scale.to(torch.float32 if name == "NVFP4" else torch.float16)
    if name == "NVFP4":
        state |= {
            "weight_scale": (scale * 1e4).to(torch.float8_e4m3fn).float(),
            "weight_global_scale": torch.tensor([1e4]),
        }
    if bits == 8 and args["type"] == "int":
        state["weight_scale"] /= 16
    if not args["symmetric"]:
        state["weight_zero_point"] = torch.randint(-8, 8, (N, groups), generator=generator, dtype=torch.int8)
    file = tmp_path / "grid"
    save_file(state, file)
    command = [sys.executable, "-c", _COMPRESS, settings["format"], json.dumps(args), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(sources)})
    assert done.returncode == 0, done.stderr
    packed, values = (load_file(f"{file}.{end}") for end in ("packed", "values"))
    model = tmp_path / "model"
    check(model, packed, settings, None, values["weight"], half=name == "NVFP4")
