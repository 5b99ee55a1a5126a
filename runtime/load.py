"""From a verified plan to a running engine: the machine's best code, the KV pool's size, tokenizer and template."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from llmc.errors import UserError
from llmc.runtime.chat import ChatTemplate
from llmc.runtime.config import EngineConfig
from llmc.runtime.detokenizer import TextCodec
from llmc.runtime.engine import Engine
from llmc.runtime.executor import PAGE_SIZE, CpuExecutor, ExecutorConfig
from llmc.runtime.plan import Plan, manifest_fields
from llmc.runtime.server.model import SamplingDefaults, ServedModel
from llmc.runtime.targets import choose_target
from llmc.runtime.threads import default_threads

log = logging.getLogger(__name__)
_KV_SHARE = 0.3
"""Of the available memory, for the KV pool when the user does not say."""


@dataclass(frozen=True)
class LoadOptions:
    """The flags of `llmc serve` that shape the engine; None is the default that its help describes."""

    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_queue: int = 256
    kv_cache_memory: int | None = None
    threads: int | None = None


def load_engine(plan: Plan, codec: TextCodec | None, options: LoadOptions) -> Engine:
    """An engine over an open, verified plan; not yet started. Raises UserError for limits that cannot be met."""
    with manifest_fields(plan.path):
        max_model_len = int(plan.manifest["model"]["max_model_len"])
        page_bytes = int(plan.manifest["model"]["kv_bytes_per_token"]) * PAGE_SIZE
        target = choose_target(list(plan.manifest["targets"]))
        eos = frozenset((plan.manifest["tokenizer"] or {}).get("eos_token_ids", ()))
        code, weights = plan.segment(f"code/{target.name}"), plan.segment("weights")
    if options.max_model_len is not None:
        if not 1 <= options.max_model_len <= max_model_len:
            raise UserError(
                f"--max-model-len {options.max_model_len}: the plan was built for 1 to {max_model_len} tokens"
            )
        max_model_len = options.max_model_len
    threads = options.threads if options.threads is not None else default_threads()
    if not 1 <= threads <= 256:
        raise UserError(f"--threads {threads}: must be between 1 and 256")
    pages = _num_pages(options, max_model_len, page_bytes)
    rows = min(options.max_num_seqs, options.max_num_batched_tokens)
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_queue=options.max_queue,
        eos_token_ids=eos,
    )
    executor = CpuExecutor(code, weights, ExecutorConfig(options.max_num_batched_tokens, rows, pages, threads))
    return Engine(executor, config, codec)


def _num_pages(options: LoadOptions, max_model_len: int, page_bytes: int) -> int:
    """Pages of the pool: at most what max_num_seqs full sequences need, at least one full sequence by default."""
    per_sequence = -(-max_model_len // PAGE_SIZE)
    wanted = per_sequence * options.max_num_seqs
    if options.kv_cache_memory is not None:
        pages = options.kv_cache_memory // page_bytes
        if pages < 1:
            raise UserError(f"--kv-cache-memory {options.kv_cache_memory}: one page takes {page_bytes} bytes")
        return min(pages, wanted)
    available = _available_memory()
    return max(per_sequence, min(wanted, int(available * _KV_SHARE) // page_bytes))


def _available_memory() -> int:
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
