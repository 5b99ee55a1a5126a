"""Every kernel of four models, in the shapes of real checkpoints, compiled for every capability: within the limits, no
spills, and on the tensor cores, as the disassembly says. No GPU is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gpu_models
import pytest

from llmc.codegen.triton.archive import emit_archive
from llmc.codegen.triton.compile import HIP_TARGETS, CompiledKernel, KernelSpec, within_limits
from llmc.errors import UserError
from llmc.runtime.cuda.archive_format import archive_fields, read_header, unpack_archive
from llmc.runtime.cuda.cubin import check_cubin
from llmc.runtime.cuda.occupancy import resident_blocks
from llmc.runtime.cuda.targets import CUDA_TARGETS, CudaTarget, find_cuda_target

ASYNC = {90: {"HGMMA", "IGMMA"}, 100: {"UTCHMMA"}}
"""Instructions of the tensor cores that take 64 rows at a time: wgmma, tcgen05. Elsewhere: mma."""
MMA = {"HMMA", "IMMA"}
REGISTERS = 255
FLOORS = {16: (3, 6), 64: (2, 8), None: (1, 8)}
"""Of a product by its bucket: blocks and warps that a multiprocessor holds at least, to hide the latency of memory.
Other kernels have no bucket."""
WIDE_FLOOR = (1, 4)
"""Of products of 16-bit weights: their pipelines of four stages and more, of 64 KiB, keep one block's memory busy."""


def check_archive(segment: memoryview, target: CudaTarget) -> None:
    with archive_fields():
        header, binaries = unpack_archive(segment)
    for kernel in header["kernels"]:
        check_cubin(binaries[kernel["offset"] :][: kernel["size"]], kernel["name"], target.capability)
        label = f"{target.name}: {kernel['op']}@{kernel['max_tokens']} {kernel['constants']}"
        assert kernel["shared"] <= target.shared_limit, label
        assert kernel["spill_bytes"] == 0, label
        assert 0 < kernel["registers"] <= REGISTERS and kernel["warps"] <= 32, label
        blocks = resident_blocks(target, kernel["warps"], kernel["registers"], kernel["shared"])
        wide = kernel["op"].startswith("linear bf16")
        least, warps = WIDE_FLOOR if wide else FLOORS[kernel["max_tokens"]]
        assert blocks >= least and blocks * kernel["warps"] >= warps, f"{label}: {blocks} blocks"
    for call in header["calls"]:
        for variant in call["variants"]:
            _check_instructions(call, variant, header["kernels"], target)


def _check_instructions(call: dict[str, Any], variant: dict[str, Any], kernels: list[Any], target: CudaTarget) -> None:
    """The large buckets use the capability's own instructions; all alternatives of a floating product one family."""
    if not call["op"].startswith(("linear", "attention prefill", "attention decode")):
        return
    own = ASYNC.get(target.capability, MMA)
    families = [set(kernels[i]["instructions"]) for i in variant["kernels"]]
    label = f"{target.name}: {call['op']}@{variant['max']}: {families}"
    assert all(families), label
    integer = call["op"].startswith(("linear w8 ", "linear w4 "))
    if variant["max"] is None:
        assert families[0] <= own, label
    if not integer:
        assert all(f == families[0] for f in families) and families[0] <= own, label


@pytest.mark.slow
@pytest.mark.parametrize("target", CUDA_TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize("model", sorted(gpu_models.SHAPES))
def test_every_kernel_compiles_within_the_limits(model: str, target: CudaTarget) -> None:
    check_archive(memoryview(emit_archive(gpu_models.program(model, "int8"), target)), target)


@pytest.mark.slow
@pytest.mark.parametrize("target", CUDA_TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize("precision", ["bf16", "int4", "int4 weight-only", "int8, int8 KV"])
def test_every_precision_compiles_within_the_limits(precision: str, target: CudaTarget) -> None:
    check_archive(memoryview(emit_archive(gpu_models.program("Llama-3.2-1B", precision), target)), target)


@pytest.mark.slow
def test_an_amd_target_compiles() -> None:
    header = read_header(memoryview(emit_archive(gpu_models.program("SmolLM2-135M", "int8"), HIP_TARGETS[0])))
    assert header["kernels"] and all(k["shared"] <= HIP_TARGETS[0].shared_limit for k in header["kernels"])


def test_a_kernel_that_fits_nowhere_is_named_with_its_shape_and_limit() -> None:
    def compiler(specs: Sequence[KernelSpec], target: Any, advance: Any) -> list[CompiledKernel | str]:
        """Every product takes as much shared memory as its tile; one tile does not compile at all."""
        made: list[CompiledKernel | str] = []
        for spec in specs:
            tile = dict(spec.constants)
            shared = 200_000 if spec.function == "linear.linear" and tile["BT"] > 16 else 1024
            wide = tile.get("BN") == 128
            kernel = CompiledKernel("k", b"code", shared, 4, 32, 0, 0, ())
            made.append("out of registers" if wide else within_limits(kernel, target))
        return made

    with pytest.raises(UserError) as refused:
        emit_archive(gpu_models.program("SmolLM2-135M", "int8"), find_cuda_target("cuda:sm_86"), compiler=compiler)
    for words in ("linear w8 960x576 at model.layers.0", "no configuration fits cuda:sm_86", "200000 bytes of shared",
                  "a block of cuda:sm_86 has 101376", "out of registers"):  # fmt: skip
        assert words in str(refused.value), words
