"""runtime/cuda/upload.py against a recomputation in plain loops, over random ragged batches."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cuda_fakes import GREEDY, batch, decode
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.runtime.batch import Batch, RowSampling
from llmc.runtime.cuda.upload import BatchBuffer, BatchLayout, derive_step

MAX_TOKENS, MAX_SEQS, MAX_ROWS, TILES = 64, 9, 20, (4, 16, 7)
MASKS = [np.array([n, n + 1], np.uint32) for n in (5, 2**32 - 2)]
LAYOUT = BatchLayout(MAX_TOKENS, MAX_SEQS, MAX_ROWS, TILES)


@dataclass
class Written:
    """What a kernel would read: arrays by name, words from the start of the tail, the bytes that are copied."""

    memory: bytes
    used: int

    def words(self, name: str, count: int, skip: int = 0) -> list[int]:
        start = LAYOUT.offsets[name] + 4 * skip
        assert start + 4 * count <= self.used
        return list(struct.unpack_from(f"<{count}i", self.memory, start))


def write(value: Batch) -> Written:
    step = derive_step(value, TILES)
    memory = np.full(LAYOUT.size(4096), 0x77, np.uint8)
    used = BatchBuffer(LAYOUT, memory).write(step)
    return Written(memory.tobytes(), used.nbytes)


def _ids(most: int) -> Any:
    return st.lists(st.integers(0, 49), min_size=1, max_size=most, unique=True)


@st.composite
def _samplings(draw: Any) -> RowSampling:
    kind, ids = draw(st.sampled_from(["plain", "penalty", "bias", "both"])), draw(_ids(4))
    array = np.array(ids, np.int32)
    fields: dict[str, Any] = {"temperature": draw(st.floats(0, 2, width=32)), "top_k": draw(st.integers(0, 9))}
    fields["seed"] = draw(st.integers(0, 2**64 - 1))
    if kind in ("penalty", "both"):
        fields |= {"penalty_tokens": array, "penalty_counts": array + np.int32(3), "presence_penalty": 0.5}
    if kind in ("bias", "both"):
        fields |= {"bias_tokens": array[::-1].copy(), "bias_values": array.astype(np.float32) / 4}
    if draw(st.booleans()):
        fields["allowed"] = draw(st.sampled_from(MASKS))
    return RowSampling(**fields)


@st.composite
def _batches(draw: Any) -> Batch:
    counts = draw(st.lists(st.one_of(st.just(1), st.integers(1, 20)), min_size=1, max_size=8))
    while sum(counts) > MAX_TOKENS:
        counts.pop()
    past = [draw(st.integers(0, 200)) for _ in counts]
    total = sum(counts)
    columns = (max(p + n for p, n in zip(past, counts, strict=True)) - 1) // 16 + 1 + draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    rows = np.sort(rng.permutation(total)[: draw(st.integers(0, min(MAX_ROWS, total)))]).astype(np.int32)
    return Batch(
        rng.integers(0, 50, total).astype(np.int32),
        np.concatenate([np.arange(p, p + n, dtype=np.int32) for p, n in zip(past, counts, strict=True)]),
        np.cumsum([0, *counts]).astype(np.int32),
        rng.integers(0, 1000, (len(counts), columns)).astype(np.int32), rows,
        tuple(draw(_samplings()) for _ in rows),
    )  # fmt: skip


@given(_batches())
@settings(max_examples=150, deadline=None)
def test_every_array_is_what_the_contract_says(value: Batch) -> None:
    found = write(value)
    starts = value.query_start.tolist()
    spans = list(pairwise(starts))
    tokens, seqs, rows = starts[-1], len(spans), len(value.rows)
    lens = [int(value.positions[b - 1]) + 1 for _, b in spans]
    decoding = [s for s, (a, b) in enumerate(spans) if b - a == 1]
    blocks = [0]
    for s in decoding:
        blocks.append(blocks[-1] + (lens[s] + 63) // 64)
    tiles = [[(s, f) for s, (a, b) in enumerate(spans) if b - a > 1 for f in range(0, b - a, n)] for n in TILES]
    stride = max((n + 15) // 16 for n in lens)
    meta = found.words("meta", 16)
    assert meta[:6] == [tokens, rows, seqs, len(decoding), blocks[-1], stride]
    assert meta[6:9] == [len(t) for t in tiles] and meta[14:] == [0, 0]
    assert found.words("tokens", tokens) == value.tokens.tolist()
    assert found.words("positions", tokens) == value.positions.tolist()
    assert found.words("seqs", tokens) == [s for s, (a, b) in enumerate(spans) for _ in range(a, b)]
    assert found.words("starts", seqs + 1) == starts
    assert found.words("rows", rows) == value.rows.tolist()
    assert found.words("decode_seqs", len(decoding)) == decoding
    assert found.words("decode_blocks", len(blocks)) == blocks
    for i, wanted in enumerate(tiles):
        assert found.words(f"tiles{i}", 2 * len(wanted)) == [n for tile in wanted for n in tile]
    assert found.words("tables", seqs * stride) == value.block_tables[:, :stride].ravel().tolist()
    _check_sampling(found, value, meta[9:14])


def _check_sampling(found: Written, value: Batch, starts: list[int]) -> None:
    """The records of abi.h, and through their offsets each row's own penalties, biases and mask."""
    end = LAYOUT.tail + 4 * meta_tail(value)
    for i, row in enumerate(value.sampling):
        record = struct.unpack_from("<6f6iQ2i", found.memory, LAYOUT.offsets["sampling"] + 64 * i)
        assert record[0] == np.float32(row.temperature) and record[6] == row.top_k and record[12] == row.seed
        num_penalty, num_bias, penalty_at, bias_at = record[7:11]
        penalties = [] if row.penalty_tokens is None else row.penalty_tokens.tolist()
        biases = [] if row.bias_tokens is None else row.bias_tokens.tolist()
        assert (num_penalty, num_bias) == (len(penalties), len(biases))
        assert found.words("extra", num_penalty, starts[0] + penalty_at) == penalties
        assert found.words("extra", num_penalty, starts[1] + penalty_at) == [n + 3 for n in penalties]
        assert found.words("extra", num_bias, starts[2] + bias_at) == biases
        bits = np.array(found.words("extra", num_bias, starts[3] + bias_at), np.int32)
        wanted = [] if row.bias_values is None else row.bias_values.tolist()
        assert bits.view(np.float32).tolist() == wanted
        mask = [] if row.allowed is None else row.allowed.view(np.int32).tolist()
        assert record[13] == len(mask) and found.words("extra", len(mask), starts[4] + record[14]) == mask
    assert found.used == end


