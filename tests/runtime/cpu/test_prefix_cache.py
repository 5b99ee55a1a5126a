"""The prefix cache over real machine code: the same bits, whatever was found computed."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from families import VOCAB
from tiny_engines import executor

from llmc.runtime.config import EngineConfig
from llmc.runtime.engine import Engine
from llmc.runtime.request import Request, SamplingParams

_RNG = np.random.default_rng(3)
COMMON = _RNG.integers(0, VOCAB, 52).tolist()


def _requests(count: int) -> list[Request]:
    """Prompts that are equal for 52 tokens, greedy and drawn, with log-probabilities."""
    rest = np.random.default_rng(4).integers(0, VOCAB, (count, 9)).tolist()
    return [
        Request(f"r{i}", (*COMMON, *tail[: i % 9]), SamplingParams(
            temperature=float(i % 2), seed=i, max_tokens=12, ignore_eos=True, logprobs=2,
        ))
        for i, tail in enumerate(rest)
    ]  # fmt: skip


def _answers(engine: Engine, requests: list[Request]) -> list[Any]:
    async def one(request: Request) -> Any:
        outputs = [output async for output in engine.generate(request)]
        return [token for o in outputs for token in o.token_ids], [p for o in outputs for p in o.logprobs]

    async def all_together() -> list[Any]:
        return await asyncio.gather(*map(one, requests))

    return asyncio.run(all_together())


@pytest.mark.parametrize(("budget", "pages", "threads"), [(512, 200, 1), (7, 200, 2), (64, 14, 1)])
def test_cold_warm_and_shared_answers_are_the_same_bits(budget: int, pages: int, threads: int) -> None:
    """Alone without the cache; 16 together with it, cold and warm, in whole prompts and in chunks of 7, and in a pool
    so small that sequences are preempted and pages go."""
    requests = _requests(16)
    config = EngineConfig(200, max_num_seqs=7 if budget == 7 else 16, max_num_batched_tokens=budget,
                          check_integrity=True, prefix_cache=False)  # fmt: skip
    alone_engine = Engine(executor("llama", "int8", pages=200), config, None)
    alone_engine.start()
    alone = [_answers(alone_engine, [request])[0] for request in requests]
    assert alone_engine.stats().prefix_hits == 0
    alone_engine.close()
    shared = EngineConfig(200, config.max_num_seqs, budget, check_integrity=True)
    engine = Engine(executor("llama", "int8", threads, tokens=min(budget, 64), pages=pages), shared, None)
    engine.start()
    try:
        for _ in range(2):
            assert _answers(engine, requests) == alone
        stats = engine.stats()
        assert stats.prefix_hits >= 15 * 48 and stats.kv_cache_usage == 0.0
        assert (stats.num_preemptions > 0) == (pages == 14)
    finally:
        engine.close()
