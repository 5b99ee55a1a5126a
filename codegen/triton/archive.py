"""From launches to the code segment of one GPU target: chooses, compiles and checks configurations, writes the archive.

docs/gpu.md describes the archive. The same program and target give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llmc.codegen.triton.compile import CompiledKernel, HipTarget, KernelSpec, compile_kernels
from llmc.codegen.triton.configs import Bucket, Config, buckets
from llmc.codegen.triton.launch import Arg, Dim, GpuProgram, Launch
from llmc.codegen.triton.signature import parameters
from llmc.errors import UserError
from llmc.runtime.cuda.archive_format import aligned, pack_archive
from llmc.runtime.cuda.targets import CudaTarget

GpuTarget = CudaTarget | HipTarget
_TYPES = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}
"""Triton's names of pointer types -> the compiler's names of types in constants."""


Compiler = Callable[[Sequence[KernelSpec], GpuTarget, Callable[[int], None]], list[CompiledKernel | str]]


def emit_archive(
    program: GpuProgram,
    target: GpuTarget,
    advance: Callable[[int], None] = lambda done: None,
    compiler: Compiler = compile_kernels,
) -> bytes:
    """advance is told of every kernel that is done; count_kernels says how many there are.

    Raises UserError for a kernel that no configuration brings within the target's limits, naming op, shape and limit.
    """
    return _Archive(program, target).build(advance, compiler)


def count_kernels(program: GpuProgram, target: GpuTarget) -> int:
    """How many kernels `emit_archive` compiles."""
    return len(_Archive(program, target).specs)


class _Archive:
    def __init__(self, program: GpuProgram, target: GpuTarget) -> None:
        self.program, self.target = program, target
        self.capability = target.capability if isinstance(target, CudaTarget) else 0
        self.launches = [launch for weight in program.weights for launch in weight.repack] + program.launches
        self.specs: dict[KernelSpec, None] = {}
        for launch in self.launches:
            for bucket in buckets(launch, self.capability):
                for config in bucket.configs:
                    self.specs[kernel_spec(launch, config)] = None
        self.compiled: dict[KernelSpec, CompiledKernel | str] = {}
        self.kernels: list[dict[str, Any]] = []
        self.index: dict[tuple[KernelSpec, str], int] = {}
        self.blob = bytearray()
        self.placed: dict[bytes, int] = {}
        self.buffers = {b.name: b for b in program.buffers}

    def build(self, advance: Callable[[int], None], compiler: Compiler) -> bytes:
        specs = list(self.specs)
        self.compiled = dict(zip(specs, compiler(specs, self.target, advance), strict=True))
        program = self.program
        calls = [self.call(launch) for launch in program.launches]
        weights = [
            {"source": w.source, "source_size": w.source_size, "device": w.device,
             "calls": [self.call(launch) for launch in w.repack]}
            for w in program.weights
        ]  # fmt: skip
        header = {
            "vocab_size": program.vocab_size,
            "half": program.half,
            "arena": program.arena,
            "partials": program.partials,
            "tile_tokens": program.tile_tokens,
            "kv": [vars(layer) for layer in program.kv],
            "weights": {"bytes": program.weight_bytes, "items": weights},
            "staging": max((w.source_size for w in program.weights if w.repack), default=0),
            "kernels": self.kernels,
            "calls": calls,
        }
        return pack_archive(header, bytes(self.blob))

    def call(self, launch: Launch) -> dict[str, Any]:
        variants = [
            {"max": bucket.limit, "kernels": self.usable(launch, bucket)} for bucket in buckets(launch, self.capability)
        ]
        return {
            "op": launch.op, "path": launch.path, "rows": launch.cost.rows, "when": launch.when, "variants": variants,
            "args": [self.resolve(arg) for _, _, arg in launch.args], "cost": launch.cost.fields(),
        }  # fmt: skip

    def usable(self, launch: Launch, bucket: Bucket) -> list[int]:
        """Indices of the kernels that a launch may use, best first: those without spills, in the table's order."""
        good: list[tuple[int, KernelSpec, CompiledKernel, Config]] = []
        reasons = []
        for config in bucket.configs:
            spec = kernel_spec(launch, config)
            result = self.compiled[spec]
            if isinstance(result, str):
                reasons.append(result)
            else:
                good.append((result.spill_bytes, spec, result, config))
        if not good:
            raise UserError(
                f"{launch.op} at {launch.path}: no configuration fits {self.target.name} ({'; '.join(reasons)}); "
                "leave out this target"
            )
        clean = [g for g in good if not g[0]] or [min(good, key=lambda g: g[0])]
        return [self.add(launch, spec, result, config, bucket) for _, spec, result, config in clean]

    def add(self, launch: Launch, spec: KernelSpec, result: CompiledKernel, config: Config, bucket: Bucket) -> int:
        key = (spec, f"{launch.op}@{bucket.limit}")
        if key not in self.index:
            offset = self.place(result.cubin)
            grid = [_dim(dim, config) for dim in launch.grid]
            self.kernels.append({
                "name": result.name, "op": launch.op, "offset": offset, "size": len(result.cubin),
                "warps": result.warps, "shared": result.shared, "registers": result.registers,
                "spill_bytes": result.spill_bytes, "grid": grid + [1] * (3 - len(grid)),
                "args": [pointer for _, pointer, _ in launch.args], "constants": dict(config.constants),
                "max_tokens": bucket.limit, "instructions": list(result.instructions),
            })  # fmt: skip
            self.index[key] = len(self.kernels) - 1
        return self.index[key]

    def place(self, cubin: bytes) -> int:
        """The offset of a cubin; equal ones (the same kernel in several buckets) are stored once."""
        if cubin not in self.placed:
            self.placed[cubin] = len(self.blob)
            self.blob += cubin.ljust(aligned(len(cubin)), b"\0")
        return self.placed[cubin]

    def resolve(self, arg: Arg) -> list[Any]:
        if arg[0] != "buffer":
            return list(arg)
        _, name, offset = arg
        buffer = self.buffers[str(name)]
        return [buffer.domain, self.program.offsets[buffer.name] + int(offset)]


def kernel_spec(launch: Launch, config: Config) -> KernelSpec:
    """The kernel that a launch needs in a configuration; parameters that it has no value for are absent pointers."""
    names = parameters(launch.function)
    values = {**launch.constants, **config.constants}
    if "HALF" in values:
        values["HALF"] = _TYPES[values["HALF"]]
    pointers = {name for name, _, _ in launch.args}
    constants = tuple((name, values.get(name)) for name in names if name not in pointers)
    args = tuple((name, pointer) for name, pointer, _ in launch.args)
    op = launch.function.split(".")[1]
    return KernelSpec(op, launch.function, args, constants, config.num_warps, config.num_stages)


def _dim(dim: Dim, config: Config) -> Any:
    """A grid dimension with the configuration's tile in it; "=N" is a number."""
    if isinstance(dim, int):
        return dim
    symbol, per = dim
    per = config.constants[per] if isinstance(per, str) else per
    return -(-int(symbol[1:]) // per) if symbol.startswith("=") else [symbol, per]
