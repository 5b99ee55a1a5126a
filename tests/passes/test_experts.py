"""Mixtures of experts: export, routers, recipes of stacks, against transformers in float32; what is refused."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import MIXTURES, VOCAB, own_weights, save_checkpoint, tiny_config, tiny_model
from safetensors.torch import load_file, save_file
from torch import fx
from transformers import AutoConfig

from llmc.errors import UserError
from llmc.frontend.experts import use_experts
from llmc.frontend.export import build_meta_model, export_model
from llmc.frontend.parameters import match_parameters
from llmc.frontend.safetensors_checkpoint import SafetensorsCheckpoint
from llmc.frontend.tokens_major import import_graph
from llmc.kernels.formats import W8
from llmc.kernels.interpret import run_graph
from llmc.kernels.ops import Linear, Moe
from llmc.kernels.routing import Router, route
from llmc.passes import activations, experts
from llmc.passes.pipeline import probe_batch, run_pipeline
from llmc.passes.result import PassContext
from llmc.passes.shapes import annotate_shapes

aten = torch.ops.aten
ROUTERS = {
    "mixtral": Router("softmax", 2, normalise=True),
    "qwen2_moe": Router("softmax", 2),
    "qwen3_moe": Router("softmax", 2, normalise=True),
    "olmoe": Router("softmax", 5),
    "flex_olmo": Router("softmax", 2),
    "granitemoe": Router("softmax", 2, normalise=True),
    "granitemoeshared": Router("softmax", 2, normalise=True),
    "glm4_moe": Router("sigmoid", 3, 4, 2, 2, normalise=True, eps=1e-20, scale=2.5),
    "dots1": Router("sigmoid", 3, scale=2.5),
    "hunyuan_v1_moe": Router("softmax", 2, normalise=True),
    "minimax_m2": Router("sigmoid", 2, normalise=True),
    "lfm2_moe": Router("sigmoid", 2, normalise=True, eps=1e-6),
}


def _import(family: str, **overrides: Any) -> fx.Graph:
    meta = build_meta_model(tiny_config(family, **overrides))
    return import_graph(export_model(meta), own_weights(meta))


def _reader(model: Any) -> Any:
    values = {k: v.detach().numpy() for k, v in model.state_dict().items()}
    return lambda name, start, stop: values[name][start:stop]


def _mixtures(graph: fx.Graph) -> list[Moe]:
    return [Moe.of(node) for node in graph.nodes if Moe.match(node) is not None]


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_becomes_one_op_and_keeps_its_logits(family: str) -> None:
    model = tiny_model(family)
    graph, reader, probe = _import(family), _reader(model), probe_batch(VOCAB)
    checked = family in ("glm4_moe", "qwen2_moe")  # after every pass; the others at the end
    report = run_pipeline(graph, PassContext(), (probe, reader) if checked else None)
    mixtures = _mixtures(graph)
    sparse = sum("_is_expert_parallel" in vars(module) for module in model.modules())
    assert report.counts["experts"] == len(mixtures) == sparse > 0
    assert all(moe.router == ROUTERS[family] and moe.gated and moe.act == "silu" for moe in mixtures)
    logits = run_graph(graph, probe, reader)
    with torch.no_grad():
        parts = [model(part[None]).logits[0] for part in probe["tokens"].split([7, 4])]
    torch.testing.assert_close(logits, torch.cat(parts)[probe["rows"]], rtol=0, atol=1e-4)


BLOCKS: dict[str, tuple[str, Router | None]] = {
    "ernie4_5_moe": ("Ernie4_5_MoeSparseMoeBlock", Router("softmax", 2, normalise=True, floor=1e-12)),
    "deepseek_v2": ("DeepseekV2Moe", Router("softmax", 2, 4, 2, 1, scale=1.5)),
    "deepseek_v3": ("DeepseekV3MoE", Router("sigmoid", 2, 4, 2, 2, normalise=True, eps=1e-20, scale=1.5)),
    "nemotron_h": ("NemotronHMoE", Router("sigmoid", 2, 4, 2, 2, normalise=True, eps=1e-20, scale=1.5)),
    "phimoe": ("PhimoeSparseMoeBlock", None),
}
"""Blocks of families whose attention does not build yet, in a model whose does. None: its router is not known."""


def _with_blocks(model: Any, family: str) -> Any:
    """The model with a family's mixtures of experts, with random weights, in the place of its own."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    sizes = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    counts = dict.fromkeys(("num_local_experts", "n_routed_experts", "moe_num_experts"), 8)
    rest = {
        "n_group": 4, "topk_group": 2, "moe_k": 2, "n_shared_experts": 1, "moe_num_shared_experts": 0,
        "norm_topk_prob": True, "routed_scaling_factor": 1.5, "topk_method": "group_limited_greedy",
    }  # fmt: skip
    config = AutoConfig.for_model(family, **sizes, **counts, **rest)
    torch.manual_seed(0)
    for layer in model.model.layers:
        layer.mlp = getattr(module, BLOCKS[family][0])(config).eval()
        for value in layer.mlp.state_dict().values():
            value.copy_(torch.randn_like(value) * 0.2)
        layer.mlp.experts.config = model.config  # which says how experts are computed
    return model


