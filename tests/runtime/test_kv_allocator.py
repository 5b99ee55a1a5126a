"""The page allocator: every page is free or held by those that its books name, always."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from llmc.runtime.kv import BlockAllocator, PoolExhausted, page_hash


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


def test_a_shared_page_stays_until_its_last_holder_gives_it_back() -> None:
    allocator = BlockAllocator(4, 16)
    first, second = allocator.allocate(1, 2)
    allocator.share(2, [first])
    assert allocator.references(first) == 2 and allocator.references(second) == 1 and allocator.num_used == 2
    allocator.seal(first, b"x")
    allocator.free(1, [first, second])
    assert allocator.references(first) == 1 and allocator.num_used == 1 and allocator.content(first) == b"x"
    with pytest.raises(AssertionError, match="leaked"):
        allocator.check_integrity({})
    allocator.check_integrity({2: [first]})
    allocator.free(2, [first])
    assert allocator.num_free == 4 and allocator.content(first) is None
    allocator.check_integrity({})


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
    first, second = page_hash(b"", pages[0]), page_hash(page_hash(b"", pages[0]), pages[2])
    others = [page_hash(b"", pages[2]), page_hash(b"salt", pages[0]), page_hash(first, pages[1]),
              page_hash(b"", array("i", reversed(pages[0])))]  # fmt: skip
    assert first == page_hash(b"", pages[1]) and len({first, second, *others}) == 6 and len(first) == 32


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(12, 16)
        self.tables: dict[int, list[int]] = {}
        self.contents: dict[int, bytes] = {}

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

    @rule(owner=st.integers(0, 4), other=st.integers(0, 4), count=st.integers(0, 6))
    def share(self, owner: int, other: int, count: int) -> None:
        mine = self.tables.setdefault(other, [])
        pages = [page for page in self.tables.get(owner, []) if page not in mine][:count]
        self.allocator.share(other, pages)
        mine.extend(pages)

    @rule(owner=st.integers(0, 4))
    def seal(self, owner: int) -> None:
        for page in self.tables.get(owner, []):
            self.contents.setdefault(page, bytes([page]))
            self.allocator.seal(page, self.contents[page])

    @invariant()
    def books(self) -> None:
        self.allocator.check_integrity(self.tables)
        held = [page for pages in self.tables.values() for page in pages]
        self.contents = {page: content for page, content in self.contents.items() if page in held}
        assert self.allocator.usage == len(set(held)) / 12
        assert [self.allocator.references(page) for page in range(12)] == [held.count(page) for page in range(12)]
        assert {p: self.allocator.content(p) for p in range(12)} == {p: self.contents.get(p) for p in range(12)}


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
