"""Whatever happened to a plan, nothing of it runs: `Plan.open` refuses it, and so do `verify` and `serve`."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from e2e_harness import assert_refused, llmc

from llmc.errors import UserError
from llmc.runtime.plan import HEADER, PAGE, Plan, canonical_json

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def copy(int4_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan that tests may damage, when they mend it again."""
    return Path(shutil.copy(int4_plan, tmp_path_factory.mktemp("damaged") / "model.plan"))


class Damage:
    """Alters bytes of a file and puts them back at the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before: list[tuple[int, bytes]] = []

    def __enter__(self) -> Damage:
        return self

    def flip(self, offset: int, bit: int) -> None:
        with self._path.open("r+b") as file:
            file.seek(offset)
            old = file.read(1)
            self._before.append((offset, old))
            file.seek(offset)
            file.write(bytes([old[0] ^ (1 << bit)]))

    def __exit__(self, *_: object) -> None:
        with self._path.open("r+b") as file:
            for offset, old in reversed(self._before):
                file.seek(offset)
                file.write(old)


def _offsets(plan: Plan) -> Iterator[int]:
    """Each field of the header, its padding, the ends and some middle of each segment, padding, manifest."""
    rng = random.Random(0)
    yield from (0, 7, 8, 11, 12, 16, 23, 24, 31, 32, 63, 64, 1000, PAGE - 1)
    for segment in plan.segments.values():
        start, end = segment.offset, segment.offset + segment.size
        yield from (start, rng.randrange(start, end), end - 1)
        if segment.padded_size > segment.size:
            yield from (end, start + segment.padded_size - 1)
    last = plan.path.stat().st_size - 1
    manifest = max(s.offset + s.padded_size for s in plan.segments.values())
    yield from (manifest, last, *(rng.randrange(manifest, last) for _ in range(4)))
    yield from (rng.randrange(PAGE, manifest) for _ in range(12))


def test_a_flipped_bit_anywhere_is_refused(copy: Path) -> None:
    offsets = list(_offsets(Plan.open(copy)))
    assert len(offsets) >= 55
    rng = random.Random(1)
    for offset in offsets:
        bit = rng.randrange(8)
        with Damage(copy) as damage:
            damage.flip(offset, bit)
            with pytest.raises(UserError) as caught:
                Plan.open(copy)
            assert str(copy) in str(caught.value) and "\n" not in str(caught.value), offset
    Plan.open(copy)


@pytest.mark.parametrize("segment", ["code", "weights"])
def test_the_command_line_refuses_an_altered_plan(copy: Path, segment: str) -> None:
    found = next(s for s in Plan.open(copy).segments.values() if s.name.startswith(segment))
    with Damage(copy) as damage:
        damage.flip(found.offset + found.size // 2, 3)
        for arguments in (("verify",), ("serve", "--port", "0"), ("run",)):
            done = llmc(arguments[0], copy, *arguments[1:], *(["x"] if arguments == ("run",) else []))
            assert_refused(done.returncode, done.stderr, str(copy), f"segment {found.name} was altered", "rebuild")
            assert done.stdout == ""


def test_an_intact_plan_verifies(int4_plan: Path) -> None:
    done = llmc("verify", int4_plan)
    assert (done.returncode, done.stderr) == (0, "")
    assert Plan.open(int4_plan).engine_id in done.stdout


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda data: b"", "empty"),
        (lambda data: data[:10], "not an llmc plan"),
        (lambda data: data[:PAGE], "truncated"),
        (lambda data: data[: len(data) // 2], "truncated"),
        (lambda data: data[:-1], "truncated"),
        (lambda data: data + b"\0", "too long"),
        (lambda data: b"GGUF" + data[4:], "not an llmc plan"),
        (lambda data: data[:8] + b"\7\0\0\0" + data[12:], "ABI version 7"),
    ],
    ids=["empty", "10-bytes", "header-only", "half", "last-byte-gone", "a-byte-more", "other-file", "other-abi"],
)
def test_a_file_that_is_no_whole_plan(
    change: Callable[[bytes], bytes], words: str, int4_plan: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged.plan"
    damaged.write_bytes(change(int4_plan.read_bytes()))
    for arguments in (("verify",), ("inspect",), ("serve", "--port", "0")):
        done = llmc(arguments[0], damaged, *arguments[1:])
        assert_refused(done.returncode, done.stderr, str(damaged), words)


def _with_manifest(plan: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A plan with another manifest and digests that fit it: what a hostile or foreign writer could make."""
    data = plan.read_bytes()
    magic, abi, zero, offset, size, _ = HEADER.unpack_from(data)
    manifest = json.loads(data[offset : offset + size])
    change(manifest)
    text = canonical_json(manifest)
    header = HEADER.pack(magic, abi, zero, offset, len(text), sha256(text).digest())
    to.write_bytes(header + data[HEADER.size : offset] + text)
    return to


def test_a_plan_for_another_machine(int4_plan: Path, tmp_path: Path) -> None:
    plan = _with_manifest(int4_plan, tmp_path / "alien.plan", lambda m: m.update(targets=["cpu:riscv64"]))
    for arguments in (("serve", plan, "--port", "0"), ("run", plan, "x")):
        done = llmc(*arguments)
        assert_refused(done.returncode, done.stderr, "cpu:riscv64", "this machine runs", "rebuild")
    assert llmc("inspect", plan).returncode == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["segments"][0].update(offset=0),
        lambda m: m["segments"][0].update(size=2**62),
        lambda m: m["segments"][0].update(size=-4096),
        lambda m: m["segments"][1].update(name=m["segments"][0]["name"]),
        lambda m: m["segments"].pop(),
        lambda m: m.pop("segments"),
        lambda m: m.update(segments=7),
    ],
    ids=["offset", "huge", "negative", "twice", "one-less", "none", "number"],
)
def test_a_manifest_whose_digest_fits_but_which_lies(
    change: Callable[[dict[str, Any]], None], int4_plan: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="rebuild the plan"):
        Plan.open(_with_manifest(int4_plan, tmp_path / "liar.plan", change))


def test_paths_that_hold_no_plan(tmp_path: Path) -> None:
    unreadable = tmp_path / "directory.plan"
    unreadable.mkdir()
    for path, words in ((tmp_path / "none.plan", "no such file"), (unreadable, "cannot be read")):
        for arguments in (("verify",), ("inspect",), ("serve", "--port", "0")):
            done = llmc(arguments[0], path, *arguments[1:])
            assert_refused(done.returncode, done.stderr, str(path), words)
