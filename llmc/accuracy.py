"""The accuracy report: the built engine against the float32 graph, token by token, on a text.

Both see the same token ids in one sequence. The float32 side runs the graph as it was before quantisation, in torch,
with the checkpoint's weights loaded one at a time; the engine side runs the machine code that goes into the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from llmc.kernels.dialect import OPS
from llmc.kernels.interpret import WHOLE_WEIGHT, Body, run_body
from llmc.kernels.weights import Reader
from llmc.passes.shapes import PROBE_T
from llmc.runtime.batch import Batch, Executor, Float32, RowSampling

ROWS = 128
"""Rows whose logits are in memory at once, on either side."""
MAX_TOKENS = 2048
_COMPARED_AT_ONCE = 1 << 21
"""Logits of either side that are compared at once (8 MiB): some rows of a block."""


@dataclass(frozen=True)
class Accuracy:
    """Means over the tokens of a text. Perplexities are of the true next tokens; kl is KL(float32 || engine) in nats;
    top1 the share of positions where both find the same token likeliest."""

    tokens: int
    perplexity: float
    perplexity_float32: float
    kl: float
    top1: float

    def manifest(self) -> dict[str, float | int]:
        """Rounded to four significant digits, so that the last bits of a sum do not change a plan's digest."""
        figures = {
            "perplexity": self.perplexity, "perplexity_float32": self.perplexity_float32,
            "mean_kl": self.kl, "top1_agreement": self.top1,
        }  # fmt: skip
        return {"tokens": self.tokens, **{name: float(f"{value:.4g}") for name, value in figures.items()}}


def run_reference(
    graph: fx.Graph, reader: Reader, tokens: list[int], layer_done: Callable[[], None] = lambda: None
) -> Body:
    """Runs the float32 graph over a text of at least two tokens, up to the head. layer_done is called `layers(graph)`
    times."""
    everything = torch.arange(len(tokens))
    inputs = {
        "tokens": torch.tensor(tokens), "positions": everything,
        "query_start": torch.tensor([0, len(tokens)]), "rows": everything,
    }  # fmt: skip

    def done(node: fx.Node) -> None:
        if node.target is OPS["attention"]:
            layer_done()

    body: Body = run_body(graph, inputs, reader, done)
    return body


def layers(graph: fx.Graph) -> int:
    """How often `run_reference` says that a layer is done."""
    return sum(n.target is OPS["attention"] for n in graph.nodes)


def measure(
    reference: Body, executor: Executor, tokens: list[int], progress: Callable[[int], None] = lambda rows: None
) -> Accuracy:
    """reference: of the same tokens. The executor takes ROWS tokens and rows a step and has pages for all of them.
    progress is called with the rows compared so far."""
    n = len(tokens)
    sums = np.zeros(4)
    logits = reference.logits(ROWS)
    for start, ours in zip(range(0, n, ROWS), engine_logits(executor, np.array(tokens, np.int32)), strict=True):
        sums += _compare(next(logits), torch.from_numpy(ours), tokens[start + 1 : start + 1 + ROWS])
        progress(start + len(ours))
        del ours  # before the next block is computed
    kl, agree, *nll = sums
    ppl, ppl_float32 = np.exp(np.array(nll) / (n - 1))
    return Accuracy(n, float(ppl), float(ppl_float32), float(kl / n), float(agree / n))


def _compare(theirs: Tensor, ours: Tensor, following: list[int]) -> tuple[float, float, float, float]:
    """Sums over rows of logits [R, V]: KL divergence, agreement, and the negative log-likelihoods, ours and theirs, of
    the tokens that follow (the last row of a text has none)."""
    kl = agree = nll = nll_float32 = 0.0
    step = max(1, _COMPARED_AT_ONCE // ours.shape[1])
    for start in range(0, len(ours), step):
        log_p, log_q = (torch.log_softmax(x[start : start + step], -1) for x in (theirs, ours))
        kl += float((log_p.exp() * (log_p - log_q)).sum(-1).double().sum())
        agree += float((log_p.argmax(-1) == log_q.argmax(-1)).sum())
        targets = torch.tensor(following[start : start + step], dtype=torch.long)
        picked = torch.arange(len(targets)), targets
        nll -= float(log_q[picked].double().sum())
        nll_float32 -= float(log_p[picked].double().sum())
    return kl, agree, nll, nll_float32


def memory_needed(graph: fx.Graph, tokens: int) -> int:
    """Bytes that the report takes at its peak besides the engine's weights, from the float32 graph's shapes: a weight
    and a layer's widest activations, or the logits of both sides with the head, if it is small enough to be kept."""
    weights = [math.prod(n.meta["shape"]) for n in graph.nodes if n.op == "placeholder" and "weight" in n.meta]
    values = [n for n in graph.nodes if n.op == "call_function"]
    width = max((math.prod(n.meta["shape"][1:]) for n in values if n.meta["shape"][0] == PROBE_T), default=0)
    vocab = max((n.meta["shape"][-1] for n in values), default=0)
    weight = max((w for w in weights if w <= WHOLE_WEIGHT), default=0)
    return 4 * (weight + max(6 * tokens * width, 4 * ROWS * vocab) + 4 * _COMPARED_AT_ONCE)


def engine_logits(executor: Executor, ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Iterator[Float32]:
    """Raw logits of every position of one sequence, in blocks of ROWS, prefilled in chunks of ROWS."""
    pages = np.arange(-(-len(ids) // executor.page_size), dtype=np.int32)[None]
    for start in range(0, len(ids), ROWS):
        yield _prefill(executor, np.ascontiguousarray(ids[start : start + ROWS]), start, pages)


def _prefill(
    executor: Executor, chunk: np.ndarray[tuple[int], np.dtype[np.int32]], start: int, pages: np.ndarray[Any, Any]
) -> Float32:
    """The logits of all rows of one chunk, whose first position is `start`."""
    rows = np.arange(len(chunk), dtype=np.int32)
    greedy = (RowSampling(temperature=0.0),) * len(chunk)
    bounds = np.array([0, len(chunk)], np.int32)
    output = executor.step(Batch(chunk, rows + np.int32(start), bounds, pages, rows, greedy, True))
    assert output.logits is not None
    return output.logits
