"""kernels/interpret.py: large weights in blocks of rows, what is read, and when nodes are reported as done."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import fx

from llmc.kernels import interpret
from llmc.kernels.dialect import OPS
from llmc.kernels.interpret import run_body, run_graph
from llmc.kernels.weights import Stored

V, C, T = 37, 32, 6
_RNG = np.random.default_rng(0)
SHAPES: dict[str, tuple[int, ...]] = {"table": (V, C), "up": (2 * C, C), "down": (C, C), "head": (V, C), "bias": (V,)}
WEIGHTS = {name: _RNG.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
INPUTS = {
    "tokens": torch.tensor([3, 30, 3, 0, 36, 5]), "positions": torch.arange(T), "query_start": torch.tensor([0, T]),
    "rows": torch.tensor([1, 3, 5]),
}  # fmt: skip


def _graph(format: str = "f32") -> fx.Graph:
    """An embedding, a gated product, a residual, and a head with a bias."""
    graph = fx.Graph()
    inputs = {name: graph.placeholder(name) for name in INPUTS}
    weights = {name: graph.placeholder(name) for name in SHAPES}
    for name, node in weights.items():
        node.meta["weight"] = Stored(SHAPES[name], name)
    x = graph.call_function(OPS["embed"], (inputs["tokens"], weights["table"], 2.0, 0, format))
    y = graph.call_function(OPS["linear"], (x, weights["up"], None, None, "silu", True, format))
    x = graph.call_function(OPS["linear"], (y, weights["down"], None, x, "none", False, format))
    x = graph.call_function(OPS["select_rows"], (x, inputs["rows"]))
    head = graph.call_function(OPS["linear"], (x, weights["head"], weights["bias"], None, "tanh", False, format))
    graph.output(graph.call_function(OPS["softcap"], (head, 3.0)))
    return graph


def reader(name: str, start: int, stop: int) -> Any:
    return WEIGHTS[name][start:stop]


@pytest.mark.parametrize("format", ["f32", "w8"])
def test_large_weights_give_the_same_logits_in_blocks(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_graph(_graph(format), INPUTS, reader)
    read: list[tuple[str, int, int]] = []

    def spy(name: str, start: int, stop: int) -> Any:
        read.append((name, start, stop))
        return reader(name, start, stop)

    monkeypatch.setattr(interpret, "WHOLE_WEIGHT", 0)
    monkeypatch.setattr(interpret, "_BLOCK", 10 * C)
    torch.testing.assert_close(run_graph(_graph(format), INPUTS, spy), whole, rtol=1e-5, atol=1e-5)
    blocks = [(0, 10), (10, 20), (20, 30), (30, 37)]
    assert [r[1:] for r in read if r[0] == "head"] == blocks
    assert [r[1:] for r in read if r[0] == "table"] == [blocks[0], blocks[3]]  # the rows that occur
    assert [r[1:] for r in read if r[0] == "up"] == [(0, 2 * C)]  # gate and up are needed together


def test_blocks_of_logits_are_those_of_all_rows() -> None:
    body = run_body(_graph(), INPUTS, reader)
    blocks = list(body.logits(2))
    assert [len(b) for b in blocks] == [2, 1]
    torch.testing.assert_close(torch.cat(blocks), run_graph(_graph(), INPUTS, reader))


def test_a_graph_without_row_selection_gives_the_rows_asked_for() -> None:
    graph = fx.Graph()
    inputs = {name: graph.placeholder(name) for name in INPUTS}
    table = graph.placeholder("table")
    table.meta["weight"] = Stored((V, C), "table")
    graph.output(graph.call_function(OPS["embed"], (inputs["tokens"], table, 1.0, 0, "f32")))
    found = run_graph(graph, INPUTS, reader)
    assert np.array_equal(found.numpy(), WEIGHTS["table"][[30, 0, 5]])


def test_each_node_above_the_head_is_reported_once() -> None:
    done: list[str] = []
    body = run_body(_graph(), INPUTS, reader, lambda node: done.append(node.name))
    assert done == ["embed_default", "linear_default", "linear_default_1"]
    kept = {n.name for n in body.values}
    assert "linear_default_1" in kept and "embed_default" not in kept
