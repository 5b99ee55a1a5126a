"""llmc/sensitivity.py and llmc/budget.py: losses of single linears as by hand, and the choice that they make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from families import VOCAB, own_weights, save_checkpoint, save_word_tokenizer, tiny_model
from torch import fx

from llmc import budget
from llmc.cli import main
from llmc.errors import UserError
from llmc.frontend.export import build_meta_model, export_model
from llmc.frontend.tokens_major import import_graph
from llmc.kernels.formats import W4, W8, Format
from llmc.kernels.interpret import run_graph
from llmc.kernels.ops import Linear
from llmc.kernels.pack import fake_quantize
from llmc.kernels.weights import WeightRef
from llmc.passes.pipeline import run_pipeline
from llmc.passes.result import PassContext
from llmc.sensitivity import Sensitivity, measure, units_of

RNG = np.random.default_rng(7)
WINDOWS = [RNG.integers(0, VOCAB, 20).tolist() for _ in range(2)]


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def model(request: Any) -> Any:
    return tiny_model(request.param)


def _reader(model: Any) -> Any:
    values = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    return lambda name, start, stop: values[name][start:stop]


def _graph(model: Any) -> fx.Graph:
    lowered = import_graph(export_model(build_meta_model(model.config)), own_weights(model))
    exact = run_pipeline(lowered, PassContext(W4, W8, "bf16"), keep_exact=True).exact
    assert exact is not None
    return exact


def _logits(graph: fx.Graph, reader: Any, formats: dict[fx.Node, Format]) -> torch.Tensor:
    """Of WINDOWS, with some linears quantised by the dialect's own reference."""
    before = {node: node.args for node in formats}
    for node, format in formats.items():
        node.args = Linear.of(node).evolve(format=format).args
    length = len(WINDOWS[0])
    inputs = {
        "tokens": torch.tensor(WINDOWS).reshape(-1), "positions": torch.arange(length).repeat(2),
        "query_start": torch.tensor([0, length, 2 * length]), "rows": torch.arange(2 * length),
    }  # fmt: skip
    logits = run_graph(graph, inputs, reader)
    for node, args in before.items():
        node.args = args
    return torch.log_softmax(logits, -1)


def test_losses_are_those_of_one_quantised_linear(model: Any) -> None:
    graph, reader, done = _graph(model), _reader(model), []

    def values(ref: WeightRef, format: Format) -> Any:
        return fake_quantize(format, ref.read(reader))

    found = measure(graph, reader, WINDOWS, values, W4, W8, lambda: done.append(1))
    units = units_of(graph)
    assert len(found.units) == len(units) == len(done) == 8
    exact = _logits(graph, reader, {})

    def kl(formats: dict[fx.Node, Format]) -> float:
        return float((exact.exp() * (exact - _logits(graph, reader, formats))).sum(-1).double().mean())

    for node in units:
        assert found.units[Linear.of(node).weight.meta["weight"]] == pytest.approx(kl({node: W4}), rel=1e-3)
    assert found.base == pytest.approx(kl(dict.fromkeys(units, W8)), rel=1e-3)


def test_the_budget_goes_where_it_saves_most(model: Any) -> None:
    graph = _graph(model)
    refs = [Linear.of(node).weight.meta["weight"] for node in units_of(graph)]
    losses = {ref: 1.0 + i for i, ref in enumerate(refs)}
    gated = {Linear.of(n).weight.meta["weight"]: Linear.of(n).gated for n in units_of(graph)}
    least = budget.weight_bytes(graph, dict.fromkeys(refs, W4), W8)
    most = budget.weight_bytes(graph, dict.fromkeys(refs, W8), W8)
    found, kls = Sensitivity(losses, 0.5), []
    for size in np.linspace(least, most, 9).astype(int):
        choice = budget.choose(graph, found, W4, W8, W8, int(size))
        assert choice.weight_bytes <= size
        assert choice.weight_bytes == budget.weight_bytes(graph, choice.formats, W8)
        left = [ref for ref, format in choice.formats.items() if format is W4]
        assert choice.predicted_kl == pytest.approx(0.5 + sum(losses[ref] for ref in left))
        spare = size - choice.weight_bytes
        assert all(_extra(ref, gated[ref]) > spare for ref in left), "a linear that fits is left in 4 bits"
        kls.append(choice.predicted_kl)
    assert kls == sorted(kls, reverse=True) and kls[-1] == 0.5
    with pytest.raises(UserError, match=f"take {least} bytes"):
        budget.choose(graph, found, W4, W8, W8, least - 1)


def _extra(ref: WeightRef, gated: bool) -> int:
    return budget.matrix_bytes(ref, W8, gated) - budget.matrix_bytes(ref, W4, gated)


@pytest.mark.parametrize("tokens, max_len, lengths", [(2048, 8192, [256] * 2), (300, 64, [64] * 2), (100, 256, [100])])
def test_windows(tokens: int, max_len: int, lengths: list[int]) -> None:
    assert [len(w) for w in budget.windows_of(range(tokens), max_len)] == lengths


# ---- in the build


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_checkpoint(tiny_model("llama"), tmp_path_factory.mktemp("budget") / "tiny")
    save_word_tokenizer(path)
    (path / "text.txt").write_text(" ".join(f"w{i}" for i in RNG.integers(0, VOCAB, 120)))
    return path


def _build(checkpoint: Path, *flags: Any) -> Any:
    plan = checkpoint.parent / "out.plan"
    text = str(checkpoint / "text.txt")
    command = ["build", str(checkpoint), "--target", "native", "--eval-text", text, "--calibration", text]
    return CliRunner().invoke(main, [*command, "-o", str(plan), "--json", *map(str, flags)])


def test_a_plan_holds_its_budget_and_what_it_predicts(checkpoint: Path) -> None:
    small = json.loads(_build(checkpoint, "--int4").stdout)
    mixed = {}
    for share in (0, 0.5):
        size = int(small["memory"]["weight_bytes"] * (1 + share * 0.4))
        result = _build(checkpoint, "--max-weight-bytes", size)
        assert result.exit_code == 0, result.output
        mixed[share] = json.loads(result.stdout)
        assert mixed[share]["memory"]["weight_bytes"] <= size == mixed[share]["budget"]["max_weight_bytes"]
        assert mixed[share]["model"]["precision"] == "int4 and int8"
    assert small["budget"] is None and mixed[0]["budget"]["high_share"] == 0
    assert mixed[0]["memory"]["weight_bytes"] == small["memory"]["weight_bytes"]
    assert 0.3 < mixed[0.5]["budget"]["high_share"] < 0.7
    assert mixed[0.5]["accuracy"]["mean_kl"] < 0.8 * mixed[0]["accuracy"]["mean_kl"]


@pytest.mark.parametrize(
    "flags, words",
    [(["--int8", "--max-weight-bytes", "1G"], "leave out other precisions"), (["--max-weight-bytes", "1K"], "or more")],
)
def test_budgets_that_cannot_be_met(checkpoint: Path, flags: list[str], words: str) -> None:
    result = _build(checkpoint, *flags)
    assert result.exit_code == 2 and words in result.stderr.splitlines()[-1], result.output
