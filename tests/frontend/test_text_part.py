"""Multimodal checkpoints: the language model in them is built alone, under whatever names, and the rest is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from frontend_builders import TINY
from safetensors.torch import load_file, save_file
from transformers import CLIPVisionConfig, Gemma3Config, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from llmc.errors import UserError
from llmc.frontend.config import build_config
from llmc.frontend.export import build_meta_model
from llmc.frontend.open import match_parameters, open_checkpoint
from llmc.frontend.source import Source
from llmc.frontend.text_part import left_out, text_config, text_tensors

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
          "image_size": 16, "patch_size": 8}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A tiny model of images and text, and its checkpoint. Its vision tower has layers of the same names."""
    torch.manual_seed(0)
    config = LlavaConfig(vision_config=CLIPVisionConfig(**VISION), text_config=LlamaConfig(**TINY), image_token_id=63)
    model = LlavaForConditionalGeneration(config).eval()
    path = tmp_path_factory.mktemp("whole")
    model.save_pretrained(path)
    return model, path


def _rename(source: Path, path: Path, changes: dict[str, str]) -> Path:
    """The checkpoint with the beginnings of its tensors' names changed."""
    (path / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    for old, new in changes.items():
        tensors = {new + n.removeprefix(old) if n.startswith(old) else n: t for n, t in tensors.items()}
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("form", ["model.language_model.", "language_model.model.", "a.b.c."])
def test_the_text_part_is_found_wherever_it_lies(whole: Any, tmp_path: Path, form: str) -> None:
    model, source = whole
    (place,) = {
        n[: -len("embed_tokens.weight")] for n in load_file(source / "model.safetensors") if "embed_tokens" in n
    }
    ckpt = open_checkpoint(Source(_rename(source, tmp_path, {place: form}), "dir", "whole"))
    told: list[str] = []
    text = build_meta_model(ckpt.hf_config())
    recipes = match_parameters(ckpt, text, told.append)
    assert ckpt.is_multimodal and ckpt.config["max_position_embeddings"] == TINY["max_position_embeddings"]
    assert recipes.keys() == text.state_dict().keys()
    wanted = model.state_dict()
    for name, recipe in recipes.items():
        stored = name if name.startswith("lm_head") else f"model.language_model.{name.removeprefix('model.')}"
        assert torch.equal(torch.from_numpy(recipe.read(ckpt.read)), wanted[stored])
    (line,) = told
    assert "left out: " in line and "vision_tower (" in line and "multi_modal_projector (4 tensors)" in line
    assert "language_model" not in line and "lm_head" not in line


def test_a_text_part_that_is_not_whole_is_refused(whole: Any, tmp_path: Path) -> None:
    path = _rename(whole[1], tmp_path, {})
    tensors = load_file(path / "model.safetensors")
    (lost,) = [name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight")]
    del tensors[lost]
    save_file(tensors, path / "model.safetensors")
    ckpt = open_checkpoint(Source(path, "dir", "whole"))
    with pytest.raises(UserError, match=r"lacks 1 tensor: model\.layers\.1\.mlp\.up_proj\.weight"):
        match_parameters(ckpt, build_meta_model(ckpt.hf_config()))


def test_a_text_part_that_is_no_class_of_its_own_is_refused_as_multimodal() -> None:
    config = build_config({"model_type": "qwen2_vl"}, "config.json")
    with pytest.raises(UserError, match=r"^config\.json: qwen2_vl is multimodal \(text and vision\), .*qwen2_vl_text"):
        text_config(config, "config.json")


def test_the_configuration_of_text_alone_stays_itself() -> None:
    config = build_config({"model_type": "llama"}, "config.json")
    assert text_config(config, "config.json") is config


def test_whether_the_head_is_tied_is_said_by_the_whole() -> None:
    for tied in (True, False):
        assert text_config(Gemma3Config(tie_word_embeddings=tied), "config.json").tie_word_embeddings is tied


def test_the_place_of_the_text_part_is_where_most_of_its_names_are() -> None:
    parameters = ["model.layers.0.q.weight", "model.layers.0.k.weight", "model.norm.weight", "lm_head.weight"]
    vision = ["tower.layers.0.q.weight", "tower.layers.0.k.weight", "tower.layers.0.v.weight"]
    names = [
        "x.lm_head.weight",
        "x.y.layers.0.q.weight",
        "x.y.layers.0.k.weight",
        "x.y.norm.weight",
        "x.y.odd",
        *vision,
    ]
    found = text_tensors(names, parameters, "model")
    assert found == {"lm_head.weight": "x.lm_head.weight", "model.layers.0.q.weight": "x.y.layers.0.q.weight",
                     "model.layers.0.k.weight": "x.y.layers.0.k.weight", "model.norm.weight": "x.y.norm.weight",
                     "model.odd": "x.y.odd"}  # fmt: skip
    assert left_out(names, found.values()) == "tower (3 tensors)"


def test_numbers_that_json_does_not_have(tmp_path: Path) -> None:
    from llmc.frontend.config import read_json

    (tmp_path / "config.json").write_text(json.dumps({"limit": [0.0, {"__float__": "Infinity"}], "n": {"a": 1}}))
    assert read_json(tmp_path / "config.json") == {"limit": [0.0, float("inf")], "n": {"a": 1}}
    for wrong in ('"many"', "[]", '{"a": 1}'):
        (tmp_path / "config.json").write_text('{"limit": {"__float__": ' + wrong + "}}")
        with pytest.raises(UserError, match="is not valid JSON"):
            read_json(tmp_path / "config.json")
