"""`llmc bench`: how fast a plan's machine code is here, and how near to what this machine can do.

It drives the executor itself, without scheduler, server or tokenizer. Bandwidth and arithmetic peaks are measured by
the plan's own code on the same threads, in every round, between the cases.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc import __version__
from llmc.bench_cost import phase_work, step_work
from llmc.errors import UserError
from llmc.kv_page import PAGE_SIZE
from llmc.machine import cpu_model, last_level_cache
from llmc.progress import TerminalProgress
from llmc.runtime.batch import Batch, Int32, RowSampling
from llmc.runtime.cost import StepShape, Work
from llmc.runtime.cpu.executor import PEAKS, CpuExecutor, ExecutorConfig, anonymous_memory
from llmc.runtime.cpu.targets import Target, choose_target
from llmc.runtime.memory import available_memory
from llmc.runtime.plan import Plan, manifest_fields
from llmc.runtime.threads import default_threads

_GREEDY = RowSampling(temperature=0.0, want_logprob=False)
_READ_BYTES = 512 << 20
"""Memory that is read to measure the bandwidth; at least four times the last-level cache, if there is as much."""
_READS = 3
"""Passes over it, and runs of each arithmetic, in a round. The median of all is the limit, as it is of the steps."""
_KV_SHARE = 0.8
"""Of the memory that is left, for the KV pool."""
_FILL = 64
"""Tokens of the sequences that give the pool its contents before anything is measured."""
_PROFILE_PREFILL, _PROFILE_BATCHES = 512, (1, 16)


@dataclass(frozen=True)
class BenchOptions:
    """Flags of `llmc bench`. input_len: prompts, in tokens. batch_size: sequences that decode together, at the shortest
    context_len; every context_len is measured with one sequence. output_len: decode steps of a case in a round.
    read_bytes: memory for the bandwidth; None: as the machine needs."""

    input_len: tuple[int, ...] = (128, 512, 2048)
    batch_size: tuple[int, ...] = (1, 4, 8, 16, 32)
    context_len: tuple[int, ...] = (64, 1024, 4096)
    output_len: int = 32
    rounds: int = 3
    threads: int | None = None
    max_num_batched_tokens: int = 512
    profile: bool = False
    read_bytes: int | None = None


@dataclass(frozen=True)
class Case:
    """A prompt of `length` tokens (batch 1, no steps), or `steps` decode steps of `batch` sequences from position
    `length` on."""

    kind: str
    batch: int
    length: int
    steps: int = 0

    @property
    def pages(self) -> int:
        return self.batch * self.pages_per_sequence

    @property
    def pages_per_sequence(self) -> int:
        return -(-(self.length + self.steps) // PAGE_SIZE)

    @property
    def name(self) -> str:
        if self.kind == "prefill":
            return f"prefill of {self.length}"
        return f"decode at batch {self.batch}, context {self.length}"

    def shapes(self, budget: int) -> list[StepShape]:
        """Its steps; a prompt is cut into chunks of at most `budget` tokens, of which the last one samples."""
        if self.kind == "prefill":
            starts = range(0, self.length, budget)
            spans = [(start, min(budget, self.length - start)) for start in starts]
            return [StepShape((span,), int(sum(span) == self.length)) for span in spans]
        return [StepShape(((self.length + i, 1),) * self.batch, self.batch) for i in range(self.steps)]


def run_bench(plan: Plan, options: BenchOptions, progress: TerminalProgress) -> dict[str, Any]:
    """Everything that was measured, ready for JSON; docs/cli.md describes it.

    Raises UserError for a plan without code for this CPU, numbers out of range, or when not one case is left.
    """
    target = _target(plan)
    threads = _check(options)
    cases, notes = _cases(plan, options)
    cases = _fitting(plan, options, cases, notes)
    executor = _executor(plan, options, target, threads, max(case.pages for case in cases))
    try:
        with progress.bar("bench", options.rounds * len(cases), "case") as advance:
            result = _Bench(plan, options, executor, cases, notes).run(advance)
    finally:
        executor.close()
    machine = {"cpu": cpu_model(), "last_level_cache_bytes": last_level_cache(), "threads": threads,
               "target": target.name}  # fmt: skip
    return result | {"machine": machine}


def _target(plan: Plan) -> Target:
    with manifest_fields(plan.path):
        targets = list(plan.manifest["targets"])
    if not any(name.startswith("cpu:") for name in targets):
        raise UserError(
            f"{plan.path}: bench measures CPU code, and the plan has code for {', '.join(targets)} only; "
            "rebuild it with --target native"
        )
    return choose_target(targets)


def _check(options: BenchOptions) -> int:
    """The number of threads. Raises UserError for a number out of range."""
    numbers = {
        "--input-len": options.input_len, "--batch-size": options.batch_size, "--context-len": options.context_len,
        "--output-len": (options.output_len,), "--rounds": (options.rounds,),
        "--max-num-batched-tokens": (options.max_num_batched_tokens,),
    }  # fmt: skip
    for flag, values in numbers.items():
        if any(value < 1 for value in values):
            raise UserError(f"{flag} {','.join(map(str, values))}: must be at least 1")
    threads = options.threads if options.threads is not None else default_threads()
    if not 1 <= threads <= 256:
        raise UserError(f"--threads {threads}: must be between 1 and 256")
    return threads


def _cases(plan: Plan, options: BenchOptions) -> tuple[list[Case], list[str]]:
    """What fits the plan's longest sequence, each case once, and a note for the others."""
    with manifest_fields(plan.path):
        longest = int(plan.manifest["model"]["max_model_len"])
    wanted = [Case("prefill", 1, n) for n in options.input_len]
    wanted += [Case("decode", n, min(options.context_len), options.output_len) for n in options.batch_size]
    wanted += [Case("decode", 1, n, options.output_len) for n in sorted(options.context_len)]
    wanted = list(dict.fromkeys(wanted))
    notes = [
        f"{case.name} left out: with {case.steps} more tokens it exceeds the plan's longest sequence of {longest}"
        if case.steps
        else f"{case.name} left out: the plan's longest sequence is {longest}"
        for case in wanted
        if case.length + case.steps > longest
    ]
    cases = [case for case in wanted if case.length + case.steps <= longest]
    if not cases:
        raise UserError(f"{plan.path}: the plan holds sequences of at most {longest} tokens; no case is short enough")
    return cases, notes


