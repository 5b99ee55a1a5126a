"""Hugging Face directories: what loads is exact, and what is damaged is refused by name before it is read."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from frontend_builders import TINY, matched_names, meta_model, model_of, tiny_llama, write_safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from llmc.errors import UserError
from llmc.frontend.open import match_parameters, open_checkpoint
from llmc.frontend.rawfile import RawFile
from llmc.frontend.safetensors_header import read_header
from llmc.frontend.source import Source

FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {"tie_word_embeddings": True},
    "Qwen2Config": {},
    "Qwen3Config": {"head_dim": 8},
    "MistralConfig": {"sliding_window": 16},
    "Phi3Config": {"pad_token_id": 0},
    "Gemma2Config": {"head_dim": 8},
    "Gemma3TextConfig": {"head_dim": 8},
    "GPT2Config": {},
    "OPTConfig": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Olmo2Config": {},
    "GPTNeoXConfig": {},
}


def open_dir(path: Path) -> Any:
    return open_checkpoint(Source(path, "dir", path.name))


def every_value(ckpt: Any, names: dict[str, str]) -> dict[str, np.ndarray]:
    return {name: ckpt.read(stored) for name, stored in names.items()}


def test_an_adapter_is_no_model_and_is_left_out_beside_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    for name in ("adapter_model.safetensors", "config.json"):
        with pytest.raises(UserError, match=r"holds an adapter .* merge it into org/base with peft"):
            open_dir(tmp_path)
        (tmp_path / name).write_text("{}")
    tiny_llama(tmp_path)
    told: list[str] = []
    open_checkpoint(Source(tmp_path, "dir", "x"), told.append)
    assert told == ["adapter_config.json and its adapter are left out: the base model is built"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_matches_and_reads_exactly(family: str, tmp_path: Path) -> None:
    model = model_of(getattr(transformers, family)(**{**TINY, **FAMILIES[family]}))
    model.save_pretrained(tmp_path)
    ckpt = open_dir(tmp_path)
    names = matched_names(ckpt, meta_model(ckpt))
    expected = model.state_dict()
    assert names.keys() == expected.keys()
    for name, values in every_value(ckpt, names).items():
        np.testing.assert_array_equal(values, expected[name].numpy(), err_msg=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_of_each_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path).to(dtype)
    model.save_pretrained(tmp_path)
    ckpt = open_dir(tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    expected = model.state_dict()[name].float().numpy()
    assert ckpt.read(name, 3, 7).dtype == np.float32
    np.testing.assert_array_equal(ckpt.read(name, 3, 7), expected[3:7])
    np.testing.assert_array_equal(ckpt.read(name, 30), expected[30:])
    assert ckpt.read(name, 5, 5).shape == (0, 48)
    assert list(ckpt.tensors) == sorted(ckpt.tensors)


def test_shards_equal_the_single_file(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="8KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = open_dir(tmp_path / "one"), open_dir(tmp_path / "many")
    assert one.tensors == many.tensors
    for name in one.tensors:
        np.testing.assert_array_equal(one.read(name), many.read(name))


def test_base_model_without_prefix_and_legacy_buffers(tmp_path: Path) -> None:
    model = model_of(transformers.GPT2Config(**TINY))
    model.save_pretrained(tmp_path)
    state = {k.removeprefix("transformer."): v for k, v in load_file(tmp_path / "model.safetensors").items()}
    state["h.0.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.bool)
    state["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(state, tmp_path / "model.safetensors")
    ckpt = open_dir(tmp_path)
    names = matched_names(ckpt, meta_model(ckpt))
    assert names["transformer.h.1.ln_1.weight"] == "h.1.ln_1.weight"
    assert names["lm_head.weight"] == names["transformer.wte.weight"] == "wte.weight"


def edit(path: Path, change: Any) -> None:
    """Rewrites the weights of a directory after `change(state)`."""
    state = load_file(path / "model.safetensors")
    change(state)
    save_file(state, path / "model.safetensors")


def test_both_of_a_tied_pair_equal_means_tied(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    edit(tmp_path, lambda s: s.update({"lm_head.weight": s["model.embed_tokens.weight"].clone()}))
    ckpt = open_dir(tmp_path)
    model = meta_model(ckpt)
    assert matched_names(ckpt, model)["lm_head.weight"] == "model.embed_tokens.weight"
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_different_head_is_untied_as_transformers_does(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    edit(tmp_path, lambda s: s.update({"lm_head.weight": s["model.embed_tokens.weight"] + 1}))
    ckpt = open_dir(tmp_path)
    model = meta_model(ckpt)
    told: list[str] = []
    names = {name: ref.name for name, ref in match_parameters(ckpt, model, told.append).items()}
    assert names["lm_head.weight"] == "lm_head.weight" and "lm_head.weight" in told[0] and "are used" in told[0]
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    np.testing.assert_array_equal(reference.lm_head.weight.detach().numpy(), ckpt.read("lm_head.weight"))


def test_a_head_alone_serves_the_embedding_too(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    edit(tmp_path, lambda s: s.update({"lm_head.weight": s.pop("model.embed_tokens.weight")}))
    ckpt = open_dir(tmp_path)
    assert matched_names(ckpt, meta_model(ckpt))["model.embed_tokens.weight"] == "lm_head.weight"


MISMATCHES = {
    "missing": (lambda s: s.pop("model.norm.weight"), "lacks 1 tensor: model.norm.weight"),
    "extra": (lambda s: s.update({"model.surprise": torch.ones(2)}), "holds 1 tensor: model.surprise"),
    "shape": (lambda s: s.update({"model.norm.weight": torch.ones(33)}), r"model.norm.weight \[33\].*\[32\]"),
    "type": (
        lambda s: s.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}),
        r"norm.weight \(I8\)",
    ),
    "many": (lambda s: [s.pop(k) for k in list(s) if "layers.0" in k], "lacks 9 tensors: .* and 6 more"),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_mismatches_are_named(kind: str, tmp_path: Path) -> None:
    change, message = MISMATCHES[kind]
    tiny_llama(tmp_path)
    edit(tmp_path, change)
    ckpt = open_dir(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        matched_names(ckpt, meta_model(ckpt))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_are_refused_by_name(value: float, tmp_path: Path) -> None:
    tiny_llama(tmp_path)

    def spoil(state: dict[str, torch.Tensor]) -> None:
        state["model.norm.weight"][7] = value

    edit(tmp_path, spoil)
    ckpt = open_dir(tmp_path)
    ckpt.read("model.norm.weight", 0, 7)
    with pytest.raises(UserError, match=r"model\.norm\.weight.*NaN or Inf"):
        ckpt.read("model.norm.weight", 7, 8)


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE: dict[str, tuple[Any, bytes, int | None, str]] = {
    "2^60 elements": (
        {"w": {**F32, "shape": [1 << 60]}},
        bytes(8),
        None,
        "w in .*needs 4611686018427387904 bytes",
    ),
    "2^60 bytes": (
        {"w": {"dtype": "F32", "shape": [1 << 58], "data_offsets": [0, 1 << 60]}},
        bytes(8),
        None,
        "truncated",
    ),
    "header of 2^60": ({}, b"", 1 << 60, "claims 1152921504606846976 bytes"),
    "header beyond the file": ({}, b"", 50, "truncated inside its header"),
    "cut data": ({"w": F32}, bytes(7), None, "w in .*truncated"),
    "trailing data": ({"w": F32}, bytes(9), None, "1 bytes that belong to no tensor"),
    "overlap": ({"v": F32, "w": F32}, bytes(8), None, "w in .*overlaps"),
    "hole": ({"w": {**F32, "data_offsets": [8, 16]}}, bytes(16), None, "w in .*hole"),
    "negative": ({"w": {**F32, "shape": [-2]}}, bytes(8), None, "malformed shape"),
    "boolean": ({"w": {**F32, "shape": [True, 2]}}, bytes(8), None, "malformed shape"),
    "backwards": ({"w": {**F32, "data_offsets": [8, 0]}}, bytes(8), None, "malformed data_offsets"),
    "one offset": ({"w": {**F32, "data_offsets": [0]}}, bytes(8), None, "malformed data_offsets"),
    "wrong size": ({"w": {**F32, "shape": [3]}}, bytes(8), None, "needs 12 bytes, but the header gives 8"),
    "unknown type": ({"w": {**F32, "dtype": "F31"}}, bytes(8), None, "unknown type 'F31'"),
    "no object": ({"w": 3}, bytes(8), None, "unknown type"),
    "a list": (b"[1]", b"", None, "not an object"),
    "no JSON": (b"{nonsense", b"", None, "damaged safetensors header"),
    "deep": (b"[" * 100_000, b"", None, "damaged safetensors header"),
    "twice": (
        b'{"w":%s,"w":%s}' % ((json.dumps(F32).encode(),) * 2),
        bytes(8),
        None,
        "lists a tensor twice: w",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(case: str, tmp_path: Path) -> None:
    header, data, length, message = HOSTILE[case]
    write_safetensors(tmp_path / "x.safetensors", header, data, length)
    with pytest.raises(UserError, match=message):
        read_header(RawFile(tmp_path / "x.safetensors"))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut.safetensors"
    save_file({"a": torch.ones(3), "b": torch.zeros(2, 2)}, whole)
    content = whole.read_bytes()
    for size in range(len(content)):
        cut.write_bytes(content[:size])
        with pytest.raises(UserError):
            read_header(RawFile(cut))


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_damaged_file_is_read_right_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    content = bytearray(_sample())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "fuzz.safetensors"
    path.write_bytes(content)
    try:
        found = read_header(RawFile(path))
    except UserError:
        return
    assert sum(stored.end - stored.begin for stored in found.values()) <= len(content)


def _sample() -> bytes:
    header = json.dumps({"w": F32, "v": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [8, 16]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(16)


def test_a_missing_shard_and_a_stray_name_are_named(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "m").save_pretrained(tmp_path / "s", max_shard_size="8KB")
    shards = sorted((tmp_path / "s").glob("*.safetensors"))
    shutil.copytree(tmp_path / "s", tmp_path / "twice")
    shutil.copy(shards[0], tmp_path / "twice" / shards[1].name)
    with pytest.raises(UserError, match=r"lacks .*which the index places there"):
        open_dir(tmp_path / "twice")
    shards[1].unlink()
    with pytest.raises(UserError, match=f"{shards[1].name} is missing"):
        open_dir(tmp_path / "s")


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "m").save_pretrained(tmp_path / "s", max_shard_size="8KB")
    first, second = sorted((tmp_path / "s").glob("*.safetensors"))[:2]
    both = load_file(second) | dict(list(load_file(first).items())[:1])
    save_file(both, second)
    with pytest.raises(UserError, match="stored twice"):
        open_dir(tmp_path / "s")


@pytest.mark.parametrize("shard", ["../evil.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", 3])
def test_an_index_stays_in_its_directory(shard: Any, tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(UserError, match="no safetensors file beside it"):
        open_dir(tmp_path)


def test_pickle_is_refused_with_the_way_out(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pickle \(pytorch_model.bin\).*save_pretrained"):
        open_dir(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match="no weights"):
        open_dir(tmp_path)


CONFIGS = {
    "no file": (None, "no config.json"),
    "not JSON": ("{", "not valid JSON"),
    "a list": ("[]", "must hold a JSON object"),
    "no type": ("{}", "no model_type"),
    "unknown": ('{"model_type": "zorg"}', "'zorg' is unknown"),
    "remote": ('{"model_type": "zorg", "auto_map": {"AutoConfig": "evil.X"}}', "remote code is never run"),
    "quantised": (
        '{"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes"}}',
        "quantised with bitsandbytes, which is not supported: give",
    ),
    "nonsense": ('{"model_type": "llama", "hidden_size": "wide"}', "not a valid llama configuration"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_bad_configurations(case: str, tmp_path: Path) -> None:
    text, message = CONFIGS[case]
    tiny_llama(tmp_path)
    (tmp_path / "config.json").unlink()
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=message):
        open_dir(tmp_path)


def test_old_and_new_configurations_are_one(tmp_path: Path) -> None:
    tiny_llama(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    new = json.loads((tmp_path / "config.json").read_text())
    assert new["rope_parameters"]["rope_theta"] == 5e5
    first = open_dir(tmp_path).config
    old = {k: v for k, v in new.items() if k not in ("rope_parameters", "dtype", "transformers_version")}
    old |= {"rope_theta": 5e5, "torch_dtype": new["dtype"], "transformers_version": "4.40.0"}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert open_dir(tmp_path).config == first


def test_the_digest_follows_content_not_place(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "README.md").write_text("not part of the model")
    first = open_dir(tmp_path / "a").digest
    assert open_dir(tmp_path / "b").digest == first
    (tmp_path / "b" / "chat_template.jinja").write_text("{{ messages }}")
    assert open_dir(tmp_path / "b").digest != first
    edit(tmp_path / "a", lambda s: s.update({"model.norm.weight": s["model.norm.weight"] + 1}))
    assert open_dir(tmp_path / "a").digest != first
