"""Pages of the KV cache: who holds which, and what is in them.

A page holds the keys and values of `page_size` consecutive positions. The allocator hands pages out one by one. A page
may have several holders. A full page has a hash of its content: of the tokens that its keys and values were computed
from, which are those of the page and all before it. A page whose last holder gives it back is free. If it has a content
that no other page has, it is kept, and can be found by it and shared again, until the room is needed. The allocator
knows nothing of requests or of memory; `check_integrity` proves its books.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence

from llmc.runtime.kept_pages import Eviction, KeptPages


class PoolExhausted(Exception):
    """More pages were asked for than are free. Nothing was allocated."""


def root_hash(salt: bytes) -> bytes:
    """What comes before the first page: only pages of equal salts are shared. No page's hash is ever a root's."""
    return hashlib.blake2b(salt, digest_size=32, person=b"llmc root").digest()


def page_hash(before: bytes, tokens: array[int]) -> bytes:
    """Of a full page with these tokens. before: the hash of the page before it, or `root_hash`. Of 32 bytes, so that
    nobody can make two contents of one hash."""
    return hashlib.blake2b(before + tokens.tobytes(), digest_size=32, person=b"llmc page").digest()


class BlockAllocator:
    """Owns the page numbers 0 .. num_pages-1. Holders are opaque integers (sequence ids)."""

    def __init__(self, num_pages: int, page_size: int, eviction: Eviction = "lru") -> None:
        """Starts with every page free. Raises ValueError unless both numbers are positive."""
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a KV pool needs pages: num_pages={num_pages}, page_size={page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        # A stack: the page freed last is handed out first, as it is the likeliest to be in a cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._holders: list[set[int]] = [set() for _ in range(num_pages)]
        self._kept = KeptPages(eviction)
        self._contents: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody holds: those that are kept are among them."""
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    @property
    def usage(self) -> float:
        """Used pages as a fraction of all, 0 to 1."""
        return self.num_used / self.num_pages

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold the keys and values of `num_tokens` positions."""
        return -(-num_tokens // self.page_size)

    def allocate(self, holder: int, count: int) -> list[int]:
        """Takes `count` free pages for `holder`. Raises PoolExhausted, and then takes none."""
        if count > self.num_free:
            raise PoolExhausted(f"{count} pages asked for, {self.num_free} of {self.num_pages} free")
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._holders[page].add(holder)
        return pages

    def _evict(self) -> int:
        page = self._kept.evict()
        del self._pages[self._contents.pop(page)]
        return page

    def find(self, content: bytes) -> int | None:
        """The page that has a content, in use or kept."""
        return self._pages.get(content)

    def share(self, holder: int, pages: Iterable[int]) -> None:
        """Makes `holder` one more holder of pages that were found by their content. Raises ValueError for one that has
        none or that it holds."""
        for page in pages:
            if page not in self._contents or holder in self._holders[page]:
                raise ValueError(f"page {page} belongs to {self._names(page)}, it cannot be shared with {holder}")
            if self._pages[self._contents[page]] == page:
                self._kept.find(page)
            self._holders[page].add(holder)

    def free(self, holder: int, pages: Iterable[int]) -> None:
        """Gives pages back. Raises ValueError on a page that `holder` does not hold."""
        for page in pages:
            if holder not in self._holders[page]:
                raise ValueError(f"page {page} belongs to {self._names(page)}, not to {holder}")
            self._holders[page].remove(holder)
            if self._holders[page]:
                continue
            content = self._contents.get(page)
            if content is not None and self._pages[content] == page:
                self._kept.add(page)
            else:
                self._contents.pop(page, None)
                self._free.append(page)

    def references(self, page: int) -> int:
        """How many hold a page."""
        return len(self._holders[page])

    def seal(self, page: int, content: bytes) -> None:
        """Says what a page holds, by `page_hash`, now that it is full. Raises ValueError for one that is free, or was
        sealed with another content."""
        if not self._holders[page] or self._contents.get(page, content) != content:
            raise ValueError(f"page {page}, which belongs to {self._names(page)}, cannot be sealed")
        if page in self._contents:
            return
        self._contents[page] = content
        if self._pages.setdefault(content, page) == page:
            self._kept.fill(page)

    def content(self, page: int) -> bytes | None:
        """What a sealed page holds."""
        return self._contents.get(page)

    def check_integrity(self, tables: Mapping[int, Sequence[int]]) -> None:
        """Raises AssertionError unless each page is free, kept or held by exactly those in whose table it is (`tables`:
        holder -> its pages, each once), and each content can be found."""
        holders: list[set[int]] = [set() for _ in range(self.num_pages)]
        for holder, pages in tables.items():
            for page in pages:
                if holder in holders[page]:
                    raise AssertionError(f"page {page} is owned by {holder} and by {holder}")
                if holder not in self._holders[page]:
                    raise AssertionError(f"page {page} is recorded for {self._names(page)}, held by {holder}")
                holders[page].add(holder)
        held = {page for page in range(self.num_pages) if holders[page]}
        free = {*self._free, *self._kept}
        if len(free) != self.num_free:
            raise AssertionError("the free list holds a page twice")
        if overlap := free & held:
            raise AssertionError(f"pages both free and owned: {sorted(overlap)}")
        if leaked := set(range(self.num_pages)) - free - held:
            raise AssertionError(f"leaked pages: {sorted(leaked)}")
        if lost := [page for page in held if holders[page] != self._holders[page]]:
            raise AssertionError(f"pages recorded for more than hold them: {sorted(lost)}")
        if len(held) != self.num_used:
            raise AssertionError(f"the gauge says {self.num_used} pages in use, {len(held)} are owned")
        if stale := self._contents.keys() - held - set(self._kept):
            raise AssertionError(f"free pages with a content: {sorted(stale)}")
        found = {page: content for content, page in self._pages.items()}
        if found.items() - self._contents.items() or set(self._contents.values()) - self._pages.keys():
            raise AssertionError("the pages that are found by content do not have it")
        if unfound := set(self._kept) - found.keys():
            raise AssertionError(f"pages that are kept and not found: {sorted(unfound)}")

    def _names(self, page: int) -> str:
        return ", ".join(map(str, sorted(self._holders[page]))) or "None"
