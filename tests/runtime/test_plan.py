"""runtime/plan.py: no altered, truncated or hostile plan is opened, and none ends in a traceback."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.codegen.plan_writer import PlanWriter
from llmc.errors import UserError
from llmc.runtime import plan as plan_format
from llmc.runtime.plan import ABI_VERSION, CHUNK, HEADER, MAGIC, PAGE, Plan, canonical_json


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A plan of two segments, one of which does not fill its pages."""
    path = tmp_path_factory.mktemp("plan") / "good.plan"
    with PlanWriter(path) as writer:
        writer.add("weights", bytes(range(256)) * 16)
        writer.add("code", b"\x7fELF" * 300)
        writer.finish({"format": "llmc.plan", "model": {"vocab_size": 211}})
    return path.read_bytes()


def _signed(manifest: bytes, body: bytes = b"", offset: int | None = None, size: int | None = None) -> bytes:
    """A file whose header vouches for whatever manifest it has: what a hostile author can make."""
    at = PAGE + len(body) if offset is None else offset
    length = len(manifest) if size is None else size
    header = HEADER.pack(MAGIC, ABI_VERSION, 0, at, length, hashlib.sha256(manifest).digest())
    return header.ljust(PAGE, b"\0") + body + manifest


def _open(path: Path, data: bytes, **options: Any) -> Plan:
    path.write_bytes(data)
    return Plan.open(path, **options)


def test_a_flipped_bit_in_any_byte_is_refused(tmp_path: Path, good: bytes, monkeypatch: Any) -> None:
    monkeypatch.setattr(plan_format.os, "cpu_count", lambda: 1)  # 13,000 times a pool of threads: keep it small
    path = tmp_path / "x.plan"
    path.write_bytes(good)
    fd = os.open(path, os.O_RDWR)
    accepted = []
    try:
        for at in range(len(good)):
            os.pwrite(fd, bytes([good[at] ^ 1 << at % 8]), at)
            try:
                Plan.open(path)
                accepted.append(at)
            except UserError:
                pass  # what every byte must do
            os.pwrite(fd, good[at : at + 1], at)
    finally:
        os.close(fd)
    assert accepted == []
    assert Plan.open(path).segments.keys() == {"weights", "code"}


def test_a_flipped_byte_is_named(tmp_path: Path, good: bytes) -> None:
    manifest = HEADER.unpack_from(good)[3]
    for at, words in {
        0: "not an llmc plan", 8: f"ABI version {ABI_VERSION ^ 1}, this llmc runs {ABI_VERSION}; rebuild",
        12: "header was altered", 100: "header was altered", 40: r"manifest was altered",
        PAGE: "segment weights was altered", 2 * PAGE: "segment code was altered",
        manifest - 1: "segment code was altered", manifest: "manifest was altered",
        len(good) - 1: "manifest was altered",
    }.items():  # fmt: skip
        altered = bytearray(good)
        altered[at] ^= 1
        with pytest.raises(UserError, match=words):
            _open(tmp_path / "x.plan", bytes(altered))


def test_without_verify_segments_are_not_read(tmp_path: Path, good: bytes) -> None:
    altered = bytearray(good)
    altered[PAGE] ^= 1
    plan = _open(tmp_path / "x.plan", bytes(altered), verify=False)
    with pytest.raises(UserError, match="segment weights"):
        plan.verify()


@pytest.mark.parametrize("keep", [0, 1, 63, 64, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE, 3 * PAGE + 9, -1])
def test_a_truncated_plan_is_refused(tmp_path: Path, good: bytes, keep: int) -> None:
    words = "empty file" if keep == 0 else "not an llmc plan" if 0 < keep < PAGE else "truncated"
    with pytest.raises(UserError, match=rf"x\.plan: {words}"):
        _open(tmp_path / "x.plan", good[:keep])


@pytest.mark.parametrize("tail", [b"\0", b"\n", b"\0" * PAGE])
def test_appended_bytes_are_refused(tmp_path: Path, good: bytes, tail: bytes) -> None:
    with pytest.raises(UserError, match=f"{len(tail)} bytes too long"):
        _open(tmp_path / "x.plan", good + tail)


