"""Times the kernels that the build left to choose from, each in its place in the step, on the GPU at hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmc.kv_page import PAGE_SIZE
from llmc.runtime.batch import Batch, RowSampling
from llmc.runtime.cuda.archive import choice_key
from llmc.runtime.cuda.executor import CudaExecutor
from llmc.runtime.cuda.launches import Launch, Launcher

ROUNDS, LAUNCHES = 9, 50
"""Alternatives are timed in turn, so that a change of clock meets all of them; the median of the rounds counts. A round
is at least so many launches, each as often for every layer: one layer's weights would stay in the L2 cache, from which
no step reads them."""
_LARGE = 512
"""Rows for a kernel without a limit."""
_GAIN = 0.98
"""An alternative takes the default's place if its time is below this share of the default's."""


@dataclass(frozen=True)
class Alternatives:
    """The kernels of one op and bucket: the indices of its calls in the archive, one for each layer that has it; rows
    to time them at; how many kernels."""

    calls: tuple[int, ...]
    rows: int
    count: int


def alternatives(executor: CudaExecutor) -> dict[str, Alternatives]:
    """What there is to choose, by `archive.choice_key`; buckets that this executor's steps never reach are left out."""
    archive, found = executor.archive, dict[str, Alternatives]()
    for index, call in enumerate(archive.calls):
        most = executor.max_num_tokens if call.rows == "T" else executor.max_num_rows
        below = 0
        for variant in call.variants:
            rows = min(max(below + 1, _LARGE) if variant.limit is None else variant.limit, most)
            if len(variant.kernels) > 1 and rows > below and call.when == "always":
                key = choice_key(archive.kernels, variant)
                calls = found[key].calls if key in found else ()
                if all(archive.calls[i].rows == call.rows for i in calls[:1]):  # timed at one kind of row
                    found[key] = Alternatives((*calls, index), rows, len(variant.kernels))
            below = variant.limit or below
    return found


def time_alternatives(executor: CudaExecutor, found: Mapping[str, Alternatives]) -> dict[str, list[float]]:
    """Seconds of one launch of each alternative, the default first."""
    archive = executor.archive
    limits = {"T": executor.max_num_tokens, "R": executor.max_num_rows}
    bound = []
    for index in range(max((a.count for a in found.values()), default=0)):
        choices = {key: min(index, a.count - 1) for key, a in found.items()}
        launcher = Launcher(executor.device, archive, choices, limits)
        bound.append((launcher, launcher.bind(archive.calls, executor.memory.address)))
    seconds: dict[str, list[float]] = {}
    for key, item in found.items():
        sizes = _fill(executor, item.rows, archive.calls[item.calls[0]].rows == "R")
        repeats = -(-LAUNCHES // len(item.calls))
        graphs = [_capture(executor, *bound[index], item.calls * repeats, sizes) for index in range(item.count)]
        for graph in graphs:
            executor.device.replay(graph)
        launches = repeats * len(item.calls)
        rounds = [[_time(executor, graph) / launches for graph in graphs] for _ in range(ROUNDS)]
        seconds[key] = [statistics.median(samples) for samples in zip(*rounds, strict=True)]
        for graph in graphs:
            executor.device.discard(graph)
    return seconds


def _capture(
    executor: CudaExecutor, launcher: Launcher, launches: list[Launch], calls: tuple[int, ...], sizes: Mapping[str, int]
) -> Any:
    timed = [launches[call] for call in calls]
    return executor.device.capture(lambda: launcher.run(timed, sizes, adjusted=False))


def choose(seconds: Mapping[str, list[float]]) -> dict[str, int]:
    """The index of the kernel to use by key; where the default stays, none."""
    best = {key: times.index(min(times)) for key, times in seconds.items()}
    return {key: index for key, index in best.items() if seconds[key][index] < _GAIN * seconds[key][0]}


def _fill(executor: CudaExecutor, rows: int, sampled: bool) -> dict[str, int]:
    """Runs one step of `rows` tokens, so that buffers and `meta` are those of such a step; returns its sizes."""
    pages = -(-rows // PAGE_SIZE)
    count = rows if sampled else 1
    batch = Batch(
        np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32), np.array([0, rows], np.int32),
        np.arange(pages, dtype=np.int32)[None], np.arange(rows - count, rows, dtype=np.int32),
        (RowSampling(temperature=0.0),) * count,
    )  # fmt: skip
    executor.step(batch)
    return {"T": rows, "R": count, "S": 1, "D": 0}


def _time(executor: CudaExecutor, graph: Any) -> float:
    """Seconds of a graph: replayed, so that the host's part does not count."""
    executor.device.synchronize()
    start = time.perf_counter()
    executor.device.replay(graph)
    executor.device.synchronize()
    return time.perf_counter() - start
