"""From a verified plan to a running engine: the machine's best code, the KV pool's size, tokenizer and template."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmc.errors import UserError
from llmc.kv_page import PAGE_SIZE
from llmc.runtime.batch import Executor
from llmc.runtime.chat import ChatTemplate
from llmc.runtime.config import EngineConfig
from llmc.runtime.cpu.executor import CpuExecutor, ExecutorConfig
from llmc.runtime.cpu.targets import choose_target
from llmc.runtime.cuda.targets import CudaTarget, choose_cuda_target
from llmc.runtime.detokenizer import TextCodec
from llmc.runtime.engine import Engine
from llmc.runtime.plan import Plan, manifest_fields
from llmc.runtime.server.model import SamplingDefaults, ServedModel
from llmc.runtime.threads import default_threads

if TYPE_CHECKING:  # loaded for a GPU alone
    from llmc.runtime.cuda.driver import CudaDevice
    from llmc.runtime.cuda.executor import CudaExecutor

log = logging.getLogger(__name__)
_KV_SHARE = 0.3
"""Of the available memory, for the KV pool when the user does not say."""
_CPU_TOKENS, _GPU_TOKENS = 512, 2048
"""Token budget of a step when the user does not say."""


@dataclass(frozen=True)
class LoadOptions:
    """The flags of `llmc serve` that shape the engine; None is the default that its help describes."""

    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_queue: int = 256
    kv_cache_memory: int | None = None
    threads: int | None = None
    device: str = "auto"
    gpu_memory_utilization: float = 0.9


def load_engine(plan: Plan, codec: TextCodec | None, options: LoadOptions) -> Engine:
    """An engine over an open, verified plan; not yet started. Raises UserError for limits that cannot be met."""
    with manifest_fields(plan.path):
        max_model_len = int(plan.manifest["model"]["max_model_len"])
        eos = frozenset((plan.manifest["tokenizer"] or {}).get("eos_token_ids", ()))
    if options.max_model_len is not None:
        if not 1 <= options.max_model_len <= max_model_len:
            raise UserError(
                f"--max-model-len {options.max_model_len}: the plan was built for 1 to {max_model_len} tokens"
            )
        max_model_len = options.max_model_len
    gpu = choose_gpu(plan, options.device)
    budget = options.max_num_batched_tokens
    if budget is None:
        budget = _CPU_TOKENS if gpu is None else _GPU_TOKENS
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=budget,
        max_queue=options.max_queue,
        eos_token_ids=eos,
    )
    return Engine(_executor(plan, options, config, gpu), config, codec)


def _executor(
    plan: Plan, options: LoadOptions, config: EngineConfig, gpu: tuple[CudaDevice, CudaTarget] | None
) -> Executor:
    if gpu is None:
        return _cpu_executor(plan, options, config)
    return _cuda_executor(plan, options, config, gpu)


def _cpu_executor(plan: Plan, options: LoadOptions, config: EngineConfig) -> CpuExecutor:
    with manifest_fields(plan.path):
        page_bytes = int(plan.manifest["model"]["kv_bytes_per_token"]) * PAGE_SIZE
        target = choose_target(list(plan.manifest["targets"]))
        code, weights = plan.segment(f"code/{target.name}"), plan.segment("weights")
    threads = options.threads if options.threads is not None else default_threads()
    if not 1 <= threads <= 256:
        raise UserError(f"--threads {threads}: must be between 1 and 256")
    pages = _num_pages(options, config.max_model_len, page_bytes)
    rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    return CpuExecutor(code, weights, ExecutorConfig(config.max_num_batched_tokens, rows, pages, threads))


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
            return opened, choose_cuda_target(targets, opened.capability)
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


def open_cuda_executor(plan: Plan, options: LoadOptions) -> tuple[CudaExecutor, CudaTarget]:
    """An executor on the GPU alone, without an engine, and the target whose code it runs; for `llmc tune`."""
    gpu = choose_gpu(plan, "cuda")
    assert gpu is not None
    with manifest_fields(plan.path):
        length = int(plan.manifest["model"]["max_model_len"])
    config = EngineConfig(
        max_model_len=min(length, _GPU_TOKENS), max_num_seqs=options.max_num_seqs, max_num_batched_tokens=_GPU_TOKENS
    )
    return _cuda_executor(plan, options, config, gpu), gpu[1]


def _cuda_executor(
    plan: Plan, options: LoadOptions, config: EngineConfig, gpu: tuple[CudaDevice, CudaTarget]
) -> CudaExecutor:
    from llmc.runtime.cuda.executor import CudaConfig, CudaExecutor

    device, target = gpu
    with manifest_fields(plan.path):
        page_bytes = int(plan.manifest["model"]["kv_bytes_per_token"]) * PAGE_SIZE
        code, weights = plan.segment(f"code/{target.name}"), plan.segment("weights")
        choices = dict(plan.manifest.get("tuning", {}).get(target.name, {}))
    pages = _pages_asked_for(options, config.max_model_len, page_bytes)
    rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    cuda = CudaConfig(
        max_num_tokens=config.max_num_batched_tokens, max_num_rows=rows, max_model_len=config.max_model_len,
        num_pages=pages, memory_utilization=options.gpu_memory_utilization,
    )  # fmt: skip
    return CudaExecutor(code, weights, cuda, device, choices)


def _num_pages(options: LoadOptions, max_model_len: int, page_bytes: int) -> int:
    """Pages of the CPU's pool: at most what max_num_seqs full sequences need, at least one full sequence by default."""
    asked = _pages_asked_for(options, max_model_len, page_bytes)
    if asked is not None:
        return asked
    per_sequence = -(-max_model_len // PAGE_SIZE)
    share = int(available_memory() * _KV_SHARE) // page_bytes
    return max(per_sequence, min(per_sequence * options.max_num_seqs, share))


def _pages_asked_for(options: LoadOptions, max_model_len: int, page_bytes: int) -> int | None:
    """Pages that --kv-cache-memory holds, at most what max_num_seqs full sequences need; None without the flag."""
    if options.kv_cache_memory is None:
        return None
    pages = options.kv_cache_memory // page_bytes
    if pages < 1:
        raise UserError(f"--kv-cache-memory {options.kv_cache_memory}: one page takes {page_bytes} bytes")
    return min(pages, -(-max_model_len // PAGE_SIZE) * options.max_num_seqs)


def available_memory() -> int:
    """Bytes of main memory that processes can still take."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError) as error:
        log.warning("/proc/meminfo does not say how much memory is available: %s", error)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def load_codec(plan: Plan) -> TextCodec | None:
    """The plan's tokenizer, or None when it was built without one."""
    return TextCodec(bytes(plan.segment("tokenizer.json"))) if "tokenizer.json" in plan.segments else None


def served_model(plan: Plan, name: str | None) -> ServedModel:
    """What the server says it serves. Raises UserError for a plan without a tokenizer."""
    codec = load_codec(plan)
    if codec is None:
        raise UserError(f"{plan.path}: the plan has no tokenizer, so it cannot be served; rebuild it with one")
    template = plan.text("chat_template.jinja")
    with manifest_fields(plan.path):
        tokens = dict(plan.manifest["tokenizer"]["special_tokens"])
        checkpoint = str(plan.manifest["provenance"]["checkpoint"]["name"])
        defaults = SamplingDefaults.from_generation_config(plan.manifest["generation_config"])
    chat_template = ChatTemplate(template, tokens) if template is not None else None
    return ServedModel(name or checkpoint, codec, chat_template, defaults)
