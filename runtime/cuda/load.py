"""From a plan to an executor on a GPU: which GPU, with which of the plan's code, if any.

What talks to the driver is imported for a GPU alone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from llmc.errors import UserError
from llmc.kv_page import PAGE_SIZE
from llmc.runtime.config import EngineConfig, LoadOptions
from llmc.runtime.cuda.targets import CudaTarget, check_driver, choose_cuda_target
from llmc.runtime.plan import Plan, manifest_fields
from llmc.runtime.pool_size import pages_asked_for

if TYPE_CHECKING:
    from llmc.runtime.cuda.driver import CudaDevice
    from llmc.runtime.cuda.executor import CudaExecutor

log = logging.getLogger(__name__)

DEFAULT_TOKENS = 2048
"""Token budget of a step when the user does not say."""
_MOST_SEQS, _FEWEST_SEQS = 256, 16
"""Sequences of a step when the user does not say: as many of these as `_ROWS_SHARE` has room for."""
_ROWS_SHARE = 0.1
"""Of the memory that weights and activations leave, for what each sequence of a step takes besides its pages."""


def choose_gpu(plan: Plan, device: str) -> tuple[CudaDevice, CudaTarget] | None:
    """The GPU to run on and the plan's code for it; None for the CPU. device: "auto", "cpu" or "cuda".

    "auto" takes a GPU that the plan has code for, and else the CPU if the plan has code for one, saying why in the log.
    Raises UserError when what was asked for cannot be had.
    """
    with manifest_fields(plan.path):
        targets = list(plan.manifest["targets"])
    has_cuda = any(t.startswith("cuda:") for t in targets)
    if device == "cpu" or (device == "auto" and not has_cuda):
        return None
    if not has_cuda:
        raise UserError(
            f"--device cuda: the plan has code for {', '.join(targets)} only; rebuild it with --target cuda:sm_90"
        )
    try:
        from llmc.runtime.cuda.driver import open_device

        opened = open_device()
        try:
            target = choose_cuda_target(targets, opened.capability)
            check_driver(target, opened.driver_version)
            return opened, target
        except UserError:
            opened.close()
            raise
    except UserError as error:
        if device == "cuda":
            raise UserError(f"--device cuda: {error}") from error
        if not any(t.startswith("cpu:") for t in targets):
            raise UserError(f"{error}; the plan has code for {', '.join(targets)} only") from error
        log.info("runs on the CPU: %s", error)
        return None


def default_seqs(plan: Plan, options: LoadOptions, budget: int, gpu: tuple[CudaDevice, CudaTarget]) -> int:
    """Sequences of a step when the user does not say: a power of two, so many that their logits leave most of the
    memory to the KV pool. budget: tokens of a step."""
    from llmc.runtime.cuda.memory import row_bytes

    free, total = gpu[0].memory_info()
    with manifest_fields(plan.path):
        memory = plan.manifest["memory"]["gpu"]
        fixed = int(memory["weight_bytes"]) + int(memory["arena_bytes_per_token"]) * budget
        per_row = row_bytes(int(memory["arena_bytes_per_row"]), int(plan.manifest["model"]["vocab_size"]))
    left = total * options.gpu_memory_utilization - (total - free) - fixed
    count = _MOST_SEQS
    while count > _FEWEST_SEQS and count * per_row > _ROWS_SHARE * left:
        count //= 2
    return count


def load_cuda_executor(
    plan: Plan, options: LoadOptions, config: EngineConfig, gpu: tuple[CudaDevice, CudaTarget]
) -> CudaExecutor:
    """gpu: as `choose_gpu` found it. Graphs are not captured yet. Raises UserError for limits that cannot be met."""
    from llmc.runtime.cuda.executor import CudaConfig, CudaExecutor

    device, target = gpu
    with manifest_fields(plan.path):
        page_bytes = int(plan.manifest["model"]["kv_bytes_per_token"]) * PAGE_SIZE
        code, weights = plan.segment(f"code/{target.name}"), plan.segment("weights")
        choices = dict(plan.manifest.get("tuning", {}).get(target.name, {}))
    pages = pages_asked_for(options, config, page_bytes)
    rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    cuda = CudaConfig(
        max_num_tokens=config.max_num_batched_tokens, max_num_seqs=rows, max_num_rows=rows,
        max_model_len=config.max_model_len, num_pages=pages, memory_utilization=options.gpu_memory_utilization,
    )  # fmt: skip
    return CudaExecutor(code, weights, cuda, device, choices)


def open_cuda_executor(plan: Plan, options: LoadOptions) -> tuple[CudaExecutor, CudaTarget]:
    """An executor on the GPU alone, without an engine, and the target whose code it runs; for `llmc tune`."""
    gpu = choose_gpu(plan, "cuda")
    assert gpu is not None
    with manifest_fields(plan.path):
        length = int(plan.manifest["model"]["max_model_len"])
    seqs = options.max_num_seqs
    config = EngineConfig(
        max_model_len=min(length, DEFAULT_TOKENS),
        max_num_seqs=default_seqs(plan, options, DEFAULT_TOKENS, gpu) if seqs is None else seqs,
        max_num_batched_tokens=DEFAULT_TOKENS,
    )
    return load_cuda_executor(plan, options, config, gpu), gpu[1]
