"""Compiles Triton kernels ahead of time: in parallel processes, cached by all that can change a kernel, reproducible.

This process never imports Triton: it would read the environment (TRITON_INTERPRET in the tests) and take its time where
everything is cached.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from llmc.codegen import object_cache
from llmc.codegen.triton.resources import tensor_opcodes
from llmc.codegen.triton.team import Refusal, Team
from llmc.errors import UserError
from llmc.runtime.cuda.targets import CudaTarget
from llmc.runtime.threads import default_threads

log = logging.getLogger(__name__)

KERNEL_DIR = Path(__file__).resolve().parents[2] / "kernels" / "triton"
_OWN_SOURCES = ("worker.py", "resources.py")
_MAX_WORKERS = 8
_BATCH = 32  # kernels that are disassembled and cached together
_TMEM_COLUMNS = 512
_MAX_THREADS = 1024  # of a block


@dataclass(frozen=True)
class HipTarget:
    """An AMD GPU, experimental: kernels compile for it, nothing of llmc runs them.

    arch: LLVM's name. shared_limit: bytes of shared memory (LDS) that one block may use.
    """

    name: str
    arch: str
    shared_limit: int


HIP_TARGETS = (HipTarget("hip:gfx942", "gfx942", 64 * 1024),)


def find_hip_target(name: str) -> HipTarget:
    """The target of a name. Raises UserError naming those that are known."""
    for target in HIP_TARGETS:
        if target.name == name:
            return target
    raise UserError(
        f"--target {name}: unknown AMD target (known, experimental: {', '.join(t.name for t in HIP_TARGETS)})"
    )


@dataclass(frozen=True)
class KernelSpec:
    """A kernel to compile.

    op: label for people, which changes nothing. function: "linear.linear", a function of a module in
    llmc.kernels.triton. args: names and Triton types of the runtime arguments, in the function's order ("x", "*i8");
    all others are constants: numbers, strings, None for an absent pointer; HALF names a type ("bf16", "f16", "f32").
    """

    op: str
    function: str
    args: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class CompiledKernel:
    """Machine code and what it takes.

    name: its symbol. cubin: an ELF file (for AMD a hsaco). shared: bytes of dynamic shared memory. warps: per block.
    registers, spill_bytes (stores plus loads): per thread. tmem: columns of tensor memory. instructions: the
    tensor-core opcodes that it uses, sorted. For AMD registers and spill_bytes are 0 and instructions empty: not known.
    """

    name: str
    cubin: bytes
    shared: int
    warps: int
    registers: int
    spill_bytes: int
    tmem: int
    instructions: tuple[str, ...]


Target = CudaTarget | HipTarget
Result = CompiledKernel | str


def compile_kernels(specs: Sequence[KernelSpec], target: Target, advance: Callable[[int], None]) -> list[Result]:
    """Every kernel, in order; a str is the reason, in one line, why this one cannot be had for the target.

    advance: called with the number of specs that are done since. Refusals of the compiler are not cached. Raises
    UserError when Triton is missing or its process was killed, RuntimeError for faults of llmc.
    """
    keys = _keys(specs, target)
    count = Counter(keys)
    results: dict[str, Result] = {}
    for key in count:
        kernel = _load(key)
        if kernel is not None:
            results[key] = kernel
    advance(sum(count[key] for key in results))
    missing = {key: spec for key, spec in zip(keys, specs, strict=True) if key not in results}
    if missing:
        results |= _compile(missing, target, lambda key: advance(count[key]))
    return [within_limits(results[key], target) for key in keys]


def within_limits(result: Result, target: Target) -> Result:
    """A kernel, or the reason why a block of the target has no room for it."""
    if isinstance(result, str):
        return result
    if result.shared > target.shared_limit:
        return f"needs {result.shared} bytes of shared memory, a block of {target.name} has {target.shared_limit}"
    if (threads := result.warps * _gpu_target(target)["warp_size"]) > _MAX_THREADS:
        return f"has {threads} threads, a block of {target.name} has at most {_MAX_THREADS}"
    if result.tmem > _TMEM_COLUMNS:
        return f"needs {result.tmem} columns of tensor memory, {target.name} has {_TMEM_COLUMNS}"
    return result


# ---- keys and the cache


def _keys(specs: Sequence[KernelSpec], target: Target) -> list[str]:
    """For each spec the digest of all that can change its code."""
    if importlib.util.find_spec("triton") is None:
        raise UserError("building for a GPU needs the package triton: pip install 'llmc[build]'")
    common = {"triton": metadata.version("triton"), "sources": source_digest()}
    return [hashlib.sha256(_json(common | _job(spec, target))).hexdigest() for spec in specs]


def source_digest() -> str:
    """Digest of the kernels' sources, and of what asks Triton to compile them."""
    digest = hashlib.sha256()
    for path in [*sorted(KERNEL_DIR.glob("*.py")), *(Path(__file__).with_name(name) for name in _OWN_SOURCES)]:
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _gpu_target(target: Target) -> dict[str, Any]:
    """Arguments of Triton's GPUTarget."""
    if isinstance(target, HipTarget):
        return {"backend": "hip", "arch": target.arch, "warp_size": 64}
    return {"backend": "cuda", "arch": target.capability, "warp_size": 32}


