"""Pages that nobody holds, but that are kept as their content may be asked for again; which of them goes first."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Literal, get_args

Eviction = Literal["lru", "lfu", "fifo"]
EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)
_SLACK = 64


class KeptPages:
    """lru: the page that was given back first goes first. lfu: the one that was found least often, of those the one
    given back first. fifo: the one whose content is oldest."""

    def __init__(self, eviction: Eviction) -> None:
        self._eviction = eviction
        self._clock = 0
        self._born: dict[int, int] = {}
        self._finds: dict[int, int] = {}
        self._keys: dict[int, tuple[int, int]] = {}
        # By rising key; what `find` has removed from `_keys` stays until it comes up, or there is too much of it.
        self._heap: list[tuple[tuple[int, int], int]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, page: int) -> bool:
        return page in self._keys

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def fill(self, page: int) -> None:
        """A page has got its content."""
        self._clock += 1
        self._born[page], self._finds[page] = self._clock, 0

    def add(self, page: int) -> None:
        """Keeps a page that was filled."""
        self._clock += 1
        rank = {"lru": 0, "lfu": self._finds[page], "fifo": self._born[page]}[self._eviction]
        self._keys[page] = (rank, self._clock)
        heappush(self._heap, (self._keys[page], page))

    def find(self, page: int) -> None:
        """A page, kept or not, was asked for; it is not kept any more, as somebody holds it now."""
        self._finds[page] += 1
        self._keys.pop(page, None)
        if len(self._heap) > 2 * len(self._keys) + _SLACK:
            self._heap = [(key, page) for page, key in self._keys.items()]
            heapify(self._heap)

    def evict(self) -> int:
        """The page that goes next, out of the books. There must be one."""
        while True:
            key, page = heappop(self._heap)
            if self._keys.get(page) == key:
                del self._keys[page], self._born[page], self._finds[page]
                return page
