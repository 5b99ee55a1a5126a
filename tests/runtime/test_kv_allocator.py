"""The page allocator: every page is free or held by those that its books name, always."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llmc.runtime.kept_pages import EVICTIONS, Eviction, KeptPages
from llmc.runtime.kv import BlockAllocator, PoolExhausted, page_hash, root_hash


def test_pages_for_rounds_up() -> None:
    allocator = BlockAllocator(4, 16)
    assert [allocator.pages_for(n) for n in (0, 1, 16, 17, 32, 33)] == [0, 1, 1, 2, 2, 3]


def test_exhaustion_takes_nothing() -> None:
    allocator = BlockAllocator(4, 16)
    held = allocator.allocate(1, 3)
    with pytest.raises(PoolExhausted):
        allocator.allocate(2, 2)
    assert allocator.num_free == 1
    allocator.check_integrity({1: held})


def test_a_page_is_freed_by_its_owner_only_and_once() -> None:
    allocator = BlockAllocator(4, 16)
    pages = allocator.allocate(1, 1)
    with pytest.raises(ValueError, match="belongs to 1"):
        allocator.free(2, pages)
    allocator.free(1, pages)
    with pytest.raises(ValueError, match="belongs to None"):
        allocator.free(1, pages)
    allocator.check_integrity({})


@pytest.mark.parametrize(
    "tables, message",
    [
        ({}, "leaked"),
        ({1: [3, 3]}, "owned by 1 and by 1"),
        ({1: [3], 2: [3]}, "recorded for 1, held by 2"),
        ({1: [2]}, "None"),
    ],
)
def test_integrity_check_can_fail(tables: dict[int, list[int]], message: str) -> None:
    allocator = BlockAllocator(4, 16)
    (page,) = allocator.allocate(1, 1)
    tables = {owner: [page if p == 3 else (page + 1) % 4 for p in pages] for owner, pages in tables.items()}
    with pytest.raises(AssertionError, match=message):
        allocator.check_integrity(tables)


def test_a_shared_page_is_held_until_its_last_holder_gives_it_back_and_kept_until_it_is_needed() -> None:
    allocator = BlockAllocator(4, 16)
    first, second = allocator.allocate(1, 2)
    allocator.seal(first, b"x")
    allocator.share(2, [first])
    assert allocator.references(first) == 2 and allocator.references(second) == 1 and allocator.num_used == 2
    allocator.free(1, [first, second])
    assert allocator.references(first) == 1 and allocator.num_used == 1
    with pytest.raises(AssertionError, match="leaked"):
        allocator.check_integrity({})
    allocator.check_integrity({2: [first]})
    allocator.free(2, [first])
    assert (allocator.num_free, allocator.num_kept, allocator.usage) == (4, 1, 0.0)
    assert allocator.find(b"x") == first
    assert first not in allocator.allocate(3, 3) and allocator.find(b"x") == first
    assert allocator.allocate(3, 1) == [first] and allocator.find(b"x") is None and allocator.content(first) is None
    allocator.check_integrity({3: [0, 1, 2, 3]})


def test_a_kept_page_is_found_and_held_again() -> None:
    allocator = BlockAllocator(2, 16)
    (page,) = allocator.allocate(1, 1)
    allocator.seal(page, b"x")
    allocator.free(1, [page])
    allocator.share(2, [page])
    assert (allocator.num_used, allocator.num_kept) == (1, 0)
    with pytest.raises(PoolExhausted, match="2 pages asked for, 1 of 2 free"):
        allocator.allocate(3, 2)
    allocator.check_integrity({2: [page]})


def test_of_two_pages_with_one_content_one_is_kept() -> None:
    allocator = BlockAllocator(4, 16)
    first, second = allocator.allocate(1, 1) + allocator.allocate(2, 1)
    for page in (first, second):
        allocator.seal(page, b"x")
    allocator.check_integrity({1: [first], 2: [second]})
    allocator.free(1, [first])
    allocator.free(2, [second])
    assert allocator.num_kept == 1 and allocator.find(b"x") == first and allocator.content(second) is None
    allocator.check_integrity({})


@pytest.mark.parametrize(("eviction", "order"), [("lru", "cabd"), ("lfu", "cdab"), ("fifo", "abcd")])
def test_which_kept_page_goes_first(eviction: Eviction, order: str) -> None:
    """Sealed in the order a, b, c, d and given back; then b is found twice, a once."""
    allocator = BlockAllocator(4, 16, eviction)
    pages = dict(zip("abcd", allocator.allocate(1, 4), strict=True))
    for name, page in pages.items():
        allocator.seal(page, name.encode())
    allocator.free(1, [pages[name] for name in "abc"])
    for holder, name in enumerate("bab", 10):
        allocator.share(holder, [pages[name]])
        allocator.free(holder, [pages[name]])
    allocator.free(1, [pages["d"]])
    names = {page: name for name, page in pages.items()}
    assert "".join(names[page] for _ in range(4) for page in allocator.allocate(2, 1)) == order


def test_many_finds_leave_no_trace() -> None:
    kept = KeptPages("lru")
    for page in range(10):
        kept.fill(page)
        kept.add(page)
    for _ in range(1000):
        kept.find(3)
        kept.add(3)
    assert len(kept._heap) < 200 and len(kept) == 10
    assert [kept.evict() for _ in range(10)] == [0, 1, 2, 4, 5, 6, 7, 8, 9, 3]


def test_what_cannot_be_shared_or_sealed() -> None:
    allocator = BlockAllocator(4, 16)
    (page,) = allocator.allocate(1, 1)
    allocator.seal(page, b"x")
    allocator.seal(page, b"x")
    for action, words in (
        (lambda: allocator.share(1, [page]), "belongs to 1, it cannot be shared with 1"),
        (lambda: allocator.share(2, [(page + 1) % 4]), "belongs to None, it cannot be shared with 2"),
        (lambda: allocator.seal(page, b"y"), "belongs to 1, cannot be sealed"),
        (lambda: allocator.seal((page + 1) % 4, b"y"), "belongs to None, cannot be sealed"),
    ):
        with pytest.raises(ValueError, match=words):
            action()
    allocator.share(2, [page])
    with pytest.raises(AssertionError, match="recorded for more than hold them"):
        allocator.check_integrity({1: [page]})


def test_a_hash_says_the_tokens_their_order_and_all_before_them() -> None:
    pages = [array("i", range(n, n + 16)) for n in (0, 0, 16)]
    assert root_hash(b"a") == root_hash(b"a") != root_hash(b"b") and root_hash(b"a") != page_hash(b"a", array("i"))
    first, second = page_hash(b"", pages[0]), page_hash(page_hash(b"", pages[0]), pages[2])
    others = [page_hash(b"", pages[2]), page_hash(b"salt", pages[0]), page_hash(first, pages[1]),
              page_hash(b"", array("i", reversed(pages[0])))]  # fmt: skip
    assert first == page_hash(b"", pages[1]) and len({first, second, *others}) == 6 and len(first) == 32


class AllocatorMachine(RuleBasedStateMachine):
    allocator: BlockAllocator

    @initialize(eviction=st.sampled_from(EVICTIONS))
    def begin(self, eviction: Eviction) -> None:
        self.allocator = BlockAllocator(12, 16, eviction)
        self.tables: dict[int, list[int]] = {}

    @rule(owner=st.integers(0, 4), count=st.integers(0, 6))
    def allocate(self, owner: int, count: int) -> None:
        free = self.allocator.num_free
        if count > free:
            with pytest.raises(PoolExhausted):
                self.allocator.allocate(owner, count)
        else:
            self.tables.setdefault(owner, []).extend(self.allocator.allocate(owner, count))
            assert self.allocator.num_free == free - count

    @rule(owner=st.integers(0, 4), count=st.integers(0, 6))
    def free(self, owner: int, count: int) -> None:
        table = self.tables.get(owner, [])
        gone, self.tables[owner] = table[:count], table[count:]
        self.allocator.free(owner, gone)

    @rule(owner=st.integers(0, 4), content=st.integers(0, 9), count=st.integers(1, 4))
    def share(self, owner: int, content: int, count: int) -> None:
        """As many pages in a row as are found, from a content on."""
        mine = self.tables.setdefault(owner, [])
        for number in range(content, content + count):
            page = self.allocator.find(bytes([number]))
            if page is not None and page not in mine:
                self.allocator.share(owner, [page])
                mine.append(page)
                assert self.allocator.content(page) == bytes([number])

    @rule(owner=st.integers(0, 4), content=st.integers(0, 9))
    def seal(self, owner: int, content: int) -> None:
        """Contents in a row for the pages of an owner that have none: some are those of other pages."""
        for number, page in enumerate(self.tables.get(owner, []), content):
            if self.allocator.content(page) is None:
                self.allocator.seal(page, bytes([number]))
                assert self.allocator.find(bytes([number])) is not None

    @invariant()
    def books(self) -> None:
        self.allocator.check_integrity(self.tables)
        held = [page for pages in self.tables.values() for page in pages]
        assert self.allocator.usage == len(set(held)) / 12
        assert [self.allocator.references(page) for page in range(12)] == [held.count(page) for page in range(12)]


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