def test_other_files_are_refused(tmp_path: Path, good: bytes) -> None:
    for data in (b"PK\x03\x04".ljust(9000, b"\0"), b"GGUF".ljust(PAGE, b"\0"), b"x"):
        with pytest.raises(UserError, match="not an llmc plan"):
            _open(tmp_path / "x.plan", data)
    for path, words in ((tmp_path / "none.plan", "no such file"), (tmp_path, "cannot be read: Is a directory")):
        with pytest.raises(UserError, match=words):
            Plan.open(path)


@pytest.mark.parametrize("abi", [0, ABI_VERSION + 1, 2**32 - 1])
def test_another_abi_version_says_so_first(tmp_path: Path, good: bytes, abi: int) -> None:
    altered = good[:8] + abi.to_bytes(4, "little") + bytes(len(good) - 12)
    with pytest.raises(UserError, match=f"ABI version {abi}, this llmc runs {ABI_VERSION}; rebuild"):
        _open(tmp_path / "x.plan", altered)


BODY = bytes(range(256)) * 32  # two pages


def _segment(**changes: Any) -> dict[str, Any]:
    digest = hashlib.sha256(BODY[:PAGE]).hexdigest()
    return {"name": "a", "offset": PAGE, "size": 4000, "sha256": [digest]} | changes


SECOND = _segment(name="b", offset=2 * PAGE, sha256=[hashlib.sha256(BODY[PAGE:]).hexdigest()])
OWN = {"abi": ABI_VERSION}
HOSTILE: dict[str, Any] = {
    "no segments": OWN, "segments null": OWN | {"segments": None}, "segments a number": OWN | {"segments": 3},
    "segments a string": OWN | {"segments": "ab"}, "segments an object": OWN | {"segments": {"a": 1}},
    "no ABI version": {"segments": [_segment(), SECOND]},
    "another ABI version": {"abi": ABI_VERSION + 1, "segments": [_segment(), SECOND]},
    "manifest a list": [], "manifest a string": "segments", "manifest null": None,
    "not enough segments": OWN | {"segments": [_segment()]}, "none at all": OWN | {"segments": []},
    "name twice": OWN | {"segments": [_segment(), SECOND | {"name": "a"}]},
    "overlapping": OWN | {"segments": [_segment(size=2 * PAGE), SECOND]},
    "in the header": OWN | {"segments": [_segment(offset=0), SECOND]},
    "the other way round": OWN | {"segments": [SECOND, _segment()]},
    "past the end": OWN | {"segments": [_segment(), SECOND | {"size": PAGE + 1}]},
    "one past the next": OWN | {"segments": [_segment(offset=2 * PAGE)]},
    "unaligned": OWN | {"segments": [_segment(offset=PAGE + 1), SECOND]},
    "negative size": OWN | {"segments": [_segment(size=-1, sha256=[]), _segment(), SECOND]},
    "very negative size": OWN | {"segments": [_segment(size=-PAGE, sha256=[]), _segment(), SECOND]},
    "negative offset": OWN | {"segments": [_segment(offset=-PAGE), SECOND]},
    "size 2^60": OWN | {"segments": [_segment(size=2**60), SECOND]},
    "offset 2^60": OWN | {"segments": [_segment(), SECOND | {"offset": 2**60}]},
    "size 2^80": OWN | {"segments": [_segment(size=2**80), SECOND]},
    "no digest": OWN | {"segments": [_segment(sha256=[]), SECOND]},
    "two digests": OWN | {"segments": [_segment(sha256=_segment()["sha256"] * 2), SECOND]},
    "digest a string": OWN | {"segments": [_segment(sha256=_segment()["sha256"][0]), SECOND]},
    "digest a number": OWN | {"segments": [_segment(sha256=[7]), SECOND]},
    "digest null": OWN | {"segments": [_segment(sha256=None), SECOND]},
    "wrong digest": OWN | {"segments": [_segment(sha256=["0" * 64]), SECOND]},
    "size a word": OWN | {"segments": [_segment(size="big"), SECOND]},
    "size null": OWN | {"segments": [_segment(size=None), SECOND]},
    "size infinite": OWN | {"segments": [_segment(size=float("inf")), SECOND]},
    "size not a number": OWN | {"segments": [_segment(size=float("nan")), SECOND]},
    "offset infinite": OWN | {"segments": [_segment(offset=float("-inf")), SECOND]},
    "entry a list": OWN | {"segments": [[1, 2], SECOND]},
    "key missing": OWN | {"segments": [{"name": "a", "offset": PAGE}, SECOND]},
}  # fmt: skip


