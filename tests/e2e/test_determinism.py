"""A request's tokens depend on nothing but the request. Everything here is compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from e2e_engine import GREEDY, Run, executor_over, generate, step_logits
from e2e_harness import report
from e2e_prompts import PROMPTS

from llmc.codegen.cpu.compile import compile_unit
from llmc.runtime.batch import Batch
from llmc.runtime.cpu.executor import CpuExecutor, ExecutorConfig
from llmc.runtime.cpu.targets import runnable_targets
from llmc.runtime.load import load_codec
from llmc.runtime.plan import Plan
from llmc.runtime.request import Request, SamplingParams

pytestmark = pytest.mark.e2e

Logits = npt.NDArray[np.float32]
SAMPLINGS: tuple[Callable[[int], SamplingParams], ...] = (
    lambda i: SamplingParams(temperature=0, max_tokens=20 + i, ignore_eos=True, logprobs=0),
    lambda i: SamplingParams(temperature=1.0, seed=i, max_tokens=40 - i, logprobs=0),
    lambda i: SamplingParams(temperature=0.7, top_p=0.9, top_k=40, seed=7, max_tokens=24, logprobs=4),
    lambda i: SamplingParams(
        temperature=1.3, min_p=0.05, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3,
        logit_bias={262: 2.5, 28: -100.0}, seed=2**63 + i, max_tokens=30, ignore_eos=True, logprobs=0,
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def plan(int8_plan: Path) -> Plan:
    return Plan.open(int8_plan)


@pytest.fixture(scope="module")
def requests(plan: Plan) -> list[Request]:
    """Sixteen: each way of sampling four times, over prompts of 2 to 94 tokens."""
    codec = load_codec(plan)
    assert codec is not None
    prompts = [codec.encode(PROMPTS[i]) for i in range(4, 20)]
    return [Request(f"r{i}", tuple(p), SAMPLINGS[i % 4](i)) for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def alone(plan: Plan, requests: list[Request]) -> Run:
    """Each request by itself: what all other ways must give."""
    run = generate(plan, requests, together=False)
    assert len(run.results) == 16
    for request in requests:
        result = run.results[f"{request.request_id}/0"]
        assert result.finish in ("length", "stop") and result.logprobs
        if request.params.ignore_eos:
            assert len(result.tokens) == request.params.max_tokens
    return run


def test_other_seeds_give_other_tokens(plan: Plan, requests: list[Request], alone: Run) -> None:
    """Without this, all that follows would hold of a sampler that ignores its seed."""
    sampled = [r for r in requests if r.params.temperature and r.params.seed is not None][:3]
    others = [
        Request(r.request_id, r.prompt, SamplingParams(temperature=1.0, seed=999, max_tokens=24)) for r in sampled
    ]
    run = generate(plan, others)
    for r in sampled:
        assert run.results[f"{r.request_id}/0"].tokens[:10] != alone.results[f"{r.request_id}/0"].tokens[:10]


@pytest.mark.parametrize("threads", [1, 2])
def test_in_a_batch_of_sixteen(plan: Plan, requests: list[Request], alone: Run, threads: int) -> None:
    assert generate(plan, requests, threads=threads).results == alone.results


def test_alone_with_one_thread(plan: Plan, requests: list[Request], alone: Run) -> None:
    few = requests[:4]
    run = generate(plan, few, together=False, threads=1)
    assert run.results == {f"{r.request_id}/0": alone.results[f"{r.request_id}/0"] for r in few}


@pytest.mark.parametrize("together", [False, True])
def test_prefilled_in_chunks_of_seven(plan: Plan, requests: list[Request], alone: Run, together: bool) -> None:
    some = requests if together else [r for r in requests if len(r.prompt) > 20]
    run = generate(plan, some, together=together, budget=7)
    assert run.results == {f"{r.request_id}/0": alone.results[f"{r.request_id}/0"] for r in some}


@pytest.mark.parametrize("budget, seqs", [(23, 5), (64, 16)])
def test_under_other_budgets(plan: Plan, requests: list[Request], alone: Run, budget: int, seqs: int) -> None:
    assert generate(plan, requests, budget=budget, max_num_seqs=seqs).results == alone.results


def test_after_preemptions(plan: Plan, requests: list[Request], alone: Run) -> None:
    """The pool holds the largest request and little more, so that the others are thrown out again and again."""
    run = generate(plan, requests, num_pages=12)
    report("preemptions in the test of them", str(run.preemptions))
    assert run.preemptions >= 5
    assert run.results == alone.results


def test_n_sequences_are_n_requests(plan: Plan, requests: list[Request]) -> None:
    """Sequence 0 of n is what n = 1 gives, and each of the others differs from it."""
    prompt = requests[0].prompt
    one = generate(plan, [Request("a", prompt, SamplingParams(seed=5, max_tokens=24))])
    four = generate(plan, [Request("a", prompt, SamplingParams(seed=5, max_tokens=24, n=4))], budget=9)
    assert four.results["a/0"] == one.results["a/0"]
    assert len({r.tokens for r in four.results.values()}) == 4


def _beside_others(executor: CpuExecutor, tokens: list[int]) -> Logits:
    """Logits of `tokens` as the third of four sequences of one step."""
    sequences = [tokens[::-1], tokens[:5], tokens, tokens[3:] * 2]
    counts = [len(s) for s in sequences]
    starts = np.cumsum([0, *counts]).astype(np.int32)
    width = -(-max(counts) // executor.page_size)
    tables = np.arange(4 * width, dtype=np.int32).reshape(4, width)
    positions = np.concatenate([np.arange(c, dtype=np.int32) for c in counts])
    rows = np.arange(starts[2], starts[3], dtype=np.int32)
    ids = np.concatenate(sequences).astype(np.int32)
    output = executor.step(Batch(ids, positions, starts, tables, rows, (GREEDY,) * len(rows), True))
    assert output.logits is not None
    return output.logits


@pytest.mark.parametrize("precision", ["fp32", "int8", "int4"])
def test_logits_are_the_same_bits(precision: str, request: pytest.FixtureRequest) -> None:
    """Not only the sampled tokens: every logit of every position, in each precision."""
    opened = Plan.open(request.getfixturevalue(f"{precision}_plan"))
    codec = load_codec(opened)
    assert codec is not None
    tokens = codec.encode(PROMPTS[18])[:61]
    wholes: dict[int, Logits] = {}
    for threads in (1, 2):
        with executor_over(opened, num_pages=64, threads=threads) as executor:

            def logits(*chunks: int, first_page: int = 0, executor: CpuExecutor = executor) -> Logits:
                return np.concatenate(list(step_logits(executor, tokens, chunks, first_page)))

            whole = wholes[threads] = logits(61)
            ways = {
                "again": logits(61),
                "chunks of 7": logits(*[7] * 8, 5),
                "token by token": logits(*[1] * 61),
                "uneven, on other pages": logits(33, 1, 2, 16, 9, first_page=40),
                "beside others": _beside_others(executor, tokens),
            }
        for name, way in ways.items():
            differ = np.flatnonzero((way.view(np.uint32) != whole.view(np.uint32)).any(-1))
            assert not len(differ), f"{name}, {threads} threads: positions {differ} differ"
    assert np.array_equal(wholes[1].view(np.uint32), wholes[2].view(np.uint32))


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_instruction_sets_give_the_same_bits(precision: str, request: pytest.FixtureRequest) -> None:
    """All that this machine has but the portable one, which has no fused multiply-add, from the plan's own source."""
    opened = Plan.open(request.getfixturevalue(f"{precision}_plan"))
    codec, unit = load_codec(opened), opened.text("source/step.cpp")
    assert codec is not None and unit is not None
    targets = [target for target in runnable_targets() if target.name != "cpu:x86-64"]
    if len(targets) < 2:
        pytest.skip(f"this machine runs {', '.join(t.name for t in targets)} alone")
    tokens = codec.encode(PROMPTS[18])[:61]
    found = {}
    for target in targets:
        code, config = compile_unit(unit, target), ExecutorConfig(128, 64, 64, 2)
        executor = CpuExecutor(code, opened.segment("weights"), config, target.name)
        try:
            logits = [*step_logits(executor, tokens, [33, 28]), *step_logits(executor, tokens, [1] * 61)]
            found[target.name] = np.concatenate(logits).tobytes()
        finally:
            executor.close()
    report(f"instruction sets with equal bits in {precision}", ", ".join(found))
    assert len(set(found.values())) == 1, {name: hash(data) for name, data in found.items()}
