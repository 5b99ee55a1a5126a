"""Keeps the threads of the CPU engine's pool on their memory nodes, where there is more than one.

A thread takes the same tiles of every matrix first, step after step (docs/kernels.md, "Claims"): on the node where it
stays, its part of the caches holds them. On one node nothing is pinned, as the kernel knows better what else runs.
"""

from __future__ import annotations

import os
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_TASKS = Path("/proc/self/task")
_POOL_THREAD = "llmc-pool-"
"""What kernels/cpu/pool.h calls its threads, before their number."""


def place_threads(threads: int) -> list[set[int]]:
    """CPUs for each thread of a pool: all those of one node that this process may use. Threads that follow each other
    share a node, and nodes get as many as their CPUs are worth. Empty where there are not two nodes to choose from."""
    allowed = os.sched_getaffinity(0)
    nodes = [cpus for cpus in (found & allowed for found in _node_cpus()) if cpus]
    if len(nodes) < 2:
        return []
    by_cpu = [cpus for cpus in nodes for _ in cpus]
    return [by_cpu[(2 * i + 1) * len(by_cpu) // (2 * threads)] for i in range(threads)]


def pin_pool(placement: list[set[int]]) -> None:
    """Pins the threads of this process's pools but the callers, who are thread 0: see `pin_caller`."""
    if not placement:
        return
    for task in _TASKS.iterdir():
        try:
            name = (task / "comm").read_text().strip()
        except OSError:
            continue  # it has ended since
        number = name.removeprefix(_POOL_THREAD)
        if number != name and number.isdecimal() and int(number) < len(placement):
            os.sched_setaffinity(int(task.name), placement[int(number)])


def pin_caller(placement: list[set[int]]) -> None:
    """Pins the calling thread as thread 0 of a pool."""
    if placement:
        os.sched_setaffinity(0, placement[0])


def _node_cpus() -> list[set[int]]:
    """The CPUs of each node, in the order of their numbers; nothing where Linux does not say."""
    try:
        nodes = sorted(_NODES.glob("node[0-9]*"), key=lambda node: int(node.name.removeprefix("node")))
        return [_parse_list((node / "cpulist").read_text()) for node in nodes]
    except (OSError, ValueError):
        return []


def _parse_list(text: str) -> set[int]:
    """CPUs as Linux lists them, "0-3,8"; a node without CPUs has an empty list."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