def meta_tail(value: Batch) -> int:
    """Words of the tail: tables, then what the rows have."""
    lens = [int(value.positions[b - 1]) + 1 for b in value.query_start[1:]]
    extras = [a for r in value.sampling for a in
              (r.penalty_tokens, r.penalty_counts, r.bias_tokens, r.bias_values, r.allowed)]  # fmt: skip
    return len(lens) * max((n + 15) // 16 for n in lens) + sum(len(a) for a in extras if a is not None)


@given(_batches())
@settings(max_examples=50, deadline=None)
def test_what_is_said_of_a_step(value: Batch) -> None:
    step = derive_step(value, TILES)
    counts = np.diff(value.query_start).tolist()
    assert step.sizes == {
        "T": sum(counts), "R": len(value.rows), "S": len(counts), "D": counts.count(1),
        **{f"tiles{i}": sum(-(-n // t) for n in counts if n > 1) for i, t in enumerate(TILES)},
    }  # fmt: skip
    assert step.adjusted == any(
        a is not None for r in value.sampling for a in (r.penalty_tokens, r.bias_tokens, r.allowed)
    )
    assert step.decode == (set(counts) == {1} and value.rows.tolist() == list(range(len(counts))))
    assert step.items == sum(-(-(int(p) + 1) // 64) for p in _last_positions(value, single=True))


def _last_positions(value: Batch, single: bool) -> list[int]:
    spans = zip(value.query_start[:-1], value.query_start[1:], strict=True)
    return [int(value.positions[b - 1]) for a, b in spans if not single or b - a == 1]


def test_arrays_do_not_overlap_and_are_aligned() -> None:
    """Every array filled to its capacity with a number of its own."""
    memory = np.zeros(LAYOUT.size(10), np.uint8)
    spans = sorted((LAYOUT.offsets[n], 4 * int(np.prod(s))) for n, s in LAYOUT.shapes.items())
    for number, (start, size) in enumerate(spans):
        assert start % 16 == 0 and not memory[start : start + size].any()
        memory[start : start + size] = number + 1
    assert not memory[LAYOUT.tail :].any() and LAYOUT.tail % 16 == 0
    assert LAYOUT.offsets["tables"] == LAYOUT.offsets["extra"] == LAYOUT.tail


@pytest.mark.parametrize("counts", [[8] * 8, [2] * 8, [64], [5] * 8 + [24], [1] * 9, [9, 55]])
def test_tile_tables_hold_the_worst_cases(counts: list[int]) -> None:
    value = batch(*[(0, n) for n in counts])
    assert write(value).words("meta", 1) == [sum(counts)]


def test_a_decode_step_needs_rows_in_order() -> None:
    rows = np.array([0, 2, 1], np.int32)
    other = Batch(*(getattr(decode(3), n) for n in ("tokens", "positions", "query_start", "block_tables")), rows,
                  (GREEDY,) * 3)  # fmt: skip
    assert derive_step(decode(3), TILES).decode and not derive_step(other, TILES).decode