def _job(spec: KernelSpec, target: Target) -> dict[str, Any]:
    """What a worker is asked for: see worker.py."""
    return {
        "function": spec.function, "args": spec.args, "constants": dict(spec.constants), "num_warps": spec.num_warps,
        "num_stages": spec.num_stages, "target": _gpu_target(target),
    }  # fmt: skip


def _load(key: str) -> CompiledKernel | None:
    entry = object_cache.load(key)
    if entry is None:
        return None
    header, _, cubin = entry.partition(b"\n")
    fields = json.loads(header)
    return CompiledKernel(**fields | {"cubin": cubin, "instructions": tuple(fields["instructions"])})


class _Store:
    """Caches kernels until the cache cannot be written, or a source was edited since the keys were made."""

    def __init__(self) -> None:
        self._sources = source_digest()
        self._usable = True

    def __call__(self, kernels: dict[str, CompiledKernel]) -> None:
        self._usable = self._usable and source_digest() == self._sources
        for key, kernel in kernels.items() if self._usable else ():
            fields = asdict(kernel)
            cubin = fields.pop("cubin")
            try:
                object_cache.store(key, _json(fields) + b"\n" + cubin)
            except OSError as error:
                log.warning("GPU kernels are not cached: %s", error)
                self._usable = False
                return


# ---- compiling


def _compile(specs: dict[str, KernelSpec], target: Target, done: Callable[[str], None]) -> dict[str, Result]:
    """Compiles in parallel; disassembles and caches in batches, so that a build that is stopped loses little."""
    results: dict[str, Result] = {}
    batch: dict[str, tuple[dict[str, Any], bytes]] = {}
    store = _Store()
    with Team() as team, ThreadPoolExecutor(min(default_threads(), _MAX_WORKERS)) as pool:
        futures = {
            pool.submit(team.compile, _job(spec, target), f"{spec.op} for {target.name}"): key
            for key, spec in specs.items()
        }
        try:
            for future in as_completed(futures):
                key, answer = futures[future], future.result()
                if isinstance(answer, Refusal):
                    results[key] = answer.reason
                else:
                    batch[key] = answer
                if batch and (len(batch) == _BATCH or len(results) + len(batch) == len(specs)):
                    kernels = _finish(batch, target)
                    store(kernels)
                    results |= kernels
                    batch = {}
                done(key)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            team.kill()
            raise
    return results


def _finish(batch: dict[str, tuple[dict[str, Any], bytes]], target: Target) -> dict[str, CompiledKernel]:
    cubins = [code for _, code in batch.values()]
    opcodes = [()] * len(cubins) if isinstance(target, HipTarget) else tensor_opcodes(cubins, target.capability)
    return {
        key: CompiledKernel(**fields, cubin=code, instructions=names)
        for (key, (fields, code)), names in zip(batch.items(), opcodes, strict=True)
    }