@pytest.mark.parametrize("family", BLOCKS)
def test_the_routers_of_families_that_do_not_build_yet(family: str) -> None:
    model = _with_blocks(tiny_model("mixtral"), family)
    meta = _with_blocks(build_meta_model(tiny_config("mixtral")), family).to("meta")
    use_experts(meta)
    graph, reader, probe = import_graph(export_model(meta), own_weights(meta)), _reader(model), probe_batch(VOCAB)
    router = BLOCKS[family][1]
    if router is None:
        with pytest.raises(UserError, match=r"its router is not known: aten\.amax, aten\.argmax, .*aten\.cat;?"):
            run_pipeline(graph, PassContext())
        return
    run_pipeline(graph, PassContext())
    assert [moe.router for moe in _mixtures(graph)] == [router] * 2
    with torch.no_grad():
        parts = [model(part[None]).logits[0] for part in probe["tokens"].split([7, 4])]
    found = run_graph(graph, probe, reader)
    torch.testing.assert_close(found, torch.cat(parts)[probe["rows"]], rtol=0, atol=1e-4)


def test_experts_are_quantised_and_routers_are_not() -> None:
    model, graph = tiny_model("qwen2_moe"), _import("qwen2_moe")
    report = run_pipeline(graph, PassContext(W8, W8, "bf16"), (probe_batch(VOCAB), _reader(model)))
    assert all(moe.format is W8 for moe in _mixtures(graph))
    floats = [node for node in graph.nodes if (op := Linear.match(node)) is not None and op.format.bits == 32]
    assert [node.meta["shape"][1] for node in floats] == [6 + 1] * 2  # the router's logits and the shared expert's gate
    assert 0 < report.changes["quantize"] < 0.1


def test_an_unknown_router_is_refused_with_its_ops() -> None:
    graph = _import("mixtral")
    annotate_shapes(graph)
    activations.run(graph, PassContext())
    for node in graph.find_nodes(op="call_function", target=aten.softmax.int):
        node.target, node.args = aten.exp.default, node.args[:1]
    with pytest.raises(
        UserError,
        match=r"experts at model\.layers\.0\.mlp\.experts: its router is not known: aten\.exp, aten\.argsort\.stable, "
        r"aten\.slice\.Tensor, aten\.gather, aten\.sum\.dim_IntList, aten\.div\.Tensor$",
    ):
        experts.run(graph, PassContext())


def test_an_unknown_activation_is_refused_with_its_ops() -> None:
    graph = _import("mixtral")
    annotate_shapes(graph)  # without the pass of activations there is no activation that is known
    with pytest.raises(UserError, match=r"activation of its experts is not known: aten\.slice.*aten\.silu, aten\.mul"):
        experts.run(graph, PassContext())


def test_a_mixture_outside_the_interface_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_meta_model(tiny_config("mixtral"))
    monkeypatch.setattr(model.model.layers[1].mlp.experts, "forward", lambda x, *_: x)
    with pytest.raises(UserError, match="found 1 experts nodes for 2 mixtures of experts"):
        export_model(model)


