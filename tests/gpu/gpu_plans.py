"""Plans of the real model for the GPU at hand, and the CUDA executor over them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from e2e_harness import MODEL, llmc

from llmc.runtime.cuda.driver import open_device
from llmc.runtime.cuda.executor import CudaConfig, CudaExecutor
from llmc.runtime.cuda.targets import choose_cuda_target
from llmc.runtime.plan import Plan

PRECISIONS: dict[str, tuple[str, ...]] = {
    "fp32": ("--fp32",),
    "bf16": ("--bf16",),
    "int8": ("--int8",),
    "int4": ("--int4",),
    "int8 weight-only": ("--int8", "--weight-only"),
    "int4 weight-only": ("--int4", "--weight-only"),
    "int8, int8 KV": ("--int8", "--kv-cache-dtype", "int8"),
}
"""Name -> flags of `llmc build`."""
SERVE = ("--device", "cuda", "--gpu-memory-utilization", "0.3")
"""Flags of `llmc serve`: other tests' executors may be on the same GPU."""
_UNTUNED: Mapping[str, int] = {}
FIGURES: list[str] = []
"""What tests measure without asserting it; conftest prints it at the end of the run."""


def report(name: str, value: str) -> None:
    """Records a figure for the end of the run."""
    FIGURES.append(f"{name}: {value}")


@dataclass
class Plans:
    """Plans for one target, each built at its first use and kept in `directory`."""

    directory: Path
    target: str
    _paths: dict[str, Path] = field(default_factory=dict)

    def path(self, precision: str) -> Path:
        if precision not in self._paths:
            path = self.directory / f"{precision.replace(', ', '-').replace(' ', '-')}.plan"
            if not path.exists():
                flags = PRECISIONS[precision]
                done = llmc("build", MODEL, "--target", self.target, "--no-eval", "-o", path, *flags)
                assert done.returncode == 0, done.stderr
            self._paths[precision] = path
        return self._paths[precision]

    def open(self, precision: str) -> Plan:
        return Plan.open(self.path(precision))


@contextlib.contextmanager
def gpu_executor(plan: Plan, choices: Mapping[str, int] = _UNTUNED) -> Iterator[CudaExecutor]:
    """As many rows as tokens in a step, so that every position's logits can be asked for. choices: tuned kernels."""
    device = open_device()
    target = choose_cuda_target(list(plan.manifest["targets"]), device.capability)
    config = CudaConfig(512, 512, 512, max_model_len=2048, num_pages=512, memory_utilization=0.9)
    executor = CudaExecutor(plan.segment(f"code/{target.name}"), plan.segment("weights"), config, device, choices)
    try:
        yield executor
    finally:
        executor.close()
