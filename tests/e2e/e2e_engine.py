"""The executor and the engine over a real plan, in this process, with every limit a test wants to turn."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from llmc.kv_page import PAGE_SIZE
from llmc.runtime.batch import Batch, RowSampling
from llmc.runtime.config import EngineConfig
from llmc.runtime.cpu.executor import CpuExecutor, ExecutorConfig
from llmc.runtime.cpu.targets import choose_target
from llmc.runtime.engine import Engine
from llmc.runtime.load import load_codec
from llmc.runtime.plan import Plan
from llmc.runtime.request import Request, RequestOutput, TokenLogprob

GREEDY = RowSampling(temperature=0.0)


@contextlib.contextmanager
def executor_over(
    plan: Plan, *, num_pages: int, max_num_tokens: int = 512, max_num_rows: int = 256, threads: int = 2
) -> Iterator[CpuExecutor]:
    target = choose_target(list(plan.manifest["targets"]))
    config = ExecutorConfig(max_num_tokens, max_num_rows, num_pages, threads)
    executor = CpuExecutor(plan.segment(f"code/{target.name}"), plan.segment("weights"), config)
    try:
        yield executor
    finally:
        executor.close()


def step_logits(
    executor: CpuExecutor, tokens: Sequence[int], chunks: Sequence[int], first_page: int = 0
) -> Iterator[npt.NDArray[np.float32]]:
    """Raw logits [chunk, V] of one sequence, fed in chunks of these sizes, on pages from `first_page` on."""
    assert sum(chunks) == len(tokens)
    ids = np.array(tokens, np.int32)
    pages = np.arange(first_page, first_page - (-len(ids) // PAGE_SIZE), dtype=np.int32)[None]
    start = 0
    for count in chunks:
        rows = np.arange(count, dtype=np.int32)
        bounds = np.array([0, count], np.int32)
        chunk = np.ascontiguousarray(ids[start : start + count])
        output = executor.step(Batch(chunk, rows + np.int32(start), bounds, pages, rows, (GREEDY,) * count, True))
        assert output.logits is not None
        yield output.logits
        start += count


@dataclass
class Result:
    """All that a client could see of a request; compared with ==, so every bit of it counts."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None


@dataclass
class Run:
    """What came of some requests."""

    results: dict[str, Result] = field(default_factory=dict)
    preemptions: int = 0


def _follow(outputs: Iterator[RequestOutput], run: Run) -> None:
    for output in outputs:
        result = run.results.setdefault(f"{output.request_id}/{output.index}", Result())
        result.text += output.text
        result.tokens += output.token_ids
        result.logprobs += output.logprobs
        result.finish = output.finish_reason


def generate(
    plan: Plan,
    requests: Sequence[Request],
    *,
    together: bool = True,
    budget: int = 512,
    threads: int = 2,
    num_pages: int = 512,
    max_num_seqs: int = 64,
) -> Run:
    """Runs the requests in one engine, at once or one after the other, with integrity checked every step."""
    model = plan.manifest["model"]
    config = EngineConfig(
        max_model_len=int(model["max_model_len"]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        eos_token_ids=frozenset(plan.manifest["tokenizer"]["eos_token_ids"]),
        check_integrity=True,
    )
    rows = min(budget, max_num_seqs)
    with executor_over(
        plan, num_pages=num_pages, max_num_tokens=budget, max_num_rows=rows, threads=threads
    ) as executor:
        engine = Engine(executor, config, load_codec(plan))
        engine.start()
        run = Run()
        try:
            if together:
                _run_together(engine, requests, run)
            else:
                for request in requests:
                    _follow(engine.generate_blocking(request), run)
            stats = engine.stats()
        finally:
            engine.close()
    assert stats.kv_cache_usage == 0 and stats.finished["error"] == 0
    run.preemptions = stats.num_preemptions
    return run


def _run_together(engine: Engine, requests: Sequence[Request], run: Run) -> None:
    """A thread per request. Each starts when it likes: the order in which they join must not matter."""
    threads = [
        threading.Thread(target=lambda r=request: _follow(engine.generate_blocking(r), run))  # type: ignore[misc]
        for request in requests
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
