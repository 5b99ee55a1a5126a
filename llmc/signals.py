"""How a long command ends when it is told to: SIGTERM unwinds like Ctrl-C, so that what is half done is removed."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_TERMINATED = 128 + signal.SIGTERM


def _unwind(number: int, frame: FrameType | None) -> None:
    raise SystemExit(_TERMINATED)


@contextmanager
def clean_end() -> Iterator[None]:
    """Within it SIGTERM raises SystemExit (143, as a shell reports it) in the main thread."""
    before = signal.signal(signal.SIGTERM, _unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def plain_interrupt() -> Iterator[None]:
    """Within it Ctrl-C ends the process at once. For imports: there is nothing to clean up yet, and libraries that
    catch everything while they are imported would swallow a KeyboardInterrupt."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
