"""From a plan to an executor on the CPU: the best code that this machine runs, threads, the KV pool's size."""

from __future__ import annotations

from llmc.errors import UserError
from llmc.kv_page import PAGE_SIZE
from llmc.runtime.config import EngineConfig, LoadOptions
from llmc.runtime.cpu.executor import CpuExecutor, ExecutorConfig
from llmc.runtime.cpu.targets import choose_target
from llmc.runtime.plan import Plan, manifest_fields
from llmc.runtime.pool_size import pages_in_main_memory
from llmc.runtime.threads import default_threads

DEFAULT_TOKENS, DEFAULT_SEQS = 512, 64
"""Tokens and sequences of a step when the user does not say."""


def load_cpu_executor(plan: Plan, options: LoadOptions, config: EngineConfig) -> CpuExecutor:
    """Raises UserError when no code of the plan runs here, or for limits that cannot be met."""
    with manifest_fields(plan.path):
        page_bytes = int(plan.manifest["model"]["kv_bytes_per_token"]) * PAGE_SIZE
        target = choose_target(list(plan.manifest["targets"]))
        code, weights = plan.segment(f"code/{target.name}"), plan.segment("weights")
    threads = options.threads if options.threads is not None else default_threads()
    if not 1 <= threads <= 256:
        raise UserError(f"--threads {threads}: must be between 1 and 256")
    pages = pages_in_main_memory(options, config, page_bytes)
    rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    return CpuExecutor(code, weights, ExecutorConfig(config.max_num_batched_tokens, rows, pages, threads), target.name)
