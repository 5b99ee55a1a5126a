"""Tiny models on the interpreted GPU (interpreted_gpu.py), behind the real CUDA executor."""

from __future__ import annotations

import copy
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from interpreted_gpu import InterpretedGpu, interpreted_archive
from tiny_engines import PRECISIONS, imported

from llmc.codegen.triton.launch import GpuProgram
from llmc.codegen.triton.select import select_launches
from llmc.codegen.weights import WeightTable
from llmc.kernels.formats import W4A16, W8, W8A16
from llmc.kernels.interpret import run_graph
from llmc.passes.pipeline import run_pipeline
from llmc.passes.result import PassContext
from llmc.runtime.batch import Float32
from llmc.runtime.cuda.executor import CudaConfig, CudaExecutor

GPU_PRECISIONS = PRECISIONS | {"int8 weight-only": (W8A16, W8A16, "bf16"),
                               "int4 weight-only": (W4A16, W8A16, "bf16"),
                               "int8, int8 KV": (W8, W8, "int8")}  # fmt: skip


@dataclass(frozen=True)
class Interpreted:
    program: GpuProgram
    archive: bytes
    weights: memoryview


@cache
def interpreted_model(family: str, precision: str = "fp32") -> Interpreted:
    """float16 stands for bfloat16, whose products the interpreter gets wrong."""
    graph, reader = imported(family)
    graph = copy.deepcopy(graph)
    run_pipeline(graph, PassContext(*GPU_PRECISIONS[precision]))
    table = WeightTable()
    program = select_launches(graph, table, "fp16")
    weights = mmap.mmap(-1, table.size)
    for offset, data in table.blocks(reader):
        weights[offset : offset + len(data)] = data
    return Interpreted(program, interpreted_archive(program), memoryview(weights))


def reference_logits(family: str, precision: str, prompt: list[int]) -> Float32:
    """Logits [T, V] of the lowered graph run by the dialect's reference implementations."""
    graph, reader = imported(family)
    graph = copy.deepcopy(graph)
    run_pipeline(graph, PassContext(*GPU_PRECISIONS[precision]))
    count = len(prompt)
    inputs = {"tokens": torch.tensor(prompt), "positions": torch.arange(count),
              "query_start": torch.tensor([0, count]), "rows": torch.arange(count)}  # fmt: skip
    logits: Float32 = run_graph(graph, inputs, reader).numpy()
    return logits


def gpu_executor(
    family: str = "llama",
    precision: str = "fp32",
    pages: int = 24,
    multiprocessors: int = 1,
    choices: Mapping[str, int] | None = None,
) -> CudaExecutor:
    """multiprocessors: four persistent programs for each share the work of a decode step. choices: tuned kernels."""
    model = interpreted_model(family, precision)
    device = InterpretedGpu()
    device.multiprocessors = multiprocessors
    config = CudaConfig(64, 64, 64, max_model_len=128, num_pages=pages, memory_utilization=0.9)
    return CudaExecutor(memoryview(model.archive), model.weights, config, device, choices or {})