@pytest.mark.parametrize(
    ("router", "words"),
    [
        (Router("softmax", 9), "top 9 of 1 groups of 8"),
        (Router("softmax", 0), "top 0"),
        (Router("softmax", 2, groups=3), "8 experts are not 3 groups"),
        (Router("sigmoid", 5, groups=4, top_groups=2), "top 5 of 2 groups of 2"),
        (Router("sigmoid", 2, groups=4, top_groups=2, group_best=3), "best 3"),
        (Router("tanh", 2), "scores 'tanh'"),
    ],
)
def test_a_router_that_cannot_choose_is_refused(router: Router, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        router.check(8)


def test_of_equal_scores_the_first_is_chosen_and_groups_keep_others_out() -> None:
    index, weights = route(torch.zeros(2, 8), None, Router("softmax", 3, scale=8.0))
    assert index.tolist() == [[0, 1, 2]] * 2 and weights.tolist() == [[1.0, 1.0, 1.0]] * 2
    logits = torch.tensor([[9.0, -9, 2, 2, 1, 1, 0, 0]])
    index, _ = route(logits, torch.tensor([-1.0, 0, 0, 0, 0, 0, 0, 0]), Router("sigmoid", 2, 4, 1, 2))
    assert index.tolist() == [[2, 3]]


# ---- checkpoints: experts one by one or as stacks


def _resaved(directory: Path, change: Any) -> Path:
    """The checkpoint with other tensors."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "granitemoe"])
def test_stored_experts_come_back_as_the_model_holds_them(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    ckpt = SafetensorsCheckpoint(save_checkpoint(model, tmp_path), "tiny")
    recipes = match_parameters(ckpt, build_meta_model(ckpt.hf_config()))
    state = model.state_dict()
    assert recipes.keys() == state.keys() and any(len(ref.shape) == 3 for ref in recipes.values())
    assert (family == "granitemoe") == (not any("experts.0." in name for name in ckpt.tensors))
    for name, ref in recipes.items():
        assert ref.shape == tuple(state[name].shape)
        np.testing.assert_array_equal(ref.read(ckpt.read), state[name].numpy())
        np.testing.assert_array_equal(ref.read(ckpt.read, 1, 2), state[name].numpy()[1:2])
    ckpt.close()


def _drop(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def _copy(name: str, other: str) -> Any:
    return lambda tensors: tensors.update({other: tensors[name].clone()})


def _cut(name: str) -> Any:
    return lambda tensors: tensors.update({name: tensors[name][:-1].clone()})


_FIRST = "model.layers.0.mlp.experts.0.gate_proj.weight"
_LAST = "model.layers.0.mlp.experts.5.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_drop(_FIRST), r"lacks number 0 of the 6 tensors 'mlp\.experts\.\*\.gate_proj\.weight'"),
        (_drop(_LAST), r"lacks number 5 of the 6 tensors"),
        (_copy(_LAST, _LAST.replace("5", "6")), r"holds a number 6 of the 6 tensors"),
        (_copy(_LAST, _LAST.replace("5", "777777777")), "must be merged or split"),
        (_cut(_FIRST), r"mis-shapes a tensor of model\.layers\.0\.mlp\.experts\.gate_up_proj: .*\[31, 64\]"),
    ],
)
def test_experts_that_do_not_match_the_configuration_are_refused(change: Any, words: str, tmp_path: Path) -> None:
    directory = _resaved(save_checkpoint(tiny_model("qwen3_moe"), tmp_path), change)
    ckpt = SafetensorsCheckpoint(directory, "tiny")
    with pytest.raises(UserError, match=words):
        match_parameters(ckpt, build_meta_model(ckpt.hf_config()))
    ckpt.close()


def test_more_experts_in_the_configuration_than_in_the_file_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tiny_model("granitemoe"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 7}))
    ckpt = SafetensorsCheckpoint(tmp_path, "tiny")
    with pytest.raises(UserError, match=r"mis-shapes .*\[6, 64, 32\] \(the configuration needs \[7, 64, 32\]\)"):
        match_parameters(ckpt, build_meta_model(ckpt.hf_config()))
    ckpt.close()
