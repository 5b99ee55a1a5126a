"""How many pages the KV pool gets. (What a GPU has left for it is in runtime/cuda/memory.py.)"""

from __future__ import annotations

from llmc.errors import UserError
from llmc.kv_page import PAGE_SIZE
from llmc.runtime.config import EngineConfig, LoadOptions
from llmc.runtime.memory import available_memory

_KV_SHARE = 0.3
"""Of the available memory, for the KV pool when the user does not say."""


def pages_asked_for(options: LoadOptions, config: EngineConfig, page_bytes: int) -> int | None:
    """Pages that --kv-cache-memory holds, at most what max_num_seqs full sequences need; None without the flag."""
    if options.kv_cache_memory is None:
        return None
    pages = options.kv_cache_memory // page_bytes
    if pages < 1:
        raise UserError(f"--kv-cache-memory {options.kv_cache_memory}: one page takes {page_bytes} bytes")
    return min(pages, -(-config.max_model_len // PAGE_SIZE) * config.max_num_seqs)


def pages_in_main_memory(options: LoadOptions, config: EngineConfig, page_bytes: int) -> int:
    """Pages of a pool in main memory: at most what max_num_seqs full sequences need, at least one full sequence
    by default."""
    asked = pages_asked_for(options, config, page_bytes)
    if asked is not None:
        return asked
    per_sequence = -(-config.max_model_len // PAGE_SIZE)
    share = int(available_memory() * _KV_SHARE) // page_bytes
    return max(per_sequence, min(per_sequence * config.max_num_seqs, share))
