"""The engine with its thread: a request's tokens depend on the request alone, and requests fail alone."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from runtime_fakes import EOS, FakeExecutor, byte_tokenizer, solo_tokens

from llmc.errors import UserError
from llmc.runtime.batch import nothing
from llmc.runtime.config import EngineConfig
from llmc.runtime.detokenizer import TextCodec
from llmc.runtime.engine import Engine
from llmc.runtime.request import (
    EngineUnavailable,
    QueueFull,
    Request,
    RequestError,
    RequestOutput,
    SamplingParams,
    sequence_seed,
)

CODEC = TextCodec(byte_tokenizer())
CONFIG = EngineConfig(max_model_len=400, max_num_seqs=16, max_num_batched_tokens=64, check_integrity=True)


@contextlib.contextmanager
def running(executor: FakeExecutor, codec: TextCodec | None = CODEC, **config: Any) -> Iterator[Engine]:
    engine = Engine(executor, replace(CONFIG, **config), codec)
    engine.start()
    try:
        yield engine
    finally:
        engine.close()
        assert executor.closed


def prompt(length: int, salt: int = 0) -> tuple[int, ...]:
    return tuple((7 * i + salt) % 250 for i in range(length))


def tokens_of(outputs: list[RequestOutput], index: int = 0) -> list[int]:
    return [token for output in outputs if output.index == index for token in output.token_ids]


async def collect(engine: Engine, request: Request) -> list[RequestOutput]:
    return [output async for output in engine.generate(request)]


def test_tokens_are_those_of_the_solo_run_in_company_chunks_and_preemption() -> None:
    requests = [
        Request(f"r{i}", prompt(5 + 11 * i, i), SamplingParams(seed=i, max_tokens=10 + 3 * i, ignore_eos=True))
        for i in range(12)
    ]

    async def main(engine: Engine) -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(engine, request) for request in requests))

    executor = FakeExecutor(num_pages=16)
    with running(executor, max_num_batched_tokens=7) as engine:
        results = asyncio.run(main(engine))
        stats = engine.stats()
    for request, outputs in zip(requests, results, strict=True):
        assert request.params.max_tokens is not None and request.params.seed is not None
        assert tokens_of(outputs) == solo_tokens(list(request.prompt), request.params.max_tokens, request.params.seed)
        assert outputs[-1].finish_reason == "length"
    assert stats.num_preemptions > 0
    assert stats.kv_cache_usage == 0.0 and stats.num_running == stats.num_waiting == 0
    assert stats.generation_tokens == sum(r.params.max_tokens or 0 for r in requests)
    assert stats.prompt_tokens == sum(len(r.prompt) for r in requests)
    assert stats.finished["length"] == 12
    assert max(executor.steps) <= 7 and max(executor.sequences_per_step) > 1


def test_n_sequences_have_their_own_seeds() -> None:
    with running(FakeExecutor()) as engine:
        params = SamplingParams(seed=3, n=3, max_tokens=6, ignore_eos=True)
        outputs = list(engine.generate_blocking(Request("r", prompt(20), params)))
    for i in range(3):
        assert tokens_of(outputs, i) == solo_tokens(list(prompt(20)), 6, sequence_seed(3, i))


def test_without_a_seed_two_requests_differ() -> None:
    with running(FakeExecutor()) as engine:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        a, b = (tokens_of(list(engine.generate_blocking(Request(i, prompt(9), params)))) for i in "ab")
    assert a != b


def forced(text: str) -> dict[int, float]:
    """A logit_bias that leaves only one byte."""
    return {text.encode()[0]: 100.0}


def test_eos_ends_and_is_no_text() -> None:
    params = SamplingParams(temperature=0, logit_bias={EOS: 100.0}, max_tokens=9, logprobs=0)
    with running(FakeExecutor(), eos_token_ids=frozenset({EOS})) as engine:
        (output,) = engine.generate_blocking(Request("r", prompt(5), params))
        assert (output.text, output.token_ids, output.finish_reason, output.logprobs) == (
            "",
            (EOS,),
            "stop",
            (),
        )
        outputs = list(engine.generate_blocking(Request("s", prompt(5), replace(params, ignore_eos=True))))
        assert tokens_of(outputs) == [EOS] * 9 and outputs[-1].finish_reason == "length"
        outputs = list(engine.generate_blocking(Request("t", prompt(5), replace(params, min_tokens=4))))
        assert len(tokens_of(outputs)) == 5 and EOS not in tokens_of(outputs)[:4]


def test_stop_string_and_stop_token() -> None:
    base = SamplingParams(temperature=0, logit_bias=forced("a"), max_tokens=9)
    with running(FakeExecutor()) as engine:
        outputs = list(engine.generate_blocking(Request("r", prompt(5), replace(base, stop=("aaa",)))))
        assert "".join(o.text for o in outputs) == "" and outputs[-1].finish_reason == "stop"
        assert outputs[-1].num_output == 3
        outputs = list(engine.generate_blocking(Request("s", prompt(5), replace(base, stop=("aaab",)))))
        assert "".join(o.text for o in outputs) == "a" * 9 and outputs[-1].finish_reason == "length"
        outputs = list(engine.generate_blocking(Request("t", prompt(5), replace(base, stop_token_ids=(97,)))))
        assert tokens_of(outputs) == [97] and outputs[-1].text == "" and outputs[-1].finish_reason == "stop"
        armed = replace(base, stop=("a",), min_tokens=4)
        outputs = list(engine.generate_blocking(Request("u", prompt(5), armed)))
        assert "".join(o.text for o in outputs) == "aaa" and outputs[-1].num_output == 4


def test_logprobs() -> None:
    with running(FakeExecutor()) as engine:
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True)
        outputs = list(engine.generate_blocking(Request("r", prompt(5), params)))
        plain = list(engine.generate_blocking(Request("s", prompt(5), replace(params, logprobs=None))))
    entries = [entry for output in outputs for entry in output.logprobs]
    assert len(entries) == 4
    for entry in entries:
        assert len(entry.top) == 3
        assert entry.top[0][0] == entry.token
        assert entry.top[0][1] == pytest.approx(entry.logprob, abs=1e-5)
    assert tokens_of(outputs) == tokens_of(plain)
    assert not any(output.logprobs for output in plain)


def test_a_failed_step_fails_its_requests_only(caplog: pytest.LogCaptureFixture) -> None:
    with running(FakeExecutor(fail_on=299)) as engine:
        bad = list(engine.generate_blocking(Request("bad", (1, 299, 2), SamplingParams(max_tokens=5))))
        assert [(o.finish_reason, o.token_ids) for o in bad] == [("error", ())]
        assert bad[0].error is not None and "on purpose" not in bad[0].error
        assert engine.stats().kv_cache_usage == 0.0
        good = Request("good", prompt(20), SamplingParams(seed=1, max_tokens=5, ignore_eos=True))
        assert tokens_of(list(engine.generate_blocking(good))) == solo_tokens(list(prompt(20)), 5, 1)
    assert "fake model broke on purpose" in caplog.text and "Traceback" in caplog.text


def test_choices_of_a_request_share_its_prompt_and_the_counts_outlive_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = Request("r", prompt(50), SamplingParams(seed=1, max_tokens=5, ignore_eos=True, n=3))
    with running(FakeExecutor()) as engine:
        outputs = list(engine.generate_blocking(request))
        stats = engine.stats()
        assert (stats.prefix_queries, stats.prefix_hits, stats.kv_cache_usage) == (150, 96, 0.0)
        assert [{o.num_cached for o in outputs if o.index == i} for i in range(3)] == [{0}, {48}, {48}]
        for index in range(3):
            seed = sequence_seed(1, index)
            assert tokens_of(outputs, index) == solo_tokens(list(prompt(50)), 5, seed)
        with monkeypatch.context() as patch:
            patch.setattr(engine._scheduler, "commit", None)
            assert [o.finish_reason for o in engine.generate_blocking(request)] == ["error"] * 3
        stats = engine.stats()
        assert stats.prefix_queries > 150 and stats.prefix_hits > 96
        after = list(engine.generate_blocking(replace(request, params=replace(request.params, n=1))))
        assert after[-1].num_cached == 0 and tokens_of(after) == tokens_of(outputs)  # nothing is known to be computed
    with running(FakeExecutor(), prefix_cache=False) as engine:
        assert tokens_of(list(engine.generate_blocking(request)), 2) == tokens_of(outputs, 2)
        assert engine.stats().prefix_hits == 0


def test_a_failure_of_the_engine_itself_ends_its_requests_and_it_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from llmc.runtime.scheduler import Scheduler

    broken = True
    original = Scheduler.schedule

    def schedule(self: Scheduler) -> Any:
        if broken:
            original(self)
            raise RuntimeError("scheduler bug")
        return original(self)

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    request = Request("r", prompt(20), SamplingParams(seed=1, max_tokens=5, ignore_eos=True, n=2))
    with running(FakeExecutor()) as engine:
        assert [o.finish_reason for o in engine.generate_blocking(request)] == ["error", "error"]
        broken = False
        assert engine.wait_idle(1)
        assert engine.stats().kv_cache_usage == 0.0
        outputs = list(engine.generate_blocking(request))
        assert tokens_of(outputs) == solo_tokens(list(prompt(20)), 5, 1)


def test_a_token_outside_the_vocabulary_fails_one_request() -> None:
    class Wild(FakeExecutor):
        def step(self, batch: Any, meanwhile: Any = nothing) -> Any:
            out = super().step(batch, meanwhile)
            out.tokens[batch.query_start[1:] - batch.query_start[:-1] == 3] = -1
            return out

    with running(Wild()) as engine:
        assert [o.finish_reason for o in engine.generate_blocking(Request("r", (1, 2, 3)))] == ["error"]
        assert engine.stats().kv_cache_usage == 0.0 and engine.is_alive


def test_abort_frees_pages_within_a_step() -> None:
    gate = threading.Semaphore(3)
    with running(FakeExecutor(gate=gate)) as engine:
        outputs = engine.generate_blocking(Request("r", prompt(40), SamplingParams(max_tokens=300, ignore_eos=True)))
        next(outputs)
        engine.abort("r", "no such request")
        gate.release(1)  # the step that may be running
        rest = list(outputs)
        assert rest[-1].finish_reason == "abort" and len(rest) <= 4
        assert engine.stats().kv_cache_usage == 0.0
        assert engine.stats().finished["abort"] == 1
        gate.release(100)


def test_leaving_the_iteration_aborts() -> None:
    async def main(engine: Engine) -> None:
        request = Request("r", prompt(40), SamplingParams(max_tokens=300, ignore_eos=True))
        outputs = engine.generate(request)
        await anext(outputs)
        await outputs.aclose()  # type: ignore[attr-defined]
        assert await asyncio.to_thread(engine.wait_idle, 5)

    with running(FakeExecutor(delay=0.001)) as engine:
        asyncio.run(main(engine))
        assert engine.stats().finished == {"stop": 0, "length": 0, "abort": 1, "error": 0}


def test_a_slow_consumer_gets_everything_merged_and_does_not_stall_others() -> None:
    async def main(engine: Engine) -> list[RequestOutput]:
        slow = engine.open_stream([Request("slow", prompt(9), SamplingParams(seed=1, max_tokens=50, ignore_eos=True))])
        await collect(engine, Request("fast", prompt(9), SamplingParams(max_tokens=80, ignore_eos=True)))
        return [output async for output in slow]

    with running(FakeExecutor()) as engine:
        outputs = asyncio.run(main(engine))
    assert len(outputs) == 1
    assert tokens_of(outputs) == solo_tokens(list(prompt(9)), 50, 1)


def test_queue_bound_and_all_or_nothing() -> None:
    gate = threading.Semaphore(0)
    params = SamplingParams(max_tokens=2, ignore_eos=True)

    async def main(engine: Engine) -> None:
        streams = [engine.open_stream([Request(f"r{i}", prompt(3), params)]) for i in range(4)]
        with pytest.raises(QueueFull):
            engine.open_stream([Request("more", prompt(3), params)])
        streams[0].close()
        gate.release(1000)
        for stream in streams[1:]:
            assert [o async for o in stream][-1].finish_reason == "length"
        pair = [Request("x", prompt(3), params), Request("y", (), params)]
        with pytest.raises(RequestError, match="no token"):
            engine.open_stream(pair)
        assert engine.wait_idle(0)
        with pytest.raises(RequestError, match="more than this server holds"):
            engine.open_stream([Request("z", prompt(3), replace(params, n=5))])

    with running(FakeExecutor(gate=gate), max_num_seqs=2, max_queue=2) as engine:
        asyncio.run(main(engine))


def test_drain_lets_requests_finish_and_refuses_new_ones() -> None:
    with running(FakeExecutor(delay=0.002)) as engine:
        outputs = engine.generate_blocking(Request("r", prompt(9), SamplingParams(max_tokens=20, ignore_eos=True)))
        next(outputs)
        assert engine.drain(10)
        assert list(outputs)[-1].finish_reason == "length"
        with pytest.raises(EngineUnavailable):
            next(engine.generate_blocking(Request("s", prompt(9))))


def test_drain_aborts_what_does_not_finish_in_time() -> None:
    with running(FakeExecutor(delay=0.02)) as engine:
        outputs = engine.generate_blocking(Request("r", prompt(9), SamplingParams(max_tokens=300, ignore_eos=True)))
        next(outputs)
        assert not engine.drain(0.05)
        assert list(outputs)[-1].finish_reason == "abort"


def test_close_ends_everyones_stream() -> None:
    executor = FakeExecutor(delay=0.01)
    engine = Engine(executor, CONFIG, CODEC)
    engine.start()
    outputs = engine.generate_blocking(Request("r", prompt(9), SamplingParams(max_tokens=300, ignore_eos=True)))
    next(outputs)
    engine.close()
    engine.close()
    assert list(outputs)[-1].finish_reason == "abort"
    assert executor.closed and not engine.is_alive


def test_limits_are_lowered_to_what_the_executor_has() -> None:
    with running(FakeExecutor(num_pages=2, max_num_tokens=8, max_num_rows=4)) as engine:
        assert engine.max_model_len == 32
        outputs = list(engine.generate_blocking(Request("r", prompt(20), SamplingParams(seed=1, ignore_eos=True))))
        assert tokens_of(outputs) == solo_tokens(list(prompt(20)), 12, 1)
    with pytest.raises(UserError, match="max_num_seqs"):
        EngineConfig(max_model_len=5, max_num_seqs=0)


def test_without_a_codec_there_are_tokens_but_no_text() -> None:
    with running(FakeExecutor(), codec=None) as engine:
        outputs = list(engine.generate_blocking(Request("r", prompt(5), SamplingParams(max_tokens=3, seed=1))))
        assert tokens_of(outputs) == solo_tokens(list(prompt(5)), 3, 1) and not any(o.text for o in outputs)
        with pytest.raises(RequestError, match="need a tokenizer"):
            next(engine.generate_blocking(Request("s", prompt(5), SamplingParams(stop=("a",)))))