def test_the_plan_that_the_hostile_ones_vary_is_good(tmp_path: Path) -> None:
    manifest = canonical_json(OWN | {"segments": [_segment(), SECOND]})
    assert _open(tmp_path / "x.plan", _signed(manifest, BODY)).segments.keys() == {"a", "b"}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_a_user_error(tmp_path: Path, name: str) -> None:
    manifest = json.dumps(HOSTILE[name]).encode()
    with pytest.raises(UserError, match=r"^[^\n]*x\.plan: [^\n]*rebuild the plan$"):
        _open(tmp_path / "x.plan", _signed(manifest, BODY))


_ABI = f'{{"abi": {ABI_VERSION}, '.encode()


@pytest.mark.parametrize(
    "manifest",
    [
        b"", b"{", b"\xff\xfe", b'{"segments": [}', b"[" * 200_000, b'{"a":' * 100_000, b"9" * 10_000,
        _ABI + b'"segments": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        _ABI + b'"segments": [{"size": 1e999, "offset": 4096, "name": "a", "sha256": []}]}',
    ],
    ids=["empty", "cut", "no text", "no JSON", "deep", "deep objects", "long number", "deep segments", "overflow"],
)  # fmt: skip
def test_a_manifest_that_is_no_object_is_a_user_error(tmp_path: Path, manifest: bytes) -> None:
    with pytest.raises(UserError, match=r"x\.plan"):
        _open(tmp_path / "x.plan", _signed(manifest))


@pytest.mark.parametrize(
    ("offset", "size"), [(PAGE, 2**60), (2**60, 10), (2**64 - 1, 2**64 - 1), (0, 10), (PAGE, (64 << 20) + 1), (64, 2)]
)
def test_a_header_that_lies_about_the_manifest(tmp_path: Path, offset: int, size: int) -> None:
    with pytest.raises(UserError, match="truncated"):
        _open(tmp_path / "x.plan", _signed(b"{}", offset=offset, size=size))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4)
    | st.sampled_from([0, PAGE, 2 * PAGE, "a", _segment()["sha256"]]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(deadline=None, max_examples=100, derandomize=True)
@given(changes=st.dictionaries(st.sampled_from(["name", "offset", "size", "sha256"]), _JSON, min_size=1, max_size=3))
def test_any_value_in_the_segment_table_opens_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]
) -> None:
    manifest = json.dumps({"segments": [_segment(**changes), SECOND]}).encode()
    try:
        plan = _open(tmp_path_factory.mktemp("plan") / "x.plan", _signed(manifest, BODY))
    except UserError:
        return
    first, second = plan.segments.values()  # what is accepted lies where it should
    assert (first.offset, second.offset) == (PAGE, 2 * PAGE) and 0 < first.size <= PAGE
    assert bytes(plan.segment(first.name)) == BODY[: first.size]


def test_a_segment_of_several_chunks_is_checked_in_each(tmp_path: Path) -> None:
    path = tmp_path / "x.plan"
    with PlanWriter(path) as writer:
        writer.add_blocks("weights", 2 * CHUNK + 5, [(0, b"first"), (2 * CHUNK, b"last")])
        writer.finish({})
    assert len(Plan.open(path).segments["weights"].chunks) == 3
    for at in (PAGE, PAGE + CHUNK - 1, PAGE + CHUNK, PAGE + 2 * CHUNK + 4, PAGE + 2 * CHUNK + PAGE - 1):
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 255]))
        with pytest.raises(UserError, match="segment weights was altered"):
            Plan.open(path)
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(byte)
    Plan.open(path)
