"""Which memory node the threads of the pool stay on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmc.runtime.cpu import numa


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without nodes on which every CPU up to 64 is allowed."""
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    return tmp_path


def _nodes(machine: Path, *lists: str) -> None:
    for i, text in enumerate(lists):
        (machine / f"node{i}").mkdir()
        (machine / f"node{i}" / "cpulist").write_text(text + "\n")


@pytest.mark.parametrize(
    ("lists", "threads", "first_cpus"),
    [
        ([], 4, []),
        (["0-3"], 4, []),
        (["0-3", ""], 4, []),
        (["0-3", "100-103"], 4, []),  # the other node is not ours
        (["0-3", "broken"], 4, []),
        (["0-1", "2-3"], 4, [0, 0, 2, 2]),
        (["0-1,4-5", "2-3,6-7"], 4, [0, 0, 2, 2]),
        (["0-3", "4-7"], 2, [0, 4]),
        (["0-3", "4-7"], 3, [0, 4, 4]),
        (["0-3", "4-7"], 1, [4]),
        (["0-1", "2-3", *[str(n) for n in range(4, 13)]], 13, [0, 0, 2, 2, *range(4, 13)]),
        (["0-5", "6-7"], 4, [0, 0, 0, 6]),
        (["0-1", "2-3"], 6, [0, 0, 0, 2, 2, 2]),
    ],
)  # fmt: skip
def test_threads_follow_the_nodes(machine: Path, lists: list[str], threads: int, first_cpus: list[int]) -> None:
    _nodes(machine, *lists)
    assert [min(cpus) for cpus in numa.place_threads(threads)] == first_cpus


def test_a_thread_may_use_every_cpu_of_its_node_that_the_process_may(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _nodes(machine, "0-3", "4-7")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 5})
    assert numa.place_threads(3) == [{1, 2}, {1, 2}, {5}]


def test_the_threads_of_a_pool_are_found_by_their_names(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "_TASKS", machine)
    pinned: dict[int, set[int]] = {}
    monkeypatch.setattr(os, "sched_setaffinity", pinned.__setitem__)
    for task, name in (
        (10, "python"),
        (11, "llmc-pool-1"),
        (12, "llmc-pool-2"),
        (13, "llmc-pool-9"),
        (14, "llmc-pool-"),
    ):
        (machine / str(task)).mkdir()
        (machine / str(task) / "comm").write_text(name + "\n")
    (machine / "15").mkdir()  # a thread that ends meanwhile
    placement = [{0, 1}, {0, 1}, {2, 3}]
    numa.pin_pool(placement)
    numa.pin_caller(placement)
    assert pinned == {11: {0, 1}, 12: {2, 3}, 0: {0, 1}}
    pinned.clear()
    numa.pin_pool([])
    numa.pin_caller([])
    assert not pinned
