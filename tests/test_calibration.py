"""llmc/calibration.py: what the inputs of every linear weigh, against transformers; and the same on every machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from families import VOCAB, own_weights, save_checkpoint, save_word_tokenizer, tiny_model
from torch import fx

from llmc.calibration import Text, collect, importance_of, random_text, read_text
from llmc.cli import main
from llmc.frontend.export import build_meta_model, export_model
from llmc.frontend.tokens_major import import_graph
from llmc.kernels.formats import W4, W8
from llmc.kernels.ops import Moe
from llmc.passes.pipeline import run_pipeline
from llmc.passes.result import PassContext
from llmc.runtime.plan import Plan

IDS = tuple(np.random.default_rng(3).integers(0, VOCAB, 100).tolist())
WINDOW = 40


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def graph(model: Any) -> fx.Graph:
    lowered = import_graph(export_model(build_meta_model(model.config)), own_weights(model))
    exact = run_pipeline(lowered, PassContext(W4, W8, "bf16"), keep_exact=True).exact
    assert exact is not None
    return exact


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _reader(model: Any) -> Any:
    values = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    return lambda name, start, stop: values[name][start:stop]


def _collect(model: Any, graph: fx.Graph) -> dict[str, Any]:
    found = collect(graph, _reader(model), Text(IDS, "ids", ""), WINDOW)
    return {ref.describe(): value for ref, value in found.importance.items()}


def test_means_of_squares_are_those_of_transformers_in_windows(model: Any, graph: fx.Graph) -> None:
    sums: dict[str, Any] = {}

    def hook(name: str) -> Any:
        def add(module: Any, inputs: Any) -> None:
            x = inputs[0].detach().double()
            sums[name] = sums.get(name, 0) + x.reshape(-1, x.shape[-1]).square().sum(0)

        return add

    hooks = [m.register_forward_pre_hook(hook(f"{n}.weight")) for n, m in model.named_modules() if hasattr(m, "weight")
             and isinstance(m, torch.nn.Linear) and n != "lm_head"]  # fmt: skip
    with torch.no_grad():
        for start in range(0, len(IDS), WINDOW):
            model(torch.tensor(IDS[start : start + WINDOW])[None])
    for handle in hooks:
        handle.remove()
    found = _collect(model, graph)
    assert len(found) == 8  # of two layers: q, k, v as one; o; gate and up as one; down
    for name, value in found.items():
        part = name.removeprefix("concat(").split(",")[0].rstrip(")")
        want = importance_of((sums[part] / len(IDS)).numpy())
        np.testing.assert_allclose(value, want, rtol=1 / 16)  # a float32 that lies across a boundary of rounding


def test_threads_and_their_orders_of_sums_change_no_bit(model: Any, graph: fx.Graph, threads: None) -> None:
    torch.set_num_threads(1)
    first = _collect(model, graph)
    torch.set_num_threads(3)
    second = _collect(model, graph)
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def test_importance_keeps_five_bits_and_no_column_weighs_nothing() -> None:
    means = np.array([1.0, 1.0 + 1e-9, 300.0, 0.0, 1e-30])
    found = importance_of(means)
    assert (
        found.dtype == np.float32 and found[0] == found[1] and found[0] / found[2] == pytest.approx(1 / 300, rel=0.04)
    )
    assert found[3] == found[4] > 0
    np.testing.assert_array_equal(importance_of(means * 2.0**400), found)
    np.testing.assert_array_equal(importance_of(np.zeros(3)), np.ones(3, np.float32))


def test_random_ids_are_always_the_same() -> None:
    assert random_text(VOCAB) == random_text(VOCAB) and min(random_text(VOCAB).tokens) >= 0
    assert max(random_text(VOCAB).tokens) < VOCAB and random_text(VOCAB).sha256 != random_text(VOCAB + 1).sha256


def test_a_text_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("word " * 9000)
    assert len(read_text(path, "t", lambda text: [1] * len(text.split())).tokens) == 2048


# ---- in the build


@pytest.fixture(scope="module")
def checkpoint(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_checkpoint(model, tmp_path_factory.mktemp("calibration") / "tiny")
    save_word_tokenizer(path)
    (path / "text.txt").write_text(" ".join(f"w{i}" for i in IDS))
    return path


def _build(checkpoint: Path, *flags: Any) -> Any:
    plan = checkpoint.parent / "out.plan"
    result = CliRunner().invoke(
        main, ["build", str(checkpoint), "--int4", "--target", "native", "-o", str(plan), "--json", *map(str, flags)]
    )
    assert result.exit_code == 0, result.output
    Plan.open(plan)
    return json.loads(result.stdout)


def test_a_calibrated_plan_is_nearer_to_float32_and_says_on_what(checkpoint: Path) -> None:
    text = checkpoint / "text.txt"
    report = ("--eval-text", text)
    nearest = _build(checkpoint, *report, "--no-calibration")
    calibrated = _build(checkpoint, *report, "--calibration", text)
    assert nearest["calibration"] is None
    assert calibrated["calibration"]["tokens"] == len(IDS) and calibrated["calibration"]["text"] == "text.txt"
    assert calibrated["accuracy"]["mean_kl"] < 0.9 * nearest["accuracy"]["mean_kl"]
    assert _build(checkpoint, *report, "--calibration", text)["engine_id"] == calibrated["engine_id"]


def test_without_a_tokenizer_random_ids_stand_for_a_text(checkpoint: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in checkpoint.iterdir():
        if path.name != "tokenizer.json":
            (bare / path.name).write_bytes(path.read_bytes())
    assert _build(bare)["calibration"]["text"] == "random ids"


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--int8", "--calibration", "TEXT"], "only --int4 is calibrated"),
        (["--int4", "--calibration", "TEXT", "--no-calibration"], "exclude each other"),
        (["--int4", "--calibration", "none.txt"], "cannot be read as UTF-8 text"),
    ],
)
def test_flags_that_cannot_be_met(checkpoint: Path, flags: list[str], words: str, tmp_path: Path) -> None:
    flags = [str(checkpoint / "text.txt") if f == "TEXT" else f for f in flags]
    result = CliRunner().invoke(main, ["build", str(checkpoint), "-o", str(tmp_path / "p"), *flags])
    assert result.exit_code == 2 and words in result.stderr.splitlines()[-1], result.output
    assert not (tmp_path / "p").exists()


def test_experts_weigh_what_reaches_them() -> None:
    """Each token counts once for every expert that it chooses: the first product's inputs are those of the block."""
    model = tiny_model("mixtral")
    lowered = import_graph(export_model(build_meta_model(model.config)), own_weights(model))
    exact = run_pipeline(lowered, PassContext(W4, W8, "bf16"), keep_exact=True).exact
    seen: list[torch.Tensor] = []
    block = model.model.layers[0].mlp
    hook = block.register_forward_pre_hook(lambda module, args: seen.append(args[0][0].double()))
    with torch.no_grad():
        model(torch.tensor([IDS[:WINDOW]]))
    hook.remove()
    assert exact is not None
    found = collect(exact, _reader(model), Text(IDS[:WINDOW], "ids", ""), WINDOW).importance
    moe = next(op for node in exact.nodes if (op := Moe.match(node)) is not None)
    wanted = importance_of((2 * seen[0].square().mean(0)).numpy())
    np.testing.assert_allclose(found[moe.up.meta["weight"]], wanted, rtol=0.02)  # a rounding may fall otherwise
    assert found[moe.down.meta["weight"]].shape == (32,)
