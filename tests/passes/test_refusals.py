"""What cannot be compiled is named: the op, the module, and the rewrites that declined it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import tiny_config
from torch import fx

from llmc.errors import UserError
from llmc.frontend.export import build_meta_model, export_model
from llmc.kernels.dialect import OPS
from llmc.passes import norms
from llmc.passes.pipeline import PassCheckError, Stage, run_pipeline
from llmc.passes.result import PassContext
from llmc.passes.shapes import annotate_shapes
from llmc.passes.verify import verify_lowered

aten = torch.ops.aten


def _graph(build: Any) -> fx.Graph:
    graph = fx.Graph()
    inputs = {name: graph.placeholder(name) for name in ("tokens", "positions", "query_start", "rows")}
    table = graph.placeholder("table")
    table.meta["constant"] = torch.ones(50, 8)
    x = graph.call_function(aten.embedding.default, (table, inputs["tokens"]))
    graph.output(build(graph, x))
    return graph


def test_an_unknown_op_is_named_with_its_module() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        node = graph.call_function(aten.cumsum.default, (x, 1))
        node.meta["path"] = "model.layers.3.mixer"
        return node

    graph = _graph(build)
    annotate_shapes(graph)
    with pytest.raises(UserError, match=r"aten\.embedding\.default .* has no lowering"):
        verify_lowered(graph, {})
    with pytest.raises(UserError, match=r"cumsum.*model\.layers\.3\.mixer"):
        run_pipeline(graph, PassContext())


def test_a_declined_norm_says_why() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        square = graph.call_function(aten.pow.Tensor_Scalar, (x, 3))  # a mean of cubes is no RMS
        mean = graph.call_function(aten.mean.dim, (square, [1], True))
        root = graph.call_function(aten.rsqrt.default, (graph.call_function(aten.add.Tensor, (mean, 1e-5)),))
        return graph.call_function(aten.mul.Tensor, (x, root))

    graph = _graph(build)
    annotate_shapes(graph)
    result = norms.run(graph, PassContext())
    assert result.count == 0 and "mean of squares" in result.skipped[0][1]


def test_a_pass_that_changes_the_result_is_caught(monkeypatch: Any) -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        return graph.call_function(OPS["softcap"], (x, 5.0))

    def wrong(graph: fx.Graph, ctx: PassContext) -> Any:
        for node in graph.nodes:
            if node.target is OPS["softcap"]:
                node.args = (node.args[0], 4.0)
        return SimpleNamespace(count=1, skipped=[])

    monkeypatch.setattr("llmc.passes.pipeline.PIPELINE", (Stage("wrong", wrong),))
    graph = _graph(build)
    probe = {"tokens": torch.arange(3), "positions": torch.arange(3), "query_start": torch.tensor([0, 3]),
             "rows": torch.tensor([0, 2])}  # fmt: skip
    with pytest.raises(PassCheckError, match="pass wrong changed the logits"):
        run_pipeline(graph, PassContext(), (probe, lambda *_: None))  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("family", "settings", "words"),
    [
        ("falcon", {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}, "attention nodes"),
        ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4}, "position biases on its attention"),
    ],
)
def test_attention_outside_the_interface_is_refused(family: str, settings: dict[str, Any], words: str) -> None:
    from transformers import AutoConfig

    with pytest.raises(UserError, match=words):
        export_model(build_meta_model(AutoConfig.for_model(family, vocab_size=64, **settings)))


def test_a_rope_type_that_follows_the_sequence_is_refused() -> None:
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UserError, match="rope type 'dynamic'"):
        build_meta_model(config)
