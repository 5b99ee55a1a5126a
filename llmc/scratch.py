"""Directories for the time of a build. One that a killed build left behind is removed by the next that makes one there.

While its build lives, a directory holds a file that the build has locked; the lock goes with the process, whatever
ended it. So a directory with such a file that nobody holds is a dead build's.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)
MARK = ".llmc-build"
"""The locked file."""


@contextmanager
def scratch_directory(parent: Path | None = None, prefix: str = "llmc-") -> Iterator[Path]:
    """A new directory, removed with all that is in it at the end. parent: $TMPDIR if not given.

    Raises OSError when it cannot be made.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    remove_dead_directories(parent, prefix)
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    mark = -1
    try:
        mark = os.open(path / f"{MARK}.new", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        lock(mark)
        os.rename(path / f"{MARK}.new", path / MARK)  # nobody sees it unlocked
        yield path
    finally:
        # A process that was killed may leave a tool behind that still writes.
        shutil.rmtree(path, ignore_errors=True)
        if mark >= 0:
            os.close(mark)


def lock(fd: int) -> bool:
    """Whether this process has the file to itself. Where a file system has no locks, nobody's file is dead."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def remove_dead_directories(parent: Path | None = None, prefix: str = "llmc-") -> None:
    """Removes what killed builds have left. The arguments are those of `scratch_directory`."""
    try:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
    except FileNotFoundError:
        return  # no directory can be written: whoever needs one says so
    for path in parent.glob(f"{prefix}*"):
        try:
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue  # not ours to touch
            mark = os.open(path / MARK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # gone, or not a build's
        try:
            if lock(mark) and _remove(path):
                log.info("removed %s, which a killed build had left", path)
        except OSError as error:
            log.warning("%s: cannot be removed: %s", path, error)
        finally:
            os.close(mark)


def _remove(path: Path) -> bool:
    """Whether nothing is left. The mark goes last: what is still written there is the next build's to remove."""
    for entry in path.iterdir():
        if entry.name == MARK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    if os.listdir(path) != [MARK]:
        return False
    shutil.rmtree(path, ignore_errors=True)
    return True
