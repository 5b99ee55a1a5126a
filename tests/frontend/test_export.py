"""frontend/export.py: what a traced model holds, and which models are refused with which words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import tiny_config, tiny_model
from transformers import AutoConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from llmc.errors import UserError
from llmc.frontend.export import ATTENTION, ExportedModel, build_meta_model, export_model


def _export(family: str, **overrides: Any) -> ExportedModel:
    return export_model(build_meta_model(tiny_config(family, **overrides)))


def _attention(exported: ExportedModel) -> list[tuple[Any, ...]]:
    """(scale, window, softcap, layer) of every attention, in the order of the graph."""
    return [tuple(n.args[4:8]) for n in exported.graph.nodes if n.target is ATTENTION]


def test_one_attention_per_layer_with_its_own_window_cap_and_scale() -> None:
    assert _attention(_export("llama", num_hidden_layers=3)) == [(0.25, 0, 0.0, i) for i in range(3)]
    assert _attention(_export("mistral")) == [(0.25, 8, 0.0, i) for i in range(2)]
    gemma2 = _export("gemma2", attn_logit_softcapping=30.0, query_pre_attn_scalar=64)
    assert _attention(gemma2) == [(0.125, 8, 30.0, 0), (0.125, 0, 30.0, 1)]
    gemma3 = _export("gemma3_text", layer_types=["full_attention", "sliding_attention"])
    assert _attention(gemma3) == [(0.25, 0, 0.0, 0), (0.25, 8, 0.0, 1)]


def test_no_weight_is_read_and_every_placeholder_is_known() -> None:
    model = build_meta_model(tiny_config("qwen2"))
    parameters = dict(model.named_parameters())
    assert all(p.is_meta for p in parameters.values())
    exported = export_model(model)
    placeholders = {n.name for n in exported.graph.nodes if n.op == "placeholder"}
    assert placeholders == {"tokens", "positions", *exported.parameters, *exported.constants}
    assert set(exported.parameters.values()) == set(parameters)


def test_the_number_of_tokens_stays_symbolic() -> None:
    (attention, _) = (n for n in _export("llama").graph.nodes if n.target is ATTENTION)
    batch, heads, tokens, width = attention.args[0].meta["val"].shape
    assert (batch, heads, width) == (1, 4, 16) and isinstance(tokens, torch.SymInt)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_neox"])
def test_computed_buffers_have_the_values_of_a_loaded_model(family: str) -> None:
    constants = list(_export(family).constants.values())
    wanted = [b for name, b in tiny_model(family).named_buffers() if "original" not in name]
    assert constants and all(any(torch.equal(c, b) for b in wanted) for c in constants)


def test_the_configuration_of_the_caller_stays_as_it_was() -> None:
    config = tiny_config("llama")
    before = config.to_dict()
    build_meta_model(config)
    assert config.to_dict() == before and config._attn_implementation != "llmc"


def test_a_model_that_is_no_causal_language_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"config\.json: transformers cannot build this model: .*ViTConfig"):
        build_meta_model(AutoConfig.for_model("vit"))


def test_a_rope_type_of_one_kind_of_layers_is_refused() -> None:
    config = tiny_config("gemma3_text")
    config.rope_parameters["full_attention"] = {"rope_type": "longrope", "rope_theta": 1e6, "factor": 2.0}
    with pytest.raises(UserError, match="rope type 'longrope' depends on the sequence length"):
        build_meta_model(config)


def test_what_torch_cannot_trace_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_meta_model(tiny_config("llama"))

    def forward(tokens: torch.Tensor, **_: Any) -> Any:
        raise RuntimeError("no trace of this\nand more")

    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises(UserError, match=r"LlamaForCausalLM has .* torch\.export cannot trace: no trace of this$"):
        export_model(model)


def test_a_layer_whose_attention_is_not_seen_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_meta_model(tiny_config("llama"))
    monkeypatch.setattr(model.model.layers[1], "forward", lambda x, **_: x)
    with pytest.raises(UserError, match="found 1 attention nodes for 2 layers"):
        export_model(model)


def _reason(model_type: str, **settings: Any) -> str:
    """Why the architecture of a small configuration is refused."""
    with pytest.raises(UserError, match=r"^llmc cannot build this architecture: ") as caught:
        export_model(build_meta_model(AutoConfig.for_model(model_type, vocab_size=64, **settings)))
    return str(caught.value)


def test_mechanisms_are_named_from_modules_and_configuration() -> None:
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    mixture = _reason("jetmoe", **small, num_local_experts=6, num_key_value_heads=2, kv_channels=16)
    assert "has a mixture of experts of its own kind (6 experts, model.layers.0" in mixture
    assert "state-space or linear-attention layers (backbone.layers.0.mixer)" in _reason(
        "mamba", hidden_size=32, num_hidden_layers=1
    )
    assert "bart has an encoder beside its decoder" in _reason("bart", d_model=32)
    bidirectional = _reason("bert", **small)
    assert "bidirectional attention" in bidirectional and "is_decoder" in bidirectional


def test_a_forward_pass_for_some_numbers_of_tokens_is_no_torch_text(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_meta_model(tiny_config("llama"))
    rotary, table = model.model.rotary_emb.forward, torch.zeros(40, device="meta")
    monkeypatch.setattr(
        model.model.rotary_emb,
        "forward",
        lambda x, position_ids: rotary(x + table[None, : x.shape[1], None], position_ids),
    )
    with pytest.raises(UserError, match="a forward pass that is another one for other numbers of tokens") as caught:
        export_model(model)
    assert "onstraint" not in str(caught.value) and "\n" not in str(caught.value)


def _attend(q_size: int = 8, v_size: int = 8, mask: Any = None, causal: bool = True, **kwargs: Any) -> Any:
    """llmc's attention as transformers finds it."""
    build_meta_model(tiny_config("llama"))
    q, k, v = (torch.empty(1, 2, 5, size, device="meta") for size in (q_size, q_size, v_size))
    module: Any = SimpleNamespace(layer_idx=0, is_causal=causal)
    return ALL_ATTENTION_FUNCTIONS["llmc"](module, q, k, v, mask, **kwargs)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mask": torch.ones(1, 1, 5, 5)}, "passes an explicit attention mask"),
        ({"causal": False}, "is not causal"),
        ({"is_causal": False}, "is not causal"),
        ({"v_size": 4}, "query heads of 8 and value heads of 4"),
    ],
)
def test_attention_that_is_not_understood_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        _attend(**arguments)


def test_attention_gives_tokens_before_heads() -> None:
    out, weights = _attend()
    assert out.shape == (1, 5, 2, 8) and weights is None
