"""Pages of the KV cache: who owns which.

A page holds the keys and values of `page_size` consecutive positions of one sequence. The allocator hands
pages out one by one from a free list and takes them back; it never moves, shares or evicts one. It promises
that a page has at most one owner and that none is lost; `check_integrity` proves it. It knows nothing of
requests or of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


class PoolExhausted(Exception):
    """More pages were asked for than are free. Nothing was allocated."""


class BlockAllocator:
    """Owns the page numbers 0 .. num_pages-1. Owners are opaque integers (sequence ids)."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        """Starts with every page free. Raises ValueError unless both numbers are positive."""
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a KV pool needs pages: num_pages={num_pages}, page_size={page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        # A stack: the page freed last is handed out first, as it is the likeliest to be in a cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._owner: list[int | None] = [None] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    @property
    def usage(self) -> float:
        """Used pages as a fraction of all, 0 to 1."""
        return self.num_used / self.num_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold the keys and values of `num_tokens` positions."""
        return -(-num_tokens // self.page_size)

    def allocate(self, owner: int, count: int) -> list[int]:
        """Takes `count` free pages for `owner`. Raises PoolExhausted, and then takes none."""
        if count > len(self._free):
            raise PoolExhausted(f"{count} pages asked for, {len(self._free)} of {self.num_pages} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owner[page] = owner
        return pages

    def free(self, owner: int, pages: Iterable[int]) -> None:
        """Gives pages back. Raises ValueError on a page that `owner` does not hold."""
        for page in pages:
            if self._owner[page] != owner:
                raise ValueError(f"page {page} belongs to {self._owner[page]}, not to {owner}")
            self._owner[page] = None
            self._free.append(page)

    def check_integrity(self, tables: Mapping[int, Sequence[int]]) -> None:
        """Raises AssertionError unless free pages and `tables` (owner -> its pages) partition the pool
        exactly.
        """
        seen: dict[int, int] = {}
        for owner, pages in tables.items():
            for page in pages:
                if page in seen:
                    raise AssertionError(f"page {page} is owned by {seen[page]} and by {owner}")
                if self._owner[page] != owner:
                    raise AssertionError(f"page {page} is recorded for {self._owner[page]}, held by {owner}")
                seen[page] = owner
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("the free list holds a page twice")
        if overlap := free & seen.keys():
            raise AssertionError(f"pages both free and owned: {sorted(overlap)}")
        if leaked := set(range(self.num_pages)) - free - seen.keys():
            raise AssertionError(f"leaked pages: {sorted(leaked)}")
        if len(seen) != self.num_used:
            raise AssertionError(f"the gauge says {self.num_used} pages in use, {len(seen)} are owned")
