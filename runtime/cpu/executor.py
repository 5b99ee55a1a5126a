"""The CPU executor: loads a plan's machine code and runs steps over it. The GIL is released during a step.

The shared object goes from the plan into memory (memfd) and is opened from there; weights are used where the plan
is mapped. Structures mirror kernels/cpu/abi.h.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.errors import UserError
from llmc.kv_page import PAGE_SIZE
from llmc.runtime.batch import Batch, StepOutput, nothing
from llmc.runtime.batch_check import check_batch
from llmc.runtime.cpu.numa import pin_caller, pin_pool, place_threads
from llmc.runtime.cpu.object_file import check_object
from llmc.runtime.cpu.phases import Phase, parse_phases
from llmc.runtime.plan import ABI_VERSION
from llmc.runtime.sampling_rows import pack_sampling

_POINTERS = ("tokens", "positions", "query_start", "block_tables", "rows", "sampling", "penalty_tokens",
             "penalty_counts", "bias_tokens", "bias_values", "allowed",
             "out_tokens", "out_logprobs", "logits")  # fmt: skip
PEAKS = ("fp32", "int8", "int4")
"""Kinds of arithmetic, in the order of `peak_ops` in kernels/cpu/limits.h: float32, and int8 activations with weights
of 8 and of 4 bits."""

_LONGEST_TARGET = 32
"""Bytes of the name of a target that are read."""


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


def load_code(code: bytes | memoryview, target: str | None = None) -> ctypes.CDLL:
    """Opens a shared object that lies in memory. target: what it must be code for, by name.

    Raises UserError when it is damaged, for something else, or refused by the system's loader.
    """
    check_object(code)
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
    try:
        found = (ctypes.c_char * _LONGEST_TARGET).in_dll(library, "llmc_target").value.decode(errors="replace")
        if target is not None and found != target:
            raise UserError(f"the plan's machine code for {target} is code for {found}; rebuild the plan")
        return _declare(library)
    except (AttributeError, ValueError) as error:  # a symbol that it lacks
        raise UserError(f"the plan's machine code is not llmc's ({error}); rebuild the plan") from error


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    i32, i64, ptr = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    signatures = {
        "llmc_vocab_size": (i32, []),
        "llmc_weight_bytes": (i64, []),
        "llmc_page_bytes": (i64, []),
        "llmc_arena_bytes": (i64, [i32, i32, i32]),
        "llmc_create": (ptr, [ptr, ptr, i64, ptr, i32, i32, i32, ctypes.POINTER(i32)]),
        "llmc_rouse": (None, [ptr]),
        "llmc_step": (i32, [ptr, ctypes.POINTER(_Batch)]),
        "llmc_destroy": (None, [ptr]),
        "llmc_phases": (ctypes.c_char_p, []),
        "llmc_profile": (None, [ptr, ptr]),
        "llmc_touch_memory": (None, [ptr, ptr, i64]),
        "llmc_read_bandwidth": (ctypes.c_double, [ptr, ptr, i64]),
        "llmc_peak_ops": (ctypes.c_double, [ptr, i32]),
    }
    if library.llmc_abi_version() != ABI_VERSION:
        raise UserError("the plan's machine code is of another ABI version; rebuild the plan")
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class CpuExecutor:
    """Implements `Executor` (runtime/batch.py) over one shared object."""

    page_size = PAGE_SIZE

    def __init__(
        self, code: bytes | memoryview, weights: memoryview, config: ExecutorConfig, target: str | None = None
    ) -> None:
        """weights: the weights segment, page-aligned, kept alive by the executor. target: what the code must be for.

        Raises UserError when memory or threads cannot be had, and for code and weights that do not belong together.
        """
        self._library = load_code(code, target)
        if len(weights) != (needed := self._library.llmc_weight_bytes()):
            raise UserError(f"the plan has {len(weights)} bytes of weights, its code reads {needed}; rebuild the plan")
        self._weights = np.frombuffer(weights, np.uint8)
        self.vocab_size: int = self._library.llmc_vocab_size()
        self.num_pages, self.threads = config.num_pages, config.threads
        self.max_num_tokens, self.max_num_rows = config.max_num_tokens, config.max_num_rows
        self.max_num_seqs = config.max_num_tokens  # nothing here has a size of its own per sequence
        self.page_bytes: int = self._library.llmc_page_bytes()
        self.arena_bytes: int = self._library.llmc_arena_bytes(
            config.max_num_tokens, config.max_num_rows, config.threads
        )
        self._kv = anonymous_memory(self.page_bytes * config.num_pages, "the KV pool (--kv-cache-memory)")
        self._arena = anonymous_memory(self.arena_bytes, "activations (--max-num-batched-tokens)")
        self._out_tokens = np.zeros(config.max_num_rows, np.int32)
        self._out_logprobs = np.zeros(config.max_num_rows, np.float32)
        self._out_pointers = {
            "out_tokens": self._out_tokens.ctypes.data, "out_logprobs": self._out_logprobs.ctypes.data
        }  # fmt: skip
        error = ctypes.c_int32(0)
        self._engine: int | None = self._library.llmc_create(
            self._weights.ctypes.data, self._kv.ctypes.data, config.num_pages, self._arena.ctypes.data,
            config.max_num_tokens, config.max_num_rows, config.threads, ctypes.byref(error),
        )  # fmt: skip
        if self._engine is None:
            raise UserError(f"cannot start {config.threads} threads: {os.strerror(error.value)}; lower --threads")
        self._placement = place_threads(config.threads)
        self._caller: int | None = None
        """The thread that runs the steps, once it is pinned."""
        pin_pool(self._placement)

    def step(self, batch: Batch, meanwhile: Callable[[], None] = nothing) -> StepOutput:
        """Runs a batch. Raises ValueError for one that is inconsistent: nothing of it reaches the machine code.

        `meanwhile` is called first: the step needs the cores.
        """
        if self._engine is None:
            raise RuntimeError("the executor is closed")
        check_batch(batch, self)
        meanwhile()
        self._library.llmc_rouse(self._engine)
        if self._placement and self._caller != threading.get_ident():
            self._caller = threading.get_ident()
            pin_caller(self._placement)
        rows = len(batch.rows)
        _block, pointers = _lay_out(batch)  # the block lives until the step has read it
        tokens, logprobs = self._out_tokens[:rows], self._out_logprobs[:rows]
        logits = np.empty((rows, self.vocab_size), np.float32) if batch.want_logits else None
        view = _Batch(
            len(batch.tokens), len(batch.query_start) - 1, rows, batch.block_tables.shape[1], **pointers,
            **self._out_pointers, logits=None if logits is None else logits.ctypes.data,
        )  # fmt: skip
        if self._library.llmc_step(self._engine, ctypes.byref(view)):
            raise ValueError("the batch is larger than the engine's arena")
        return StepOutput(tokens.copy(), logprobs.copy(), logits)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of every step, in order."""
        return parse_phases(self._library.llmc_phases().decode())

    @contextmanager
    def profile(self) -> Iterator[npt.NDArray[np.int64]]:
        """Nanoseconds of each phase [len(phases)], int64, which the steps inside the block add up."""
        ns = np.zeros(len(self.phases), np.int64)
        self._library.llmc_profile(self._engine, ns.ctypes.data)
        try:
            yield ns
        finally:
            self._library.llmc_profile(self._engine, None)

    def touch_memory(self, memory: npt.NDArray[np.uint8]) -> None:
        """Writes memory that `read_bandwidth` is to read: each thread its own part."""
        self._library.llmc_touch_memory(self._engine, memory.ctypes.data, memory.nbytes)

    def read_bandwidth(self, memory: npt.NDArray[np.uint8]) -> float:
        """Bytes/s of all threads in one pass over memory that `touch_memory` wrote. Of a cache, if it fits in one."""
        return float(self._library.llmc_read_bandwidth(self._engine, memory.ctypes.data, memory.nbytes))

    def peak_ops(self, kind: str) -> float:
        """Operations/s of all threads in registers, a multiply-add being two. kind: one of PEAKS."""
        return float(self._library.llmc_peak_ops(self._engine, PEAKS.index(kind)))

    def close(self) -> None:
        """Stops the threads and frees the pool; safe to call twice."""
        if self._engine is not None:
            self._library.llmc_destroy(self._engine)
            self._engine = None


def _lay_out(batch: Batch) -> tuple[bytes, dict[str, int]]:
    """The arrays of a batch in one block of memory, and their addresses by the names of abi.h: one copy and one address
    instead of one for each. This runs out of a cold cache, while every core waits for it."""
    sampling, flat = pack_sampling(batch.sampling)
    inputs = {
        "sampling": sampling, "tokens": batch.tokens, "positions": batch.positions,
        "query_start": batch.query_start, "block_tables": batch.block_tables, "rows": batch.rows, **flat,
    }  # fmt: skip
    parts = {name: a.tobytes() for name, a in inputs.items() if a is not None}
    block = b"".join(parts.values())
    at = ctypes.cast(ctypes.c_char_p(block), ctypes.c_void_p).value or 0
    pointers: dict[str, int] = {}
    for name, part in parts.items():
        pointers[name] = at
        at += len(part)
    return block, pointers


def anonymous_memory(size: int, purpose: str) -> npt.NDArray[np.uint8]:
    """Zeroed page-aligned memory that the system commits on first touch."""
    try:
        return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"cannot reserve {size / 2**30:.1f} GiB for {purpose}: {error}") from error
