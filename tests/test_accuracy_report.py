"""llmc/accuracy.py against a computation by hand in float64, over an executor of a few lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import fx

from llmc import accuracy
from llmc.accuracy import ROWS, Accuracy, layers, measure, memory_needed, run_reference
from llmc.kernels.dialect import OPS
from llmc.kernels.weights import Stored
from llmc.passes.shapes import annotate_shapes
from llmc.runtime.batch import Batch, StepOutput, nothing

V, C = 13, 8
_RNG = np.random.default_rng(0)
TABLES = {n: _RNG.standard_normal((V, C)).astype(np.float32) for n in ("table", "head")}


def reader(name: str, start: int, stop: int) -> Any:
    return TABLES[name][start:stop]


def _graph() -> fx.Graph:
    """logits = head · embed(token)."""
    graph = fx.Graph()
    inputs = {n: graph.placeholder(n) for n in ("tokens", "positions", "query_start", "rows")}
    table, head = (graph.placeholder(n) for n in TABLES)
    for node in (table, head):
        node.meta["weight"] = Stored((V, C), node.name)
    x = graph.call_function(OPS["embed"], (inputs["tokens"], table, 1.0, 0, "f32"))
    x = graph.call_function(OPS["select_rows"], (x, inputs["rows"]))
    graph.output(graph.call_function(OPS["linear"], (x, head, None, None, "none", False, "f32")))
    annotate_shapes(graph)
    return graph


def _exact(tokens: list[int]) -> Any:
    return TABLES["table"][tokens] @ TABLES["head"].T


class FakeExecutor:
    """Answers with the exact logits plus noise of its own for every position, and looks at what it is given."""

    vocab_size, page_size, max_num_tokens, max_num_seqs, max_num_rows = V, 16, ROWS, ROWS, ROWS

    def __init__(self, tokens: list[int], noise: float) -> None:
        self.num_pages = -(-len(tokens) // 16)
        self.logits = _exact(tokens) + noise * np.random.default_rng(1).standard_normal((len(tokens), V))
        self.logits = self.logits.astype(np.float32)
        self.tokens, self.seen = tokens, 0

    def step(self, batch: Batch, meanwhile: Callable[[], None] = nothing) -> StepOutput:
        count = len(batch.tokens)
        assert batch.tokens.tolist() == self.tokens[self.seen : self.seen + count] and 0 < count <= ROWS
        assert batch.positions.tolist() == list(range(self.seen, self.seen + count))
        assert batch.query_start.tolist() == [0, count] and batch.rows.tolist() == list(range(count))
        assert batch.block_tables.shape[0] == 1 and len(batch.sampling) == count and batch.want_logits
        pages = batch.block_tables[0, : (self.seen + count - 1) // 16 + 1]
        assert len(set(pages.tolist())) == len(pages) and pages.max() < self.num_pages
        logits = self.logits[self.seen : self.seen + count]
        self.seen += count
        return StepOutput(logits.argmax(-1).astype(np.int32), np.zeros(count, np.float32), logits)

    def close(self) -> None: ...


def _by_hand(tokens: list[int], ours: Any) -> tuple[float, float, float, float]:
    p, q = (np.exp(x.astype(np.float64)) for x in (_exact(tokens), ours))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    following = np.arange(len(tokens) - 1), np.array(tokens[1:])
    kl = (p * np.log(p / q)).sum(-1).mean()
    ppl, ppl32 = (np.exp(-np.log(x[following]).mean()) for x in (q, p))
    return float(ppl), float(ppl32), float(kl), float((p.argmax(-1) == q.argmax(-1)).mean())


# around the block of 128: also a last block of one token, which has no next token
@pytest.mark.parametrize("count", [2, 3, ROWS - 1, ROWS, ROWS + 1, ROWS + 2, 3 * ROWS, 3 * ROWS + 1])
def test_figures_are_those_of_the_definition(count: int) -> None:
    tokens = np.random.default_rng(count).integers(0, V, count).tolist()
    fake, done = FakeExecutor(tokens, 0.5), []
    found = measure(run_reference(_graph(), reader, tokens), fake, tokens, done.append)
    ppl, ppl32, kl, top1 = _by_hand(tokens, fake.logits)
    assert found.tokens == count and fake.seen == count
    np.testing.assert_allclose((found.perplexity, found.perplexity_float32, found.kl), (ppl, ppl32, kl), rtol=1e-4)
    assert found.top1 == pytest.approx(top1, abs=1e-12) and (count < 10 or 0 < found.top1 < 1)
    assert done == [*range(ROWS, count, ROWS), count]


def test_an_exact_engine_has_no_divergence() -> None:
    tokens = list(range(V)) * 3
    found = measure(run_reference(_graph(), reader, tokens), FakeExecutor(tokens, 0.0), tokens)
    assert abs(found.kl) < 1e-6 and found.top1 == 1.0 and found.perplexity == pytest.approx(found.perplexity_float32)


def test_the_manifest_rounds_to_four_digits() -> None:
    figures = Accuracy(2048, 14.324951, 14.3099999, 0.00440149, 0.98765432).manifest()
    assert figures == {
        "tokens": 2048, "perplexity": 14.32, "perplexity_float32": 14.31, "mean_kl": 0.004401,
        "top1_agreement": 0.9877,
    }  # fmt: skip
    nearly = Accuracy(2048, 14.324952, 14.3099998, 0.00440151, 0.98765431).manifest()
    assert nearly == {**figures, "mean_kl": 0.004402}
    assert Accuracy(2, 123456.0, 1e-9, 0.0, 1.0).manifest()["perplexity"] == 123500.0
    assert isinstance(figures["tokens"], int)


def test_the_memory_estimate_covers_the_logits_and_grows_with_the_text() -> None:
    few, many = (memory_needed(_graph(), n) for n in (64, 2048))
    assert 8 * ROWS * V <= few <= many
    assert torch.get_num_threads() >= 1 and accuracy.MAX_TOKENS == 2048


def test_the_reference_reports_its_layers() -> None:
    graph, done = _graph(), []
    (embed,) = (n for n in graph.nodes if n.target is OPS["embed"])
    with graph.inserting_after(embed):
        q = graph.call_function(torch.ops.aten.view.default, (embed, [-1, 2, C // 2]))
    inputs = {n.name: n for n in graph.nodes if n.op == "placeholder"}
    with graph.inserting_after(q):
        attention = (q, q, q, inputs["positions"], inputs["query_start"], None, 1.0, 0, 0.0, 0)
        graph.call_function(OPS["attention"], attention)
    assert layers(graph) == 1
    run_reference(graph, reader, [1, 2, 3], lambda: done.append(1))
    assert done == [1]
