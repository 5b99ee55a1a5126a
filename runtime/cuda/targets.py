"""GPU targets: compute capabilities, their limits, and the public figures that the roofline of a build is judged by.

The compiler and the loader share this table. Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability". Bandwidth and dense tensor-core rates: NVIDIA's data sheets of the GPU named as `example`.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmc.errors import UserError


@dataclass(frozen=True)
class CudaTarget:
    """One compute capability.

    capability: 90 for 9.0. shared_limit: bytes of shared memory that one block may use. resident_threads,
    resident_blocks: the most that one multiprocessor holds at a time. locked: the code runs on this very capability
    only (Triton compiles for sm_90a and later with architecture-specific instructions). oldest_driver: the CUDA
    version, as cuDriverGetVersion gives it (1000 * major + 10 * minor), of the oldest driver that takes the code: the
    first of the major version of the ptxas that makes it (NVIDIA, "CUDA Compatibility": minor versions of one major
    version run each other's code). example, multiprocessors, bandwidth (bytes/s), half_flops, int8_ops (dense, per
    second), float_flops: of a GPU with this capability, for estimates.
    """

    name: str
    capability: int
    shared_limit: int
    resident_threads: int
    resident_blocks: int
    locked: bool
    oldest_driver: int
    example: str
    multiprocessors: int
    bandwidth: float
    half_flops: float
    int8_ops: float
    float_flops: float


_KIB = 1024
_CUDA_12, _CUDA_13 = 12000, 13000
_BRANCHES = {_CUDA_12: "R525", _CUDA_13: "R580"}
"""The driver branch that a CUDA version came with."""
CUDA_TARGETS: tuple[CudaTarget, ...] = (
    CudaTarget("cuda:sm_80", 80, 163 * _KIB, 2048, 32, False, _CUDA_12,
               "A100 SXM 80GB", 108, 2.039e12, 312e12, 624e12, 19.5e12),
    CudaTarget("cuda:sm_86", 86, 99 * _KIB, 1536, 16, False, _CUDA_12,
               "A10", 72, 0.600e12, 125e12, 250e12, 31.2e12),
    CudaTarget("cuda:sm_89", 89, 99 * _KIB, 1536, 24, False, _CUDA_12,
               "L40S", 142, 0.864e12, 362e12, 733e12, 91.6e12),
    CudaTarget("cuda:sm_90", 90, 227 * _KIB, 2048, 32, True, _CUDA_12,
               "H100 SXM", 132, 3.35e12, 989e12, 1979e12, 67e12),
    CudaTarget("cuda:sm_100", 100, 227 * _KIB, 2048, 32, True, _CUDA_13,
               "B200", 148, 8.0e12, 2250e12, 4500e12, 75e12),
    CudaTarget("cuda:sm_120", 120, 99 * _KIB, 1536, 24, True, _CUDA_13,
               "RTX 5090", 170, 1.792e12, 209.5e12, 838e12, 104.8e12),
)  # fmt: skip


def find_cuda_target(name: str) -> CudaTarget:
    """The target of a name such as "cuda:sm_90". Raises UserError naming those that are known."""
    for target in CUDA_TARGETS:
        if target.name == name:
            return target
    known = ", ".join(t.name for t in CUDA_TARGETS)
    raise UserError(f"--target {name}: unknown GPU target (known: {known})")


def choose_cuda_target(available: list[str], capability: int) -> CudaTarget:
    """The best code of a plan for a device: its own capability, or the newest older one of the same generation that is
    not locked. Raises UserError naming both sides when there is none."""
    for target in reversed(CUDA_TARGETS):
        if target.name in available and _runs(target, capability):
            return target
    has = ", ".join(n for n in available if n.startswith("cuda:")) or "no GPU"
    fitting = [t.name for t in CUDA_TARGETS if _runs(t, capability)]
    advice = f"rebuild with llmc build --target {fitting[-1]}" if fitting else "llmc has no code for such a GPU yet"
    raise UserError(f"the plan has code for {has}, this GPU is sm_{capability}; {advice}")


def check_driver(target: CudaTarget, version: int) -> None:
    """Raises UserError for a driver, by cuDriverGetVersion's number, that does not take the target's code."""
    if version < target.oldest_driver:
        raise UserError(
            f"the NVIDIA driver is too old (CUDA {cuda_version(version)}): {target.name} needs "
            f"{_BRANCHES[target.oldest_driver]} or newer (CUDA {cuda_version(target.oldest_driver)}); update it"
        )


def cuda_version(number: int) -> str:
    """cuDriverGetVersion's number as people write it: 12040 is "12.4"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def runs_on(code: int, capability: int) -> bool:
    """Whether machine code for one compute capability, of a target, runs on a GPU of another."""
    return any(t.capability == code and _runs(t, capability) for t in CUDA_TARGETS)


def _runs(target: CudaTarget, capability: int) -> bool:
    same = target.capability == capability
    older = not target.locked and target.capability // 10 == capability // 10 and target.capability < capability
    return same or older
