"""A GPU of a few lines: kernels of an archive run in Triton's interpreter, over host memory.

Implements runtime.cuda.devices.Device, so that the whole CUDA executor runs as it is: its buffers, uploads, launches
and graphs. "Machine code" is the JSON of a kernel's specification, which `interpreted` puts in the compiler's place.
TRITON_INTERPRET=1 must be set before this is imported (tests/conftest.py does it).
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from llmc.codegen.triton.archive import emit_archive
from llmc.codegen.triton.compile import CompiledKernel, KernelSpec
from llmc.codegen.triton.launch import GpuProgram
from llmc.runtime.cuda.targets import CudaTarget, find_cuda_target

_TYPES = {"bf16": tl.bfloat16, "f16": tl.float16, "f32": tl.float32}
_ELEMENTS = {"*i8": torch.int8, "*u8": torch.uint8, "*i16": torch.int16, "*i32": torch.int32, "*fp32": torch.float32,
             "*fp16": torch.float16, "*bf16": torch.bfloat16}  # fmt: skip


def interpreted(specs: Sequence[KernelSpec], target: Any, advance: Callable[[int], None]) -> list[CompiledKernel | str]:
    """Stands in for compile_kernels."""
    assert isinstance(target, CudaTarget)
    return [_described(spec) for spec in specs]


def _described(spec: KernelSpec) -> CompiledKernel:
    text = json.dumps(asdict(spec), sort_keys=True).encode()
    return CompiledKernel(spec.function.split(".")[1], text, 0, spec.num_warps, 1, 0, 0, ())


def interpreted_archive(program: GpuProgram, target: str = "cuda:sm_80") -> bytes:
    return emit_archive(program, find_cuda_target(target), compiler=interpreted)


@cache
def _function(name: str) -> Any:
    module, function = name.split(".")
    found = getattr(import_module(f"llmc.kernels.triton.{module}"), function)
    assert isinstance(found, InterpretedFunction), "TRITON_INTERPRET=1 was not set in time"
    return found


def _tensor(address: int, pointer: str) -> torch.Tensor:
    """One element at an address: the interpreter takes its pointer alone."""
    element = _ELEMENTS[pointer]
    memory = (ctypes.c_byte * element.itemsize).from_address(address)
    return torch.frombuffer(memory, dtype=element, count=1)


class InterpretedGpu:
    """Addresses are those of numpy arrays, which live as long as the device."""

    capability, multiprocessors = 80, 1

    def __init__(self, memory: int = 1 << 30) -> None:
        self.memory, self.used = memory, 0
        self.arrays: dict[int, np.ndarray[Any, Any]] = {}
        self.launched: list[str] = []

    def activate(self) -> None:
        return

    def memory_info(self) -> tuple[int, int]:
        return self.memory - self.used, self.memory

    def allocate(self, size: int) -> int:
        array = np.full(size + 256, 0xFF, np.uint8)  # float32 NaN: what nobody wrote must not be read
        address = -(-array.ctypes.data // 256) * 256
        self.arrays[address] = array
        self.used += size
        return address

    def free(self, address: int) -> None:
        self.used -= len(self.arrays.pop(address)) - 256

    def host_buffer(self, size: int) -> Any:
        return np.zeros(size, np.uint8)

    def upload(self, address: int, data: memoryview) -> None:
        source = np.frombuffer(data, np.uint8)
        ctypes.memmove(address, source.ctypes.data, len(source))

    def upload_async(self, address: int, data: Any) -> None:
        self.upload(address, memoryview(data).cast("B"))

    def download_async(self, data: Any, address: int) -> None:
        ctypes.memmove(data.ctypes.data, address, data.nbytes)

    def synchronize(self) -> None:
        return

    def load(self, code: memoryview, name: str, shared: int) -> Any:
        return json.loads(bytes(code))

    def launch(self, function: Any, grid: tuple[int, int, int], threads: int, shared: int, args: Any) -> None:
        kernel = _function(function["function"])
        constants = {k: _TYPES[v] if k == "HALF" else v for k, v in function["constants"]}
        tensors = {
            name: _tensor(address, pointer) for (name, pointer), address in zip(function["args"], args, strict=True)
        }
        self.launched.append(function["function"])
        kernel[grid](**tensors, **constants)

    def capture(self, record: Callable[[], None]) -> Any:
        return record

    def replay(self, graph: Any) -> None:
        graph()

    def discard(self, graph: Any) -> None:
        return

    def close(self) -> None:
        self.arrays.clear()
