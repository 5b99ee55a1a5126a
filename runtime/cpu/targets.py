"""CPU targets: their names, what a machine must have to run them, and the order of preference.

The compiler parses `--target` with the same table, so that a plan names exactly what the loader looks for.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from llmc.errors import UserError


@dataclass(frozen=True)
class Target:
    """A kind of machine that code is compiled for.

    name: as the user writes it. zig_target / zig_cpu: what the compiler takes. machine: `uname -m`.
    features: /proc/cpuinfo flags that must all be there. default: `llmc build` compiles for it unasked.
    Targets are listed from best to most general.
    """

    name: str
    zig_target: str
    zig_cpu: str
    machine: str
    features: frozenset[str]
    default: bool = False


_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"])
_DOTPROD = frozenset(["asimd", "asimddp", "asimdrdm", "atomics", "crc32"])
"""Armv8.2 with the dot product: Neoverse N1 (Graviton2, Ampere Altra) and Cortex-A76 upwards, all Apple silicon."""
_X86, _ARM = "x86_64-linux-gnu.2.28", "aarch64-linux-gnu.2.28"

CPU_TARGETS: tuple[Target, ...] = (
    Target("cpu:x86-64-v4", _X86, "x86_64_v4+avx512vnni", "x86_64", _V4, default=True),
    Target("cpu:x86-64-v3+avxvnni", _X86, "x86_64_v3+avxvnni", "x86_64", _V3 | {"avx_vnni"}),
    Target("cpu:x86-64-v3", _X86, "x86_64_v3", "x86_64", _V3, default=True),
    Target("cpu:x86-64", _X86, "x86_64", "x86_64", frozenset(), default=True),
    Target("cpu:aarch64+dotprod", _ARM, "generic+v8_2a+dotprod", "aarch64", _DOTPROD),
)
DEFAULT_TARGETS = tuple(t for t in CPU_TARGETS if t.default)


def host_features() -> frozenset[str]:
    """The CPU flags that Linux reports; empty where it reports none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def runnable_targets() -> list[Target]:
    """The targets that this machine can run, best first."""
    machine, features = platform.machine(), host_features()
    return [t for t in CPU_TARGETS if t.machine == machine and t.features <= features]


def parse_target(name: str) -> Target:
    """The target of a `--target` value; "native" (or "cpu:native") is the best that this machine runs.

    Raises UserError for a name that is not known, listing those that are.
    """
    if name in ("native", "cpu:native"):
        runnable = runnable_targets()
        if not runnable:
            raise UserError(f"--target native: no target of llmc runs on this machine ({platform.machine()})")
        return runnable[0]
    for target in CPU_TARGETS:
        if name in (target.name, target.name.removeprefix("cpu:")):
            return target
    known = ", ".join(t.name for t in CPU_TARGETS)
    raise UserError(f"--target {name}: unknown target (known: {known}, native)")


def choose_target(available: list[str]) -> Target:
    """The best target among a plan's that this machine runs. Raises UserError naming both sides when none does."""
    for target in runnable_targets():
        if target.name in available:
            return target
    mine = ", ".join(t.name for t in runnable_targets()) or f"none ({platform.machine()})"
    raise UserError(
        f"the plan has code for {', '.join(available) or 'no CPU'}, this machine runs {mine}; "
        "rebuild with llmc build --target native on it"
    )
