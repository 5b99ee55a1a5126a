"""How long a GPU step should take: bytes over bandwidth or operations over the tensor cores' rate, kernel by kernel.

Williams, Waterman and Patterson 2009, "Roofline". Estimates from public figures of one GPU per capability
(runtime/cuda/targets.py), so that a plan built without a GPU can be judged; launch overhead is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmc.runtime.cost import Cost, StepShape, Units
from llmc.runtime.cuda.targets import CudaTarget

CONTEXT = 1024
"""Positions of context that attention is estimated for."""
PROMPT = 512
"""Tokens of the prompt that the bucket without a limit is estimated for."""


GPU_UNITS = Units({"int8": "int8", "int4": "int8", "float16": "half", "float32": "float"}, activations=True)
"""Which of a GPU's rates the work goes by."""


@dataclass(frozen=True)
class KernelEstimate:
    """One kernel at the largest step of its bucket. launches: per step. seconds: of one launch. bound: "memory" or
    "compute"."""

    kernel: Mapping[str, Any]
    launches: int
    rows: int
    seconds: float
    bound: str


def kernel_estimates(header: Mapping[str, Any], target: CudaTarget) -> list[KernelEstimate]:
    """The default kernel of every op and bucket, in the order of the step."""
    found: dict[int, KernelEstimate] = {}
    for call in header["calls"]:
        for variant in call["variants"]:
            index = variant["kernels"][0]
            rows = variant["max"] or (PROMPT if call["when"] != "decode" and call["rows"] == "T" else 1)
            seconds, bound = _time(call, rows, target)
            launches = found[index].launches + 1 if index in found else 1
            found[index] = KernelEstimate(header["kernels"][index], launches, rows, seconds, bound)
    return list(found.values())


def step_seconds(header: Mapping[str, Any], target: CudaTarget, tokens: int, sequences: int, prompt: bool) -> float:
    """A step of `tokens` tokens that samples one row of each of `sequences` sequences; prompt: no sequence decodes."""
    skipped = {"adjust", "decode" if prompt else "prefill"}
    return sum(
        _time(call, tokens if call["rows"] == "T" else sequences, target)[0]
        for call in header["calls"]
        if call["when"] not in skipped
    )


def _time(call: Mapping[str, Any], rows: int, target: CudaTarget) -> tuple[float, str]:
    """Seconds of one launch for `rows` of its rows, each of a sequence that decodes but in a prompt."""
    prompt = call["when"] == "prefill"
    shape = StepShape(((0, rows),) if prompt else ((CONTEXT - 1, 1),) * rows, rows)
    work = Cost(**call["cost"]).work(shape, GPU_UNITS)
    rates = {"half": target.half_flops, "int8": target.int8_ops, "float": target.float_flops}
    memory, compute = work.bytes / target.bandwidth, work.seconds_at_peak(rates)
    return max(memory, compute), "memory" if memory >= compute else "compute"
