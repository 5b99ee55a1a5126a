"""The page allocator: a partition of the pool, always."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from llmc.runtime.kv import BlockAllocator, PoolExhausted


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
        ({1: [3], 2: [3]}, "by 1 and by 2"),
        ({1: [2]}, "None"),
    ],
)
def test_integrity_check_can_fail(tables: dict[int, list[int]], message: str) -> None:
    allocator = BlockAllocator(4, 16)
    (page,) = allocator.allocate(1, 1)
    tables = {owner: [page if p == 3 else (page + 1) % 4 for p in pages] for owner, pages in tables.items()}
    with pytest.raises(AssertionError, match=message):
        allocator.check_integrity(tables)


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(12, 16)
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

    @invariant()
    def partition(self) -> None:
        self.allocator.check_integrity(self.tables)
        assert self.allocator.usage == sum(map(len, self.tables.values())) / 12


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)
