"""Tiny models lowered, compiled and driven without a plan file; each is made once per test run.

`lowered` and `compiled` are cached: what they return is shared, so tests do not change it.
"""

from __future__ import annotations

import copy
import mmap
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from families import own_weights, tiny_config, tiny_model
from torch import fx

from llmc.build_options import PRECISIONS as BUILT
from llmc.codegen.cpu.compile import compile_unit
from llmc.codegen.cpu.emit import call_text, emit_unit
from llmc.codegen.cpu.program import Program, select_kernels
from llmc.codegen.weights import WeightTable
from llmc.frontend.export import build_meta_model, export_model
from llmc.frontend.tokens_major import import_graph
from llmc.kernels.formats import F32, W4, W8
from llmc.kernels.weights import Reader
from llmc.passes.pipeline import run_pipeline
from llmc.passes.result import PassContext
from llmc.runtime.batch import Batch, Executor, Float32, RowSampling
from llmc.runtime.cpu.executor import CpuExecutor, ExecutorConfig
from llmc.runtime.cpu.targets import parse_target

GREEDY = RowSampling(temperature=0.0)
PRECISIONS = BUILT | {"int8, float32 KV": (W8, W8, "f32"), "int4, float32 KV": (W4, W8, "f32"),
                      "fp32, int8 KV": (F32, F32, "int8")}  # fmt: skip
"""With float32 keys and values a quantised engine computes what the dialect's reference does, to the last bits."""


@dataclass(frozen=True)
class Lowered:
    graph: fx.Graph
    reader: Reader
    program: Program
    source: str


@cache
def imported(family: str) -> tuple[fx.Graph, Reader]:
    model = tiny_model(family)
    values = {k: v.detach().numpy() for k, v in model.state_dict().items()}
    meta = build_meta_model(tiny_config(family))
    graph = import_graph(export_model(meta), own_weights(meta))
    return graph, lambda name, start, stop: values[name][start:stop]


@cache
def lowered(family: str, precision: str = "fp32") -> Lowered:
    graph, reader = imported(family)
    graph = copy.deepcopy(graph)
    run_pipeline(graph, PassContext(*PRECISIONS[precision]))
    program = select_kernels(graph, WeightTable())
    return Lowered(graph, reader, program, emit_unit(program))


@cache
def compiled(family: str, precision: str = "fp32") -> tuple[bytes, memoryview]:
    """(shared object for this machine, weights segment)."""
    model = lowered(family, precision)
    weights = mmap.mmap(-1, model.program.weights.size)
    for offset, data in model.program.weights.blocks(model.reader):
        weights[offset : offset + len(data)] = data
    return compile_unit(model.source, parse_target("native")), memoryview(weights)


def executor(
    family: str = "llama", precision: str = "fp32", threads: int = 1, tokens: int = 64, pages: int = 48
) -> CpuExecutor:
    return CpuExecutor(*compiled(family, precision), ExecutorConfig(tokens, tokens, pages, threads))


@dataclass
class Sequences:
    """Sequences that run through an executor chunk by chunk, each in pages of its own, scattered over the pool.

    `logits[s]` collects the raw logits of every token of sequence s that was run.
    """

    executor: Executor
    tokens: list[list[int]]
    shuffle: int = 0
    done: list[int] = field(init=False)
    logits: list[list[Float32]] = field(init=False)

    def __post_init__(self) -> None:
        self.done, self.logits = [0] * len(self.tokens), [[] for _ in self.tokens]
        count = self.executor.num_pages // len(self.tokens)
        order = np.random.default_rng(self.shuffle).permutation(self.executor.num_pages).astype(np.int32)
        self.tables = order[: count * len(self.tokens)].reshape(len(self.tokens), count)

    def step(self, chunks: dict[int, int]) -> dict[int, int]:
        """Runs the next chunks[s] tokens of each sequence s in one batch; returns the greedy token after each."""
        spans = {s: (self.done[s], self.done[s] + n) for s, n in chunks.items()}
        tokens = [t for s, (a, b) in spans.items() for t in self.tokens[s][a:b]]
        positions = [p for a, b in spans.values() for p in range(a, b)]
        starts = np.cumsum([0, *chunks.values()]).astype(np.int32)
        rows = np.arange(len(tokens), dtype=np.int32)
        tables = np.ascontiguousarray(self.tables[list(chunks)])
        output = self.executor.step(
            Batch(
                np.array(tokens, np.int32), np.array(positions, np.int32), starts, tables, rows,
                (GREEDY,) * len(rows), want_logits=True,
            )
        )  # fmt: skip
        assert output.logits is not None
        last = {}
        for i, (s, (_, end)) in enumerate(spans.items()):
            self.logits[s] += list(output.logits[starts[i] : starts[i + 1]])
            self.done[s], last[s] = end, int(output.tokens[starts[i + 1] - 1])
        return last

    def decode(self, last: dict[int, int], count: int) -> None:
        """`count` greedy steps of all sequences together, from the tokens that `step` returned."""
        for _ in range(count):
            for s, token in last.items():
                self.tokens[s].append(token)
            last = self.step(dict.fromkeys(last, 1))

    def rows(self, sequence: int) -> Float32:
        return np.stack(self.logits[sequence])


def _barriers(program: Program, few: bool) -> dict[int, int]:
    """Barriers before each phase in a step of few or of many rows."""
    count, before = 0, {}
    for call in program.calls:
        count += call.wait in ("always", "few rows" if few else "many rows")
        before[call.phase] = count
    return before


def check_schedule(program: Program) -> None:
    """What every program must hold, worked out from its calls alone.

    Between two barriers a value is read only by kernels that keep to the rows of their own thread, or by the thread
    that made all of it for itself; a buffer lives from its write to its last read; buffers that live together do not
    overlap.
    """
    buffers = {b.name: b for b in program.buffers}
    written: dict[str, Any] = {}
    barriers = {few: _barriers(program, few) for few in (False, True)}
    for call in program.calls:
        text = call_text(call)
        operands, out = [b.name for b in call.reads], call.output.name if call.output is not None else None
        assert (out is None) == (call.kernel in ("kv_write", "sample"))
        for name in operands:
            assert name in written, f"{text} reads {name} before it is written"
            made = written[name]
            assert made.private == buffers[name].private
            by_rows = made.partition == call.partition != "columns"
            assert barriers[False][made.phase] < barriers[False][call.phase] or by_rows, text
            # a thread that made all rows of a private value for itself finds in them those of its share
            own = made.private and (call.private or call.partition == "columns" or call.kernel == "combine_pairs")
            assert barriers[True][made.phase] < barriers[True][call.phase] or own or by_rows > call.private, text
            assert own or not made.private, text
            assert buffers[name].first <= made.epoch and call.epoch <= buffers[name].last, text
        if out is not None:
            assert out not in written and out not in operands, f"{text} overwrites its operand"
            assert buffers[out].first <= call.epoch <= buffers[out].last, text
            assert f"({'own_' + buffers[out].domain if call.private else 'par'}, " in text
            written[out] = call
    assert written.keys() == buffers.keys()
    for a in program.buffers:
        for b in program.buffers:
            if a.name < b.name and a.domain == b.domain and a.first <= b.last and b.first <= a.last:
                lo, hi = program.offsets[a.name], program.offsets[b.name]
                assert lo + a.size <= hi or hi + b.size <= lo, f"{a.name} and {b.name} overlap"
    assert all(program.offsets[b.name] + b.size <= program.peaks[b.domain] for b in program.buffers)
