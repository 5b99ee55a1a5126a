"""llmc/scratch.py: a build's directories go with it, a killed build's with the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from llmc.scratch import MARK, remove_dead_directories, scratch_directory

_BUILD = """
import sys
from pathlib import Path
from llmc.scratch import scratch_directory
with scratch_directory(Path(sys.argv[1])) as path:
    (path / "inner").mkdir()
    (path / "inner" / "file").write_bytes(b"x")
    (path / "link").symlink_to(sys.argv[1])
    print(path, flush=True)
    sys.stdin.read()
"""


def _start(parent: Path) -> tuple[subprocess.Popen[bytes], Path]:
    process = subprocess.Popen([sys.executable, "-c", _BUILD, str(parent)], stdin=-1, stdout=-1)
    assert process.stdout is not None
    return process, Path(os.fsdecode(process.stdout.readline().strip()))


def test_the_next_build_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    (living, kept), (killed, left) = _start(tmp_path), _start(tmp_path)
    (tmp_path / "llmc-notes").mkdir()  # nobody's
    (tmp_path / "llmc-file").touch()
    (tmp_path / "llmc-link").symlink_to(left)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL and left.exists()
    with scratch_directory(tmp_path) as own:
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
            [own.name, kept.name, "llmc-file", "llmc-link", "llmc-notes"]
        )
        assert (kept / "inner" / "file").exists() and (own / MARK).exists()
    assert not own.exists()
    living.communicate(b"")
    assert living.returncode == 0 and not kept.exists()


def test_what_is_still_written_stays_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that outlived its build writes on; the build after next takes the rest."""
    killed, left = _start(tmp_path)
    killed.kill()
    killed.wait()
    monkeypatch.setattr("llmc.scratch.shutil.rmtree", lambda path, ignore_errors: None)
    remove_dead_directories(tmp_path)
    assert sorted(os.listdir(left)) == [MARK, "inner"]
    monkeypatch.undo()
    remove_dead_directories(tmp_path)
    assert not left.exists()
