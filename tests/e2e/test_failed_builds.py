"""Builds of a good model that cannot end well: they leave an older plan as it was, and none under a new name."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_build_process import OLDER, refused_build, run_build
from e2e_harness import assert_refused
from families import VOCAB, save_checkpoint, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers

from llmc.codegen.plan_writer import PlanWriter
from llmc.runtime.plan import Plan

pytestmark = pytest.mark.e2e

FLAGS = ("--fp32", "--no-eval", "--target", "native")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 6 MB with a tokenizer of words."""
    path = tmp_path_factory.mktemp("checkpoints") / "wide"
    save_checkpoint(tiny_model("llama", intermediate_size=4096), path)
    vocabulary = {f"w{i}": i for i in range(VOCAB - 1)} | {"?": VOCAB - 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def good(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its plan; with it the code is in the cache, so that later builds need no compiler."""
    plan = tmp_path_factory.mktemp("good") / "out" / "engine.plan"
    plan.parent.mkdir()
    done = run_build(checkpoint, plan, *FLAGS)
    assert done.code == 0, done.stderr
    assert list(done.left) == ["engine.plan"]
    assert 5_000_000 < plan.stat().st_size < 30_000_000
    return plan


@pytest.mark.parametrize("limit", [1_000_000, 4_500_000])
def test_a_file_that_may_not_grow(checkpoint: Path, good: Path, tmp_path: Path, limit: int) -> None:
    refused_build(checkpoint, tmp_path, "engine.plan", "cannot be written", flags=FLAGS, file_limit=limit)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True
    ) if shutil.which("mount") else None  # fmt: skip
    if mounted is None or mounted.returncode:
        pytest.skip("this process may not mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk(checkpoint: Path, good: Path, small_disk: Path) -> None:
    refused_build(checkpoint, small_disk, "engine.plan", "No space left on device", flags=FLAGS)


@pytest.mark.parametrize("moment", ["first", "written"])
def test_a_killed_build(checkpoint: Path, good: Path, tmp_path: Path, moment: str) -> None:
    """Killed when the first byte is there, and when all weights are (but the manifest is not)."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "engine.plan").write_bytes(OLDER)
    enough = 0 if moment == "first" else 4_000_000

    def begun() -> bool:
        return any(p.stat().st_blocks * 512 >= enough for p in out.iterdir() if p.name != "engine.plan")

    # Another cache: the compiler has to run, and that gives time.
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(temporary)}
    done = run_build(checkpoint, out / "engine.plan", *FLAGS, env=env, kill_when=begun)
    assert done.code == -9
    _wait_for_the_compilers_of(temporary)  # which nobody told to end
    assert moment == "first" or any(temporary.glob("llmc-*"))
    assert done.left.pop("engine.plan") == OLDER
    assert all(name.startswith(".") for name in done.left), done.left.keys()
    strangers = {".other.tmp": b"not ours", ".notes.LLMC.tmp": b""}
    for name, data in strangers.items():
        (out / name).write_bytes(data)
    again = run_build(checkpoint, out / "engine.plan", *FLAGS, env={"TMPDIR": str(temporary)})
    assert again.code == 0
    assert list(temporary.iterdir()) == []
    assert again.left == strangers | {"engine.plan": good.read_bytes()}, "what the killed build left is gone"


def test_a_build_that_is_told_to_end(checkpoint: Path, good: Path, tmp_path: Path) -> None:
    """SIGTERM: nothing is left beside the older plan, nor in the temporary directory, and no compiler goes on."""
    out, temporary = tmp_path / "out", tmp_path / "tmp"
    out.mkdir()
    temporary.mkdir()
    (out / "engine.plan").write_bytes(OLDER)
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(temporary)}

    def compiling() -> bool:
        return any(temporary.glob("llmc-*/step.cpp")) and len(list(out.iterdir())) > 1

    begun = time.monotonic()
    done = run_build(checkpoint, out / "engine.plan", *FLAGS, env=env, kill_when=compiling, kill_with=signal.SIGTERM)
    assert done.code == 128 + signal.SIGTERM, done.stderr
    assert done.left == {"engine.plan": OLDER} and list(temporary.iterdir()) == []
    commands = [Path(f"/proc/{p}/cmdline").read_bytes() for p in os.listdir("/proc") if p.isdigit() and _alive(p)]
    assert not any(str(tmp_path).encode() in command for command in commands)
    assert time.monotonic() - begun < 60


