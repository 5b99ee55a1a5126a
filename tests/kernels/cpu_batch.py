"""The `Batch` of kernels/cpu/abi.h, built from numpy arrays that it keeps alive."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

_POINTERS = "tokens positions query_start block_tables rows sampling penalty_tokens penalty_counts bias_tokens"
_POINTERS += " bias_values allowed out_tokens out_logprobs logits"
_COUNTS = "num_tokens num_seqs num_rows block_table_stride"


class CBatch(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int32) for n in _COUNTS.split()] + [(n, ctypes.c_void_p) for n in _POINTERS.split()]
    arrays: tuple[npt.NDArray[Any], ...] = ()


ROW_SAMPLING = np.dtype(
    [(n, np.float32) for n in ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")]
    + [(n, np.int32) for n in ("top_k", "num_penalty", "num_bias", "penalty_offset", "bias_offset", "no_logprob")]
    + [("seed", np.uint64), ("num_allowed", np.int32), ("allowed_offset", np.int32)]
)


class BuiltBatch:
    """`c` is passed to a wrapper that takes `const Batch&`; `arrays`, by the names of abi.h, live with it."""

    def __init__(self, counts: dict[str, int], arrays: dict[str, npt.NDArray[Any] | None]) -> None:
        self.arrays = arrays
        self.struct = CBatch(**counts, **{n: a.ctypes.data for n, a in arrays.items() if a is not None})
        self.struct.arrays = tuple(a for a in arrays.values() if a is not None)
        self.c = ctypes.byref(self.struct)


def make_batch(
    positions: list[npt.NDArray[Any]],
    tables: list[npt.NDArray[np.int32]],
    **extra: npt.NDArray[Any] | None,
) -> BuiltBatch:
    """A batch of sequences at these absolute positions with these pages; `extra`: further arrays by name."""
    lengths = [len(p) for p in positions]
    stride = max([len(t) for t in tables], default=0)
    block_tables = np.zeros((len(tables), stride), np.int32)
    for s, table in enumerate(tables):
        block_tables[s, : len(table)] = table
    arrays: dict[str, npt.NDArray[Any] | None] = {
        "positions": np.concatenate([np.zeros(0), *positions]).astype(np.int32),
        "query_start": np.cumsum([0, *lengths]).astype(np.int32),
        "block_tables": block_tables,
        **extra,
    }
    rows = extra.get("rows")
    counts = {
        "num_tokens": sum(lengths),
        "num_seqs": len(tables),
        "num_rows": 0 if rows is None else len(rows),
        "block_table_stride": stride,
    }
    return BuiltBatch(counts, arrays)
