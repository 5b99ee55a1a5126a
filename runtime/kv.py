"""Pages of the KV cache: who holds which, and what is in them.

A page holds the keys and values of `page_size` consecutive positions. The allocator hands pages out one by one from a
free list. A page may have several holders, and goes back to the list when the last has given it back. A full page has a
hash of its content: of the tokens that its keys and values were computed from, which are those of the page and all
before it. It knows nothing of requests or of memory; `check_integrity` proves its books.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence


class PoolExhausted(Exception):
    """More pages were asked for than are free. Nothing was allocated."""


def page_hash(before: bytes, tokens: array[int]) -> bytes:
    """Of a full page with these tokens. before: the hash of the page before it; of the first, a salt that says what
    else its keys and values depend on. Of 32 bytes, so that nobody can make two contents of one hash."""
    return hashlib.blake2b(before + tokens.tobytes(), digest_size=32).digest()


class BlockAllocator:
    """Owns the page numbers 0 .. num_pages-1. Holders are opaque integers (sequence ids)."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        """Starts with every page free. Raises ValueError unless both numbers are positive."""
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a KV pool needs pages: num_pages={num_pages}, page_size={page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        # A stack: the page freed last is handed out first, as it is the likeliest to be in a cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders: list[set[int]] = [set() for _ in range(num_pages)]
        self._hashes: dict[int, bytes] = {}

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

    def allocate(self, holder: int, count: int) -> list[int]:
        """Takes `count` free pages for `holder`. Raises PoolExhausted, and then takes none."""
        if count > len(self._free):
            raise PoolExhausted(f"{count} pages asked for, {len(self._free)} of {self.num_pages} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page].add(holder)
        return pages

    def share(self, holder: int, pages: Iterable[int]) -> None:
        """Makes `holder` one more holder of pages that are in use. Raises ValueError for one that is free or that it
        holds."""
        for page in pages:
            if not self._holders[page] or holder in self._holders[page]:
                raise ValueError(f"page {page} belongs to {self._names(page)}, it cannot be shared with {holder}")
            self._holders[page].add(holder)

    def free(self, holder: int, pages: Iterable[int]) -> None:
        """Gives pages back. Raises ValueError on a page that `holder` does not hold."""
        for page in pages:
            if holder not in self._holders[page]:
                raise ValueError(f"page {page} belongs to {self._names(page)}, not to {holder}")
            self._holders[page].remove(holder)
            if not self._holders[page]:
                self._hashes.pop(page, None)
                self._free.append(page)

    def references(self, page: int) -> int:
        """How many hold a page."""
        return len(self._holders[page])

    def seal(self, page: int, content: bytes) -> None:
        """Says what a page holds, by `page_hash`, now that it is full. Raises ValueError for one that is free, or was
        sealed with another content."""
        if not self._holders[page] or self._hashes.get(page, content) != content:
            raise ValueError(f"page {page}, which belongs to {self._names(page)}, cannot be sealed")
        self._hashes[page] = content

    def content(self, page: int) -> bytes | None:
        """What a sealed page holds."""
        return self._hashes.get(page)

    def check_integrity(self, tables: Mapping[int, Sequence[int]]) -> None:
        """Raises AssertionError unless each page is free or held by exactly those in whose table it is (`tables`:
        holder -> its pages, each once), and only pages that are held have a content."""
        holders: list[set[int]] = [set() for _ in range(self.num_pages)]
        for holder, pages in tables.items():
            for page in pages:
                if holder in holders[page]:
                    raise AssertionError(f"page {page} is owned by {holder} and by {holder}")
                if holder not in self._holders[page]:
                    raise AssertionError(f"page {page} is recorded for {self._names(page)}, held by {holder}")
                holders[page].add(holder)
        held = {page for page in range(self.num_pages) if holders[page]}
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("the free list holds a page twice")
        if overlap := free & held:
            raise AssertionError(f"pages both free and owned: {sorted(overlap)}")
        if leaked := set(range(self.num_pages)) - free - held:
            raise AssertionError(f"leaked pages: {sorted(leaked)}")
        if lost := [page for page in held if holders[page] != self._holders[page]]:
            raise AssertionError(f"pages recorded for more than hold them: {sorted(lost)}")
        if len(held) != self.num_used:
            raise AssertionError(f"the gauge says {self.num_used} pages in use, {len(held)} are owned")
        if stale := self._hashes.keys() - held:
            raise AssertionError(f"free pages with a content: {sorted(stale)}")

    def _names(self, page: int) -> str:
        return ", ".join(map(str, sorted(self._holders[page]))) or "None"
