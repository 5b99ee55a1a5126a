"""Progress of a build on the terminal (stderr): bars for long work, one line per stage when asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


class TerminalProgress:
    """Implements `build.Progress` with tqdm, which stays silent in a log: there, stages are printed as lines."""

    def stage(self, name: str) -> None:
        tqdm.write(f"llmc: {name}", file=sys.stderr)

    @contextmanager
    def bar(self, name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        with tqdm(total=total, desc=f"llmc: {name}", unit=unit, unit_scale=True, file=sys.stderr, disable=None) as bar:

            def advance(amount: int) -> None:
                bar.update(amount)

            yield advance
