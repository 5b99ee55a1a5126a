"""Temporary files of plans: locked while their build lives, marked, and removed by the next build when it does not.

A build that is killed leaves its file behind. The lock goes with the process, whatever ended it, so a marked file that
nobody holds is of a dead build.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

from llmc.scratch import lock, remove_dead_directories

log = logging.getLogger(__name__)
MARK = b"LLMCPART"
"""The first bytes of an unfinished plan, where a finished one has its magic."""
_PATTERN = ".*.tmp"


def open_unfinished(path: Path) -> tuple[int, str]:
    """(file descriptor, name) of a new, locked and marked file beside `path`. Removes those of dead builds there, and
    their directories in $TMPDIR.

    Raises OSError when the directory cannot be written.
    """
    remove_dead(path.absolute().parent)
    remove_dead_directories()
    fd, name = tempfile.mkstemp(prefix=f".{path.name[:200]}.", suffix=".tmp", dir=path.absolute().parent)
    try:
        lock(fd)
        os.write(fd, MARK)
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        os.unlink(name)
        raise
    return fd, name


def remove_dead(directory: Path) -> None:
    """Removes the unfinished plans in a directory whose builds are dead."""
    for path in directory.glob(_PATTERN):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # gone, or not ours to touch
        try:
            if os.read(fd, len(MARK)) == MARK and lock(fd):
                path.unlink()
                log.info("removed %s, which a killed build had left", path)
        except OSError as error:
            log.warning("%s: cannot be removed: %s", path, error)
        finally:
            os.close(fd)
