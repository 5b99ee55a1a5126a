"""The accuracy report: the built engine against the float32 graph, token by token, on a text.

Both see the same token ids in one sequence. The float32 side runs the graph as it was before quantisation, in torch,
with the checkpoint's weights loaded one at a time; the engine side runs the machine code that goes into the plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import fx

from llmc.kernels.dialect import OPS
from llmc.kernels.interpret import iter_logits
from llmc.kernels.weights import Reader
from llmc.passes.shapes import PROBE_T
from llmc.runtime.batch import Batch, Executor, Float32, RowSampling

ROWS = 128
"""Rows whose logits are in memory at once, on either side."""
MAX_TOKENS = 2048


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


def measure(
    graph: fx.Graph,
    reader: Reader,
    executor: Executor,
    tokens: list[int],
    progress: Callable[[int], None] = lambda rows: None,
) -> Accuracy:
    """graph: the float32 graph. tokens: at least two ids. The executor takes ROWS tokens and rows a step and has
    pages for all of them. progress is called with the rows compared so far."""
    ids = np.array(tokens, np.int32)
    n = len(ids)
    everything = torch.arange(n)
    inputs = {
        "tokens": torch.tensor(tokens), "positions": everything,
        "query_start": torch.tensor([0, n]), "rows": everything,
    }  # fmt: skip
    nll = np.zeros(2)
    kl = agree = 0.0
    done = 0
    reference = iter_logits(graph, inputs, reader, ROWS)
    for ours in engine_logits(executor, ids):
        theirs = next(reference)
        log_p, log_q = (torch.log_softmax(x, -1) for x in (theirs, torch.from_numpy(ours)))
        kl += float((log_p.exp() * (log_p - log_q)).sum(-1).double().sum())
        agree += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
        targets = torch.tensor(tokens[done + 1 : done + 1 + len(ours)], dtype=torch.long)
        picked = torch.arange(len(targets)), targets
        nll -= [float(log_q[picked].double().sum()), float(log_p[picked].double().sum())]
        done += len(ours)
        progress(done)
    ppl = np.exp(nll / (n - 1))
    return Accuracy(n, float(ppl[0]), float(ppl[1]), kl / n, agree / n)


def memory_needed(graph: fx.Graph, tokens: int) -> int:
    """Bytes that `measure` takes at its peak, from the graph's shapes: the largest float32 weight, the attention scores
    of one layer, a layer's widest activations, and the logits of both sides."""
    weights = [math.prod(n.meta["shape"]) for n in graph.nodes if n.op == "placeholder" and "weight" in n.meta]
    values = [n for n in graph.nodes if n.op == "call_function"]
    heads = max((n.meta["shape"][1] for n in values if n.target is OPS["attention"]), default=0)
    width = max((math.prod(n.meta["shape"][1:]) for n in values if n.meta["shape"][0] == PROBE_T), default=0)
    vocab = max((n.meta["shape"][-1] for n in values), default=0)
    return 4 * (2 * max(weights, default=0) + 5 * heads * tokens**2 + 6 * tokens * width + 8 * ROWS * vocab)


def engine_logits(executor: Executor, ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> Iterator[Float32]:
    """Raw logits of every position of one sequence, in blocks of ROWS, prefilled in chunks of ROWS."""
    pages = np.arange(-(-len(ids) // executor.page_size), dtype=np.int32)[None]
    for start in range(0, len(ids), ROWS):
        chunk = np.ascontiguousarray(ids[start : start + ROWS])
        rows = np.arange(len(chunk), dtype=np.int32)
        greedy = (RowSampling(temperature=0.0),) * len(chunk)
        bounds = np.array([0, len(chunk)], np.int32)
        output = executor.step(Batch(chunk, rows + np.int32(start), bounds, pages, rows, greedy, True))
        assert output.logits is not None
        yield output.logits
