"""What Linux says of the machine that a measurement ran on."""

from __future__ import annotations

import platform
import re
from pathlib import Path

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def cpu_model() -> str:
    """The processor's name; the architecture where Linux does not say it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()


def last_level_cache() -> int | None:
    """Bytes of the largest cache of the first core; None where Linux does not say it."""
    sizes = []
    for path in _CACHES.glob("index*/size"):
        try:
            found = re.fullmatch(r"(\d+)K", path.read_text().strip())
        except OSError:
            continue  # a cache that is not described does not hide the others
        if found:
            sizes.append(int(found[1]) * 1024)
    return max(sizes, default=None)
