"""`llmc serve --device cuda`: what it loads, the same answers alone and together, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from e2e_harness import Server, assert_refused, llmc, serving
from e2e_prompts import PROMPTS
from gpu_plans import SERVE, Plans, report

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["int8", "bf16"])
def server(request: pytest.FixtureRequest, plans: Plans) -> Iterator[Server]:
    with serving(plans.path(request.param), *SERVE) as server:
        report(f"{request.param}: ready after exec", f"{server.ready_after:.2f} s")
        yield server


def _requests() -> list[dict[str, Any]]:
    """One of each prompt: every fourth greedy, the others drawn, some with filters, some with penalties."""
    ways: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
        {"temperature": 1.1, "min_p": 0.05, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    )
    return [
        {"prompt": prompt, "max_tokens": 24 + i, "ignore_eos": True, "seed": i, "logprobs": 0} | ways[i % 4]
        for i, prompt in enumerate(PROMPTS)
    ]


def _answer(server: Server, request: dict[str, Any]) -> tuple[str, list[float]]:
    response = server.post("/v1/completions", **request)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert len(choice["logprobs"]["token_logprobs"]) == request["max_tokens"]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def test_concurrent_requests_get_the_answers_of_lonely_ones(server: Server) -> None:
    requests = _requests()
    alone = [_answer(server, request) for request in requests]
    for order in (requests, requests[::-1]):
        with ThreadPoolExecutor(len(order)) as pool:
            together = list(pool.map(lambda request: _answer(server, request), order))
        assert together == (alone if order is requests else alone[::-1])
    assert len({text for text, _ in alone}) > len(alone) // 2


def test_the_answer_is_about_the_question(server: Server) -> None:
    question = [{"role": "user", "content": "Tell me about the sea in two sentences."}]
    response = server.post("/v1/chat/completions", messages=question, temperature=0, max_tokens=48)
    text = response.json()["choices"][0]["message"]["content"].lower()
    assert "sea" in text or "ocean" in text


def test_a_server_on_a_gpu_loads_the_driver_and_no_compiler(server: Server) -> None:
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "libcuda.so" in maps
    assert not re.search(r"libtorch|libtriton|transformers", maps)


def test_it_stops_cleanly(plans: Plans) -> None:
    with serving(plans.path("int8"), *SERVE) as server, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(_answer, server, request) for request in _requests()[:4]]
        for future in asked:
            future.result()
        assert server.stop() == 0
        assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize("share", ["0.0001", "0.001"])
def test_too_little_memory_is_refused_in_one_line(plans: Plans, share: str) -> None:
    done = llmc("serve", plans.path("int8"), "--device", "cuda", "--gpu-memory-utilization", share)
    assert_refused(done.returncode, done.stderr, "GPU memory", "--gpu-memory-utilization")


def test_a_small_pool_serves_what_fits(plans: Plans) -> None:
    """--kv-cache-memory fixes the pool: a prompt that does not fit in it is refused, one that does is answered."""
    with serving(plans.path("int8"), *SERVE, "--kv-cache-memory", "2M") as server:
        text, _ = _answer(server, {"prompt": "The", "max_tokens": 8, "ignore_eos": True, "logprobs": 0})
        assert text
        refused = server.post("/v1/completions", prompt="word " * 3000, max_tokens=8)
        assert refused.status_code == 400, refused.text
