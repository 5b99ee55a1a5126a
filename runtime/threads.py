"""How many threads the engine should use on this machine."""

from __future__ import annotations

import math
import os
from pathlib import Path


def default_threads() -> int:
    """Physical cores that this process may run on, bounded by the cgroup's CPU quota; at least 1."""
    allowed = sorted(os.sched_getaffinity(0))
    cores = {_core_of(cpu) for cpu in allowed}
    count = len(cores) or len(allowed) or 1
    quota = _cgroup_quota()
    return max(1, min(count, math.ceil(quota)) if quota else count)


def _core_of(cpu: int) -> str:
    """The siblings that share a core, as Linux lists them; the CPU itself where it does not."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text().strip()
    except OSError:
        return str(cpu)


def _cgroup_quota() -> float | None:
    """CPUs of the cgroup v2 (or v1) quota, or None without one."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass  # not cgroup v2: look for v1
    try:
        base = Path("/sys/fs/cgroup/cpu")
        v1_quota = int((base / "cpu.cfs_quota_us").read_text())
        return v1_quota / int((base / "cpu.cfs_period_us").read_text()) if v1_quota > 0 else None
    except (OSError, ValueError):
        return None