def _wait_for_the_compilers_of(temporary: Path) -> None:
    """Until no process works below a directory."""
    deadline = time.monotonic() + 120
    while any(_works_in(process, temporary) for process in os.listdir("/proc") if process.isdigit()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _works_in(process: str, directory: Path) -> bool:
    try:
        return directory in Path(os.readlink(f"/proc/{process}/cwd")).parents
    except OSError:
        return False


def _alive(process: str) -> bool:
    return Path(f"/proc/{process}/cmdline").exists()


def test_two_builds_in_one_folder_leave_each_other_alone(tmp_path: Path) -> None:
    """A file whose build lives is locked, and is not taken for a dead one's."""
    with PlanWriter(tmp_path / "a.plan") as first:
        first.add("data", b"1")
        with PlanWriter(tmp_path / "b.plan") as second:
            second.finish({})
        first.finish({})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.plan", "b.plan"]


def test_an_output_is_never_an_input(checkpoint: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)
    out = tmp_path / "out"
    out.mkdir()
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i % VOCAB}" for i in range(60)))
    weights = model / "model.safetensors"
    (out / "hard").hardlink_to(weights)
    (out / "soft").symlink_to(weights)
    before = weights.read_bytes()
    for output in (weights, out / "hard", out / "soft", model / "engine.plan", model / "sub" / ".." / "engine.plan"):
        (model / "sub").mkdir(exist_ok=True)
        done = run_build(model, out / "x", *FLAGS, "-o", str(output))
        assert_refused(done.code, done.stderr, "-o", str(output))
        assert weights.read_bytes() == before and not (model / "engine.plan").exists()
    done = run_build(model, out / "x", "--fp32", "--target", "native", "--eval-text", str(text), "-o", str(text))
    assert_refused(done.code, done.stderr, str(text), "is a file that is read")
    assert text.read_text().startswith("w0 w1")


def test_a_linked_output_is_written_where_it_points(checkpoint: Path, good: Path, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    (elsewhere / "real.plan").write_bytes(OLDER)
    for name, target in (("engine.plan", "real.plan"), ("dangling.plan", "new.plan")):
        (out / name).symlink_to(elsewhere / target)
        done = run_build(checkpoint, out / name, *FLAGS)
        assert done.code == 0 and (out / name).is_symlink()
        assert (elsewhere / target).read_bytes() == good.read_bytes()


def test_a_failed_accuracy_check_writes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i * 37 % VOCAB}" for i in range(60)))
    flags = ("--int8", "--target", "native", "--eval-text", str(text))
    refused_build(checkpoint, tmp_path, "mean KL", "--max-kl", flags=(*flags, "--max-kl", "0"))
    plan = tmp_path / "out" / "engine.plan"
    done = run_build(checkpoint, plan, *flags, "--max-kl", "5")
    assert done.code == 0, done.stderr
    assert 0 < Plan.open(plan).manifest["accuracy"]["mean_kl"] <= 5


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--target", "bogus"), "bogus"),
        (("--target", "cpu:z80"), "cpu:x86-64-v3"),
        (("--max-model-len", "0"), "--max-model-len 0"),
        (("--max-model-len", "129"), "128"),
        (("--max-kl", "0.1"), "--no-eval"),
        (("--cxx", "no-such-compiler"), "no-such-compiler"),
        (("--max-kl", "small"), "--max-kl"),
        (("--int3",), "--int3"),
    ],
    ids=" ".join,
)
def test_flags_that_cannot_be(checkpoint: Path, tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    refused_build(checkpoint, tmp_path, words, flags=(*FLAGS, *flags))


@pytest.mark.parametrize("kind", ["missing", "empty", "not-text", "directory"])
def test_evaluation_texts_that_are_none(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    text = tmp_path / "text.txt"
    if kind == "directory":
        text.mkdir()
    elif kind != "missing":
        text.write_bytes(b"" if kind == "empty" else b"\xff\xfe\xff")
    refused_build(checkpoint, tmp_path, str(text), flags=("--int8", "--target", "native", "--eval-text", str(text)))


def test_outputs_that_cannot_be(checkpoint: Path, tmp_path: Path) -> None:
    """A pipe stands for a device such as /dev/null, which a plan must not take the place of."""
    out = tmp_path / "out"
    out.mkdir()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for output in (out, out / "none" / "engine.plan", pipe, loop, "-", out / ("x" * 300)):
        done = run_build(checkpoint, out / "x", *FLAGS, "-o", str(output))
        assert_refused(done.code, done.stderr, str(output)[:150])
        assert done.left == {}
    assert pipe.is_fifo()
