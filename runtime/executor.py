"""The CPU executor: loads a plan's machine code and runs steps over it. The GIL is released during a step.

The shared object goes from the plan into memory (memfd) and is opened from there; weights are used where the plan
is mapped. Structures mirror kernels/cpu/abi.h.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.errors import UserError
from llmc.runtime.batch import Batch, Float32, Int32, RowSampling, StepOutput
from llmc.runtime.plan import ABI_VERSION

PAGE_SIZE = 16
_ROW_SAMPLING = np.dtype(
    [
        ("temperature", "<f4"), ("top_p", "<f4"), ("min_p", "<f4"), ("repetition_penalty", "<f4"),
        ("presence_penalty", "<f4"), ("frequency_penalty", "<f4"), ("top_k", "<i4"), ("num_penalty", "<i4"),
        ("num_bias", "<i4"), ("penalty_offset", "<i4"), ("bias_offset", "<i4"), ("reserved", "<i4"),
        ("seed", "<u8"), ("reserved2", "<u8"),
    ]
)  # fmt: skip
_POINTERS = ("tokens", "positions", "query_start", "block_tables", "rows", "sampling", "penalty_tokens",
             "penalty_counts", "bias_tokens", "bias_values", "out_tokens", "out_logprobs", "logits")  # fmt: skip


class _Batch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("num_tokens", "num_seqs", "num_rows", "block_table_stride")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    ]  # fmt: skip


@dataclass(frozen=True)
class ExecutorConfig:
    """max_num_tokens: T of the largest step. max_num_rows: R of it. num_pages: of the KV pool. threads: of the pool."""

    max_num_tokens: int
    max_num_rows: int
    num_pages: int
    threads: int


def load_code(code: bytes | memoryview) -> ctypes.CDLL:
    """Opens a shared object that lies in memory. Raises UserError when the loader refuses it."""
    fd = os.memfd_create("llmc-engine", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(code)
        library = ctypes.CDLL(f"/proc/self/fd/{fd}")
    except OSError as error:
        os.close(fd)
        raise UserError(f"the plan's machine code cannot be loaded here: {error}") from error
    # The descriptor stays open as long as the library, for the life of the process: the loader knows libraries by
    # name, and a second plan under a reused number would get the code of the first.
    return _declare(library)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    i32, i64, ptr = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    signatures = {
        "llmc_abi_version": (i32, []),
        "llmc_vocab_size": (i32, []),
        "llmc_page_bytes": (i64, []),
        "llmc_arena_bytes": (i64, [i32, i32, i32]),
        "llmc_create": (ptr, [ptr, ptr, i64, ptr, i32, i32, i32, ctypes.POINTER(i32)]),
        "llmc_step": (i32, [ptr, ctypes.POINTER(_Batch)]),
        "llmc_destroy": (None, [ptr]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if library.llmc_abi_version() != ABI_VERSION:
        raise UserError("the plan's machine code is of another ABI version; rebuild the plan")
    return library


class CpuExecutor:
    """Implements `Executor` (runtime/batch.py) over one shared object."""

    page_size = PAGE_SIZE

    def __init__(self, code: bytes | memoryview, weights: memoryview, config: ExecutorConfig) -> None:
        """weights: the weights segment, page-aligned, kept alive by the executor. Raises UserError when memory or
        threads cannot be had."""
        self._library = load_code(code)
        self._weights = np.frombuffer(weights, np.uint8)
        self.vocab_size: int = self._library.llmc_vocab_size()
        self.num_pages, self.threads = config.num_pages, config.threads
        self.max_num_tokens, self.max_num_rows = config.max_num_tokens, config.max_num_rows
        self.page_bytes: int = self._library.llmc_page_bytes()
        self.arena_bytes: int = self._library.llmc_arena_bytes(
            config.max_num_tokens, config.max_num_rows, config.threads
        )
        self._kv = _anonymous(self.page_bytes * config.num_pages, "the KV pool (--kv-cache-memory)")
        self._arena = _anonymous(self.arena_bytes, "activations (--max-num-batched-tokens)")
        error = ctypes.c_int32(0)
        self._engine: int | None = self._library.llmc_create(
            self._weights.ctypes.data, self._kv.ctypes.data, config.num_pages, self._arena.ctypes.data,
            config.max_num_tokens, config.max_num_rows, config.threads, ctypes.byref(error),
        )  # fmt: skip
        if self._engine is None:
            raise UserError(f"cannot start {config.threads} threads: {os.strerror(error.value)}; lower --threads")

    def step(self, batch: Batch) -> StepOutput:
        """Runs a batch. Raises ValueError for one that is inconsistent: nothing of it reaches the machine code."""
        if self._engine is None:
            raise RuntimeError("the executor is closed")
        self._check(batch)
        rows = len(batch.rows)
        sampling, flat = _pack_sampling(batch.sampling)
        out_tokens, out_logprobs = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
        logits = np.empty((rows, self.vocab_size), np.float32) if batch.want_logits else None
        arrays: dict[str, npt.NDArray[np.generic] | None] = {
            "tokens": batch.tokens, "positions": batch.positions, "query_start": batch.query_start,
            "block_tables": batch.block_tables, "rows": batch.rows, "sampling": sampling, **flat,
            "out_tokens": out_tokens, "out_logprobs": out_logprobs, "logits": logits,
        }  # fmt: skip
        pointers = {name: a.ctypes.data if a is not None else None for name, a in arrays.items()}
        view = _Batch(len(batch.tokens), len(batch.query_start) - 1, rows, batch.block_tables.shape[1], **pointers)
        if self._library.llmc_step(self._engine, ctypes.byref(view)):
            raise ValueError("the batch is larger than the engine's arena")
        return StepOutput(out_tokens, out_logprobs, logits)

    def _check(self, batch: Batch) -> None:
        """The machine code trusts its batch, so every index is checked here."""
        tokens, rows, starts = batch.tokens, batch.rows, batch.query_start
        arrays = (tokens, batch.positions, starts, batch.block_tables, rows)
        if any(a.dtype != np.int32 or not a.flags.c_contiguous for a in arrays):
            raise ValueError("batch arrays must be contiguous int32")
        if batch.block_tables.ndim != 2 or any(a.ndim != 1 for a in arrays if a is not batch.block_tables):
            raise ValueError("block_tables must have two dimensions, the other arrays one")
        count, seqs = len(tokens), len(starts) - 1
        if not (0 < count <= self.max_num_tokens and 0 <= len(rows) <= self.max_num_rows):
            raise ValueError(f"a batch of {count} tokens and {len(rows)} rows does not fit the engine")
        if len(batch.positions) != count or batch.block_tables.shape[0] != seqs or len(batch.sampling) != len(rows):
            raise ValueError("batch arrays differ in length")
        if starts[0] != 0 or starts[-1] != count or (starts[1:] <= starts[:-1]).any():
            raise ValueError("query_start does not divide the tokens")
        if len(rows) and (rows.min() < 0 or rows.max() >= count):
            raise ValueError("a row to sample is no token of the batch")
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise ValueError("a token id is outside the vocabulary")
        self._check_pages(batch)

    def _check_pages(self, batch: Batch) -> None:
        tables, starts, positions = batch.block_tables, batch.query_start, batch.positions
        if positions.min() < 0 or int(positions.max()) // PAGE_SIZE >= tables.shape[1]:
            raise ValueError("a position lies outside its block table")
        steps = np.diff(positions)
        steps[starts[1:-1] - 1] = 1  # from one sequence to the next
        if (steps != 1).any():
            raise ValueError("positions of a sequence are not consecutive")
        if tables.min() < 0 or tables.max() >= self.num_pages:
            raise ValueError("a block table names a page outside the pool")

    def close(self) -> None:
        """Stops the threads and frees the pool; safe to call twice."""
        if self._engine is not None:
            self._library.llmc_destroy(self._engine)
            self._engine = None


def _anonymous(size: int, purpose: str) -> npt.NDArray[np.uint8]:
    """Zeroed page-aligned memory that the system commits on first touch."""
    try:
        return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"cannot reserve {size / 2**30:.1f} GiB for {purpose}: {error}") from error


def _pack_sampling(
    sampling: tuple[RowSampling, ...],
) -> tuple[npt.NDArray[np.generic], dict[str, npt.NDArray[np.generic] | None]]:
    """The rows as abi.h lays them out, and the flat penalty and bias arrays that they point into."""
    table = np.zeros(len(sampling), _ROW_SAMPLING)
    penalty_tokens: list[Int32] = []
    penalty_counts: list[Int32] = []
    bias_tokens: list[Int32] = []
    bias_values: list[Float32] = []
    penalty_at = bias_at = 0
    for i, row in enumerate(sampling):
        penalties = 0 if row.penalty_tokens is None else len(row.penalty_tokens)
        biases = 0 if row.bias_tokens is None else len(row.bias_tokens)
        if penalties != (0 if row.penalty_counts is None else len(row.penalty_counts)):
            raise ValueError("penalty_tokens and penalty_counts differ in length")
        if biases != (0 if row.bias_values is None else len(row.bias_values)):
            raise ValueError("bias_tokens and bias_values differ in length")
        table[i] = (
            row.temperature, row.top_p, row.min_p, row.repetition_penalty, row.presence_penalty,
            row.frequency_penalty, row.top_k, penalties, biases, penalty_at, bias_at, 0, row.seed, 0,
        )  # fmt: skip
        if row.penalty_tokens is not None and row.penalty_counts is not None:
            penalty_tokens.append(row.penalty_tokens)
            penalty_counts.append(row.penalty_counts)
        if row.bias_tokens is not None and row.bias_values is not None:
            bias_tokens.append(row.bias_tokens)
            bias_values.append(row.bias_values)
        penalty_at, bias_at = penalty_at + penalties, bias_at + biases
    return table, {
        "penalty_tokens": np.concatenate(penalty_tokens).astype(np.int32) if penalty_tokens else None,
        "penalty_counts": np.concatenate(penalty_counts).astype(np.int32) if penalty_counts else None,
        "bias_tokens": np.concatenate(bias_tokens).astype(np.int32) if bias_tokens else None,
        "bias_values": np.concatenate(bias_values).astype(np.float32) if bias_values else None,
    }
