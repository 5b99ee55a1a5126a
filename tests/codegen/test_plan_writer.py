"""codegen/plan_writer.py: what was written comes back; what fails leaves nothing behind."""

from __future__ import annotations

import resource
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.codegen import plan_writer
from llmc.codegen.plan_writer import PlanWriter
from llmc.errors import UserError
from llmc.runtime import plan as plan_format
from llmc.runtime.plan import PAGE, Plan


def _files(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "x.plan"
    contents = {"weights": bytes(range(97)) * 128, "empty": b"", "page": b"\xff" * PAGE, "text": "Gürtel".encode()}
    with PlanWriter(path) as writer:
        for name, data in contents.items():
            writer.add(name, data)
        engine_id = writer.finish({"model": {"b": 2, "a": [1.5, None, "ß"]}})
    plan = Plan.open(path)
    assert {name: bytes(plan.segment(name)) for name in plan.segments} == contents
    assert plan.manifest["model"] == {"a": [1.5, None, "ß"], "b": 2} and plan.engine_id == engine_id
    assert plan.text("text") == "Gürtel" and plan.text("missing") is None
    assert [s.offset % PAGE for s in plan.segments.values()] == [0] * 4
    assert _files(tmp_path) == ["x.plan"] and path.stat().st_mode & 0o777 == 0o666 & ~plan_writer._umask()


def test_the_same_content_is_the_same_file(tmp_path: Path) -> None:
    for name, manifest in (("one", {"a": 1, "b": {"c": 2, "d": 3}}), ("two", {"b": {"d": 3, "c": 2}, "a": 1})):
        with PlanWriter(tmp_path / name) as writer:
            writer.add("s", b"data")
            writer.finish(manifest)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@settings(deadline=None, max_examples=40, derandomize=True)
@given(size=st.integers(0, 40_000), cuts=st.lists(st.integers(0, 40_000), max_size=6), seed=st.integers(0, 99))
def test_blocks_in_any_order_with_holes(
    tmp_path_factory: pytest.TempPathFactory, size: int, cuts: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    edges = sorted({0, size, *(c for c in cuts if c < size)})
    blocks = [(a, rng.bytes(b - a)) for a, b in pairwise(edges)]
    blocks = [blocks[i] for i in rng.permutation(len(blocks)) if rng.random() < 0.7]
    wanted, done = bytearray(size), []
    for at, data in blocks:
        wanted[at : at + len(data)] = data
    path = tmp_path_factory.mktemp("plan") / "x.plan"
    with pytest.MonkeyPatch.context() as patch, PlanWriter(path) as writer:
        patch.setattr(plan_writer, "CHUNK", 2 * PAGE)
        patch.setattr(plan_format, "CHUNK", 2 * PAGE)  # a segment of several chunks
        segment = writer.add_blocks("s", size, blocks, done.append)
        assert bytes(writer.map_segment(segment)) == wanted if size else segment.size == 0
        writer.finish({})
        plan = Plan.open(path)
        assert bytes(plan.segment("s")) == wanted and sum(done) == sum(len(d) for _, d in blocks)
        assert len(plan.segments["s"].chunks) == -(-size // (2 * PAGE))


@pytest.mark.parametrize("block", [(-1, b"x"), (8, b"xyz"), (10, b"x"), (0, b"x" * 11)])
def test_a_block_outside_its_segment_is_refused(tmp_path: Path, block: tuple[int, bytes]) -> None:
    with pytest.raises(ValueError, match="segment s: a block outside"), PlanWriter(tmp_path / "x.plan") as writer:
        writer.add_blocks("s", 10, [block])
    assert _files(tmp_path) == []


def test_a_failure_leaves_nothing_and_an_older_plan_untouched(tmp_path: Path) -> None:
    path = tmp_path / "x.plan"
    path.write_bytes(b"an older plan")

    def blocks() -> Any:
        yield 0, b"some"
        raise ZeroDivisionError

    for error in (ZeroDivisionError, KeyboardInterrupt):
        with pytest.raises(error), PlanWriter(path) as writer:
            if error is KeyboardInterrupt:
                raise KeyboardInterrupt
            writer.add_blocks("s", 4000, blocks())
        assert _files(tmp_path) == ["x.plan"] and path.read_bytes() == b"an older plan"


def test_a_plan_that_is_not_finished_does_not_appear(tmp_path: Path) -> None:
    with PlanWriter(tmp_path / "x.plan") as writer:
        writer.add("s", b"data")
        assert [n for n in _files(tmp_path) if not n.startswith(".")] == []
    assert _files(tmp_path) == []


def test_a_manifest_that_is_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"), PlanWriter(tmp_path / "x.plan") as writer:
        writer.finish({"ratio": float("nan")})
    assert _files(tmp_path) == []


@pytest.mark.parametrize("path", ["missing/x.plan", "file/x.plan"])
def test_a_directory_that_cannot_be_written(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"x\.plan: cannot be written: (No such|Not a)"):
        PlanWriter(tmp_path / path)


_FULL_DISK = """
import resource, sys
from pathlib import Path
from llmc.codegen.plan_writer import PlanWriter
from llmc.errors import UserError
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    with PlanWriter(Path(sys.argv[1])) as writer:
        writer.add("weights", b"w" * 20000)
        writer.add("code", b"c" * 100)
        writer.finish({"words": "m" * 6000})
except UserError as error:
    sys.exit(f"refused: {error}")
"""


# 4096 of header, 20480 and 4096 of segments, then the manifest: the limit bites in each of them, and in the last byte
@pytest.mark.parametrize("limit", [0, 5000, 24600, 28672, 30000, 34000, None])
def test_a_full_disk_is_one_line_and_leaves_no_file(tmp_path: Path, limit: int | None) -> None:
    path = tmp_path / "x.plan"
    path.write_bytes(b"an older plan")
    amount = str(resource.RLIM_INFINITY if limit is None else limit)
    done = subprocess.run([sys.executable, "-c", _FULL_DISK, str(path), amount], capture_output=True, text=True)
    assert _files(tmp_path) == ["x.plan"], done.stderr
    if limit is None:
        assert done.returncode == 0 and len(Plan.open(path).segments) == 2
    else:
        assert done.stderr.strip() == f"refused: {path}: cannot be written: File too large"
        assert path.read_bytes() == b"an older plan"
