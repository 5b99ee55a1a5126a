"""The list of passes, in order: the table of contents of the compiler's middle.

Between passes dead nodes go and shapes are recomputed. With `probe` (llmc build --check-passes, always on in tests)
the graph is run before and after every pass on the same batch and must give the same logits; with `dump` the graph is
written after every pass, with its count and the reasons of what was left alone.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, fx

from llmc.kernels.interpret import run_graph
from llmc.kernels.weights import Reader
from llmc.passes import (
    activations,
    attention_scale,
    elementwise,
    embedding,
    epilogue,
    experts,
    kv_layout,
    linear,
    merge_linears,
    norms,
    quantize,
    rope,
    select_rows,
    split_heads,
)
from llmc.passes.result import Pass, PassContext, PassResult
from llmc.passes.shapes import annotate_shapes
from llmc.passes.verify import verify_lowered


@dataclass(frozen=True)
class Stage:
    """A pass by name. exact: it changes no result but by roundings, which is checked (CHECK_TOLERANCE)."""

    name: str
    run: Pass
    exact: bool = True


PIPELINE: tuple[Stage, ...] = (
    Stage("linear", linear.run),
    Stage("embedding", embedding.run),
    Stage("norms", norms.run),
    Stage("rope", rope.run),
    Stage("activations", activations.run),
    Stage("experts", experts.run),
    Stage("elementwise", elementwise.run),
    Stage("select_rows", select_rows.run),
    Stage("attention_scale", attention_scale.run),
    Stage("split_heads", split_heads.run),
    Stage("merge_linears", merge_linears.run),
    Stage("epilogue", epilogue.run),
    Stage("quantize", quantize.run, exact=False),
    Stage("kv_layout", kv_layout.run),
)
CHECK_TOLERANCE = 1e-4
"""Largest relative difference (to the largest logit) that an exact pass may make on the probe batch."""


@dataclass
class PipelineReport:
    """Per pass: rewrites made and (node, reason) of what was left alone; with a probe, the largest relative change.
    exact: the graph before the first pass that is not exact, if it was asked for."""

    counts: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    changes: dict[str, float] = field(default_factory=dict)
    exact: fx.Graph | None = None


class PassCheckError(RuntimeError):
    """A pass changed the result: a fault of llmc, not of the user."""


def probe_batch(vocab_size: int) -> dict[str, Tensor]:
    """Two ragged sequences of 7 and 4 tokens, sampled at four rows."""
    generator = torch.Generator().manual_seed(0)
    return {
        "tokens": torch.randint(0, vocab_size, (11,), generator=generator),
        "positions": torch.tensor([*range(7), *range(4)]),
        "query_start": torch.tensor([0, 7, 11]),
        "rows": torch.tensor([3, 6, 7, 10]),
    }


def run_pipeline(
    graph: fx.Graph,
    ctx: PassContext,
    probe: tuple[dict[str, Tensor], Reader] | None = None,
    dump: Path | None = None,
    keep_exact: bool = False,
) -> PipelineReport:
    """Lowers a tokens-major graph in place. Raises UserError for what no rewrite knows."""
    report = PipelineReport()
    _settle(graph)
    if dump is not None:
        dump_graph(graph, dump, 0, "import", PassResult(0))
    before = run_graph(graph, *probe) if probe else None
    for index, stage in enumerate(PIPELINE):
        if keep_exact and report.exact is None and not stage.exact:
            report.exact = copy.deepcopy(graph)
        result = stage.run(graph, ctx)
        _settle(graph)
        report.counts[stage.name], report.skipped[stage.name] = result.count, result.skipped
        if dump is not None:
            dump_graph(graph, dump, index + 1, stage.name, result)
        if probe is not None and before is not None:
            after = run_graph(graph, *probe)
            change = float((after - before).abs().max() / before.abs().max().clamp_min(1e-30))
            report.changes[stage.name] = change
            if stage.exact and not change <= CHECK_TOLERANCE:
                raise PassCheckError(f"pass {stage.name} changed the logits by {change:.2e} of their largest value")
            before = after
    verify_lowered(graph, report.skipped)
    return report


def _settle(graph: fx.Graph) -> None:
    """Removes what nothing uses any more, recomputes shapes and checks the graph's structure."""
    graph.eliminate_dead_code()
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users and ("weight" in node.meta or "constant" in node.meta):
            graph.erase_node(node)
    graph.lint()
    annotate_shapes(graph)


def dump_graph(graph: fx.Graph, directory: Path, index: int, name: str, result: PassResult) -> None:
    """Writes DIR/NN_pass.txt: the count, the reasons, and one line per node."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [f"# pass {name}: {result.count} rewrites"]
    lines += [f"# left alone: {node}: {reason}" for node, reason in result.skipped]
    (directory / f"{index:02d}_{name}.txt").write_text("\n".join([*lines, *listing(graph)]) + "\n")


def listing(graph: fx.Graph) -> list[str]:
    """The graph, one readable line per node, in a stable order."""
    lines = []
    for node in graph.nodes:
        dims = ", ".join(map(str, node.meta.get("shape", ())))
        if node.op == "placeholder":
            ref = node.meta.get("weight")
            lines.append(f"{node.name}: [{dims}]" + (f" = {ref.describe()[:160]}" if ref is not None else ""))
        elif node.op == "call_function":
            args = ", ".join(map(str, node.args))
            lines.append(f"{node.name}: [{dims}] = {node.target}({args})  # {node.meta.get('path', '')}")
        else:
            lines.append(f"return {node.args[0]}")
    return lines