def _fitting(plan: Plan, options: BenchOptions, cases: list[Case], notes: list[str]) -> list[Case]:
    """The cases whose keys and values fit in memory; a note for the others is added to `notes`."""
    with manifest_fields(plan.path):
        memory = plan.manifest["memory"]
        tokens = max(options.max_num_batched_tokens, *(case.batch for case in cases))
        arena = tokens * (int(memory["arena_bytes_per_token"]) + int(memory["arena_bytes_per_row"]))
        page_bytes = int(plan.manifest["model"]["kv_bytes_per_token"]) * PAGE_SIZE
    left = int((available_memory() - _read_bytes(options) - arena) * _KV_SHARE)
    kept = [case for case in cases if case.pages * page_bytes <= left]
    notes += [
        f"{case.name} left out: its keys and values take {case.pages * page_bytes / 2**30:.1f} GiB, "
        f"{max(left, 0) / 2**30:.1f} are free"
        for case in cases
        if case not in kept
    ]
    if not kept:
        raise UserError(f"{plan.path}: not enough free memory for any case; ask for shorter or smaller ones")
    return kept


def _read_bytes(options: BenchOptions) -> int:
    """Memory to read for the bandwidth: at most a quarter of what is free."""
    if options.read_bytes is not None:
        return options.read_bytes
    return min(max(_READ_BYTES, 4 * (last_level_cache() or 0)), available_memory() // 4)


def _executor(plan: Plan, options: BenchOptions, target: Target, threads: int, pages: int) -> CpuExecutor:
    rows = max(options.batch_size)
    config = ExecutorConfig(max(options.max_num_batched_tokens, rows), rows, pages, threads)
    return CpuExecutor(plan.segment(f"code/{target.name}"), plan.segment("weights"), config, target.name)


class _Bench:
    """One run over one executor."""

    def __init__(
        self, plan: Plan, options: BenchOptions, executor: CpuExecutor, cases: list[Case], notes: list[str]
    ) -> None:
        self.plan, self.options, self.executor, self.cases, self.notes = plan, options, executor, cases, notes
        self.rng = np.random.default_rng(0)
        self.phases = executor.phases
        self.limits: dict[str, list[float]] = defaultdict(list)
        self.samples: dict[Case, list[list[float]]] = defaultdict(list)

    def run(self, advance: Callable[[int], None]) -> dict[str, Any]:
        self.fill()
        memory = anonymous_memory(_read_bytes(self.options), "measuring the bandwidth")
        cache = last_level_cache()
        if cache is not None and memory.nbytes < 4 * cache and self.options.read_bytes is None:
            self.notes.append("the bandwidth may be that of a cache: there is not enough free memory to read")
        self.executor.touch_memory(memory)
        for number in range(self.options.rounds):
            self.measure_limits(memory)
            # there and back, so that a machine that becomes slower or faster does so for all cases alike
            for case in self.cases if number % 2 == 0 else reversed(self.cases):
                self.samples[case].append(self.time(case))
                advance(1)
        profile = [self.profile(case) for case in self.profiled()] if self.options.profile else []
        return self.result(profile)

    def fill(self) -> None:
        """Short sequences over the whole pool: what is read later was written, and the weights are in memory."""
        budget = max(self.options.max_num_batched_tokens // _FILL, 1)
        count = min(_FILL, self.executor.max_num_tokens, max(case.length + case.steps for case in self.cases))
        per_sequence = -(-count // PAGE_SIZE)
        tables = np.arange(self.executor.num_pages // per_sequence * per_sequence, dtype=np.int32)
        sequences = tables.reshape(-1, per_sequence)
        rest = np.arange(tables.size, self.executor.num_pages, dtype=np.int32).reshape(-1, 1)
        for start in range(0, len(sequences), budget):
            some = sequences[start : start + budget]
            self.step(StepShape(((0, count),) * len(some), 0), some)
        for page in rest:
            self.step(StepShape(((0, min(PAGE_SIZE, count)),), 0), page.reshape(1, 1))

    def step(self, shape: StepShape, tables: Int32, tokens: Int32 | None = None) -> tuple[float, Int32]:
        """Seconds of one step, and the tokens that it sampled. tokens: input, random by default."""
        if tokens is None:
            tokens = self.rng.integers(0, self.executor.vocab_size, shape.num_tokens, np.int32)
        positions = np.concatenate([np.arange(start, start + n, dtype=np.int32) for start, n in shape.spans])
        starts = np.cumsum([0, *(n for _, n in shape.spans)], dtype=np.int32)
        rows = (starts[1:] - 1)[: shape.num_rows]
        batch = Batch(tokens, positions, starts, np.ascontiguousarray(tables), rows, (_GREEDY,) * len(rows))
        began = time.perf_counter()
        output = self.executor.step(batch)
        return time.perf_counter() - began, output.tokens

    def time(self, case: Case) -> list[float]:
        """Seconds of every step of a case; decode steps feed the sampled tokens back."""
        tables = np.arange(case.pages, dtype=np.int32).reshape(case.batch, -1)
        tokens, seconds = None, []
        for shape in case.shapes(self.options.max_num_batched_tokens):
            elapsed, sampled = self.step(shape, tables, tokens)
            tokens = sampled if case.kind == "decode" else None
            seconds.append(elapsed)
        return seconds

    def measure_limits(self, memory: npt.NDArray[np.uint8]) -> None:
        for _ in range(_READS):
            self.limits["read_bandwidth"].append(self.executor.read_bandwidth(memory))
            for kind in PEAKS:
                self.limits[kind].append(self.executor.peak_ops(kind))

    def profiled(self) -> list[Case]:
        """One chunk of a prompt, and decoding alone and in a batch, at the lengths nearest to 512, 1 and 16; and the
        longest of both."""
        decode = [case for case in self.cases if case.kind == "decode"]
        prefill = [case for case in self.cases if case.kind == "prefill"]
        found = [_nearest(prefill, _PROFILE_PREFILL, lambda case: case.length)]
        shortest = [case for case in decode if case.length == min(c.length for c in decode)]
        found += [_nearest(shortest, batch, lambda case: case.batch) for batch in _PROFILE_BATCHES]
        found += [max(cases, key=lambda case: case.length, default=None) for cases in (prefill, decode)]
        return list(dict.fromkeys(case for case in found if case is not None))

    def profile(self, case: Case) -> dict[str, Any]:
        """Where the time of a case goes, phase by phase, per step."""
        with self.executor.profile() as ns:
            seconds = self.time(case)
        shapes = case.shapes(self.options.max_num_batched_tokens)
        phases = []
        for phase, time_of_phase in zip(self.phases, ns.tolist(), strict=True):
            work = sum((phase_work(phase, shape) for shape in shapes), Work()).per(len(shapes))
            phases.append(
                {"label": phase.label, "path": phase.path, "seconds": time_of_phase / 1e9 / len(shapes),
                 "bytes": work.bytes, "ops": work.total_ops}
            )  # fmt: skip
        return {"name": case.name, "steps": len(shapes), "seconds_per_step": sum(seconds) / len(shapes),
                "phases": phases}  # fmt: skip

    def result(self, profile: list[dict[str, Any]]) -> dict[str, Any]:
        bandwidth = statistics.median(self.limits["read_bandwidth"])
        peaks = {kind: statistics.median(self.limits[kind]) for kind in PEAKS}
        found = {case: self.report(case, bandwidth, peaks) for case in self.cases}
        with manifest_fields(self.plan.path):
            model = self.plan.manifest["model"]
            about = {key: model[key] for key in ("architecture", "precision", "kv_dtype", "max_model_len")}
            about["checkpoint"] = self.plan.manifest["provenance"]["checkpoint"]["name"]
        options = self.options
        return {
            "llmc": __version__,
            "plan": {"engine_id": self.plan.engine_id, **about},
            "options": {"rounds": options.rounds, "max_num_batched_tokens": options.max_num_batched_tokens},
            "limits": {"read_bandwidth": bandwidth, "peak_ops": peaks, "samples": dict(self.limits)},
            "prefill": [found[case] for case in self.cases if case.kind == "prefill"],
            "decode": [found[case] for case in self.cases if case.kind == "decode"],
            "profile": profile,
            "notes": self.notes,
        }

    def report(self, case: Case, bandwidth: float, peaks: dict[str, float]) -> dict[str, Any]:
        """The figures of a case. seconds: of a whole prompt, the median of the rounds; or of a decode step, the median
        of all steps."""
        rounds = self.samples[case]
        shapes = case.shapes(self.options.max_num_batched_tokens)
        work = sum((step_work(self.phases, shape) for shape in shapes), Work())
        if case.kind == "prefill":
            seconds, tokens = statistics.median(map(sum, rounds)), case.length
            head: dict[str, Any] = {"input_len": case.length, "seconds": seconds}
        else:
            seconds, tokens = statistics.median(s for steps in rounds for s in steps), case.batch
            work = work.per(case.steps)
            head = {"batch_size": case.batch, "context_len": case.length, "output_len": case.steps,
                    "seconds_per_step": seconds}  # fmt: skip
        return head | {
            "tokens_per_second": tokens / seconds,
            "bytes": work.bytes,
            "ops": dict(work.ops),
            "bytes_per_second": work.bytes / seconds,
            "ops_per_second": work.total_ops / seconds,
            "bandwidth_fraction": work.bytes / seconds / bandwidth,
            "peak_fraction": work.seconds_at_peak(peaks) / seconds,
            "samples": rounds,
        }


def _nearest(cases: Sequence[Case], wanted: int, size: Callable[[Case], int]) -> Case | None:
    return min(cases, key=lambda case: abs(size(case) - wanted), default=None)
