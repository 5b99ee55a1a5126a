"""Runs a kernel the way a plan's kernels run: compiled ahead of time and launched through the CUDA runtime's device.

The op tests in this directory come here when LLMC_TEST_DEVICE says so:

    cuda         the GPU at hand. Its 16-bit type is bfloat16, its tiles are those that plans use
    interpreted  tests/interpreted_gpu.py in the GPU's place, so that this path is tested without one

All that a kernel is given lies in one image in device memory, between gaps that it must leave alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl

from llmc.codegen.triton.compile import CompiledKernel, KernelSpec, compile_kernels
from llmc.codegen.triton.configs import Config, buckets
from llmc.codegen.triton.launch import Launch
from llmc.runtime.cuda.devices import Arguments, Bytes, Device
from llmc.runtime.cuda.targets import CUDA_TARGETS, CudaTarget, choose_cuda_target

POINTERS = {torch.int8: "*i8", torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.float32: "*fp32",
            torch.float16: "*fp16", torch.bfloat16: "*bf16"}  # fmt: skip
_TYPES = {tl.bfloat16: "bf16", tl.float16: "f16", tl.float32: "f32"}
_ALIGN, _GAP = 256, 256
_EMPTY = 0xFF
"""Fills the gaps: float32 NaN, so that a value read there shows."""


@cache
def device() -> Device:
    """Opened at the first launch, and the process's until it ends. Raises UserError where there is no GPU."""
    if os.environ["LLMC_TEST_DEVICE"] == "interpreted":
        from interpreted_gpu import InterpretedGpu

        return InterpretedGpu()
    from llmc.runtime.cuda.driver import open_device

    return open_device()


@cache
def target() -> CudaTarget:
    return choose_cuda_target([t.name for t in CUDA_TARGETS], device().capability)


def linear_configs(format: str, gated: bool) -> list[Config]:
    """All configurations that plans for this device have for a matrix product."""
    launch = Launch("", "linear.linear", (), {"GATED": gated}, (), "", f"linear {format}")
    return [config for bucket in buckets(launch, target().capability) for config in bucket.configs]


def _configs(function: str, constants: dict[str, Any]) -> Sequence[Config]:
    """The configurations that plans have for a launch, best first. A product has the tile that its test gives it."""
    module, name = function.split(".")
    if module == "linear":
        same = [
            config
            for config in linear_configs(constants["FORMAT"], constants["GATED"])
            if all(constants[key] == config.constants[key] for key in ("BN", "BT", "BK", "WIDEN"))
        ]
        return same[:1] or [Config({}, 4, constants["STAGES"])]
    if function in ("attention.attention_prefill", "attention.attention_decode"):
        tiles = f"attention {constants['D']}"
    elif function in ("attention.attention_combine", "rope.rope_kv_write"):
        tiles = "warp"
    elif module == "sampling":
        tiles = {"sample_stats": "sample stats", "adjust_logits": "sample adjust", "sample_rows": "sample rows"}[name]
    else:
        tiles = "row"
    found = buckets(Launch("", function, (), constants, (), "", tiles), target().capability)[0].configs
    if module == "sampling":  # the block is the test's
        return [Config({}, config.num_warps, config.num_stages) for config in found]
    return found


@cache
def _kernel(
    function: str, args: tuple[tuple[str, str], ...], constants: tuple[tuple[str, Any], ...]
) -> tuple[CompiledKernel, Any]:
    """The kernel as a plan would have it (codegen/triton/archive.py), and its handle on the device."""
    given = dict(constants)
    specs = [
        KernelSpec(
            function, function, args, tuple((name, config.constants.get(name, value)) for name, value in constants),
            config.num_warps, config.num_stages,
        )
        for config in _configs(function, given)
    ]  # fmt: skip
    results = compiler()(specs, target(), lambda done: None)
    fitting = [result for result in results if isinstance(result, CompiledKernel)]
    assert fitting, f"{function} {given}: {results}"
    best = min(fitting, key=lambda kernel: kernel.spill_bytes)
    return best, device().load(memoryview(best.cubin), best.name, best.shared)


def compiler() -> Any:
    """compile_kernels, or what stands for it."""
    if os.environ["LLMC_TEST_DEVICE"] == "interpreted":
        from interpreted_gpu import interpreted

        return interpreted
    return compile_kernels


def _plain(value: Any) -> Any:
    """A constant as a KernelSpec has it."""
    if isinstance(value, tl.dtype):
        return _TYPES[value]
    return value.item() if isinstance(value, np.generic) else value


class _Memory:
    """One area on the device and one of the host's, as large as the largest image so far."""

    def __init__(self) -> None:
        self.address, self.host = 0, np.zeros(0, np.uint8)

    def reserve(self, size: int) -> tuple[int, Bytes]:
        if size > len(self.host):
            capacity = max(1 << 20, 1 << (size - 1).bit_length())
            if self.address:
                device().free(self.address)
            self.address, self.host = device().allocate(capacity), device().host_buffer(capacity)
        return self.address, self.host[:size]


_memory = _Memory()


class _Image:
    """The storages of some tensors, one after another with gaps between them; tensors may share a storage."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.storages: dict[int, Bytes] = {}
        self.places: dict[int, int] = {}
        at = _GAP
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.places:
                self.storages[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
                self.places[storage.data_ptr()] = at
                at = -(-(at + storage.nbytes()) // _ALIGN) * _ALIGN + _GAP
        self.address, self.host = _memory.reserve(at)
        self.used = np.zeros(at, bool)

    def pointer(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        address: int = self.address + self.places[storage.data_ptr()] + tensor.storage_offset() * tensor.element_size()
        assert address % 16 == 0, "kernels are compiled for pointers that are multiples of 16"
        return address

    def upload(self) -> None:
        self.host[:] = _EMPTY
        for key, storage in self.storages.items():
            self._part(self.host, key)[:] = storage
            self._part(self.used, key)[:] = True
        device().upload_async(self.address, self.host)

    def download(self) -> None:
        """Waits for the kernel, looks at the gaps, and gives every tensor what the device holds."""
        device().download_async(self.host, self.address)
        device().synchronize()
        strays = np.flatnonzero((self.host != _EMPTY) & ~self.used)
        assert not len(strays), f"the kernel wrote outside all arrays, {strays[:4]} bytes into {self.places}"
        for key, storage in self.storages.items():
            storage[:] = self._part(self.host, key)

    def _part(self, whole: np.ndarray[Any, Any], key: int) -> np.ndarray[Any, Any]:
        return whole[self.places[key] : self.places[key] + len(self.storages[key])]


def launch(kernel: Any, grid: tuple[int, ...], args: dict[str, Any]) -> None:
    """Runs a function of llmc.kernels.triton; args are tensors of the CPU, None and constants, by parameter."""
    function = f"{kernel.fn.__module__.removeprefix('llmc.kernels.triton.')}.{kernel.fn.__name__}"
    tensors = {name: args[name] for name in kernel.arg_names if isinstance(args[name], torch.Tensor)}
    pointers = tuple((name, POINTERS[tensor.dtype]) for name, tensor in tensors.items())
    constants = tuple((name, _plain(args[name])) for name in kernel.arg_names if name not in tensors)
    device().activate()
    compiled, handle = _kernel(function, pointers, constants)
    image = _Image(tensors.values())
    image.upload()
    x, y, z = (*grid, 1, 1)[:3]
    addresses = Arguments(image.pointer(tensor) for tensor in tensors.values())
    device().launch(handle, (int(x), int(y), int(z)), 32 * compiled.warps, compiled.shared, addresses)
    image.download()
