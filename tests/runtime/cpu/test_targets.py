"""runtime/cpu/targets.py: names, what this machine runs, and what a plan's code is chosen by."""

from __future__ import annotations

from typing import Any

import pytest

from llmc.errors import UserError
from llmc.runtime import threads
from llmc.runtime.cpu import targets
from llmc.runtime.cpu.targets import (
    CPU_TARGETS,
    DEFAULT_TARGETS,
    choose_target,
    host_features,
    parse_target,
    runnable_targets,
)

V4, V3_VNNI, V3, SCALAR, DOTPROD = CPU_TARGETS


@pytest.fixture
def machine(monkeypatch: Any) -> Any:
    """Pretends to be another machine: machine("x86_64", {"avx2", …})."""

    def pretend(name: str, features: set[str]) -> None:
        monkeypatch.setattr(targets.platform, "machine", lambda: name)
        monkeypatch.setattr(targets, "host_features", lambda: frozenset(features))

    return pretend


def test_the_table_goes_from_best_to_most_general() -> None:
    assert [t.name for t in CPU_TARGETS] == [
        "cpu:x86-64-v4", "cpu:x86-64-v3+avxvnni", "cpu:x86-64-v3", "cpu:x86-64", "cpu:aarch64+dotprod"
    ]  # fmt: skip
    assert DEFAULT_TARGETS == (V4, V3, SCALAR)
    assert V4.features > V3.features > SCALAR.features == frozenset()
    assert "avx512_vnni" in V4.features and {"avx2", "fma", "f16c"} <= V3.features
    assert V3_VNNI.features == V3.features | {"avx_vnni"}
    assert all("glibc" not in t.zig_cpu and t.zig_target.endswith("gnu.2.28") for t in CPU_TARGETS)


@pytest.mark.parametrize("target", CPU_TARGETS, ids=lambda t: t.name)
def test_names_with_and_without_prefix(target: Any) -> None:
    assert parse_target(target.name) is parse_target(target.name.removeprefix("cpu:")) is target


@pytest.mark.parametrize("name", ["", "cpu", "cpu:", "x86-64-v5", "cuda:sm_90", "CPU:X86-64", "cpu:cpu:x86-64"])
def test_an_unknown_name_lists_the_known(name: str) -> None:
    with pytest.raises(UserError, match=rf"--target {name}: unknown target \(known: cpu:x86-64-v4, .*, native\)"):
        parse_target(name)


@pytest.mark.parametrize(
    ("features", "runs"),
    [(V4.features, [V4, V3, SCALAR]), (V4.features - {"avx512_vnni"}, [V3, SCALAR]), (V3.features, [V3, SCALAR]),
     (V4.features | V3_VNNI.features, [V4, V3_VNNI, V3, SCALAR]), (V3_VNNI.features, [V3_VNNI, V3, SCALAR]),
     (V3.features - {"fma"}, [SCALAR]), (set(), [SCALAR])],
    ids=["v4", "v4 without vnni", "v3", "v4 and avxvnni", "v3 and avxvnni", "v3 without fma", "old"],
)  # fmt: skip
def test_native_is_the_best_that_runs(machine: Any, features: set[str], runs: list[Any]) -> None:
    machine("x86_64", set(features) | {"sse2", "something_new"})
    assert runnable_targets() == runs
    assert parse_target("native") is parse_target("cpu:native") is runs[0]
    assert choose_target([t.name for t in CPU_TARGETS]) is runs[0]
    assert choose_target(["cuda:sm_90", SCALAR.name]) is SCALAR


NEOVERSE_N1 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs"


def test_arm_needs_the_dot_product(machine: Any) -> None:
    machine("aarch64", set(NEOVERSE_N1.split()))
    assert runnable_targets() == [DOTPROD] and parse_target("native") is DOTPROD
    assert choose_target([t.name for t in CPU_TARGETS]) is DOTPROD
    with pytest.raises(UserError, match=r"code for cpu:x86-64, this machine runs cpu:aarch64\+dotprod; rebuild"):
        choose_target(["cpu:x86-64"])
    machine("aarch64", set(NEOVERSE_N1.split()) - {"asimddp"})
    with pytest.raises(UserError, match=r"no target of llmc runs on this machine \(aarch64\)"):
        parse_target("native")


def test_a_machine_that_no_target_fits(machine: Any) -> None:
    machine("riscv64", {"avx2"})
    with pytest.raises(UserError, match=r"no target of llmc runs on this machine \(riscv64\)"):
        parse_target("native")
    with pytest.raises(UserError, match=r"code for cpu:x86-64, this machine runs none \(riscv64\); rebuild"):
        choose_target(["cpu:x86-64"])


def test_a_plan_for_better_machines_names_both_sides(machine: Any) -> None:
    machine("x86_64", set(V3.features))
    with pytest.raises(UserError, match=r"code for cpu:x86-64-v4, this machine runs cpu:x86-64-v3, cpu:x86-64; "):
        choose_target(["cpu:x86-64-v4"])
    with pytest.raises(UserError, match="code for no CPU"):
        choose_target([])


def test_the_features_of_this_machine_are_read(monkeypatch: Any) -> None:
    text = "processor\t: 0\nflags\t\t: fpu avx2 fma\nbugs\t: x\nprocessor\t: 1\nflags\t\t: fpu\n"
    monkeypatch.setattr(targets.Path, "read_text", lambda self: text)
    assert host_features() == {"fpu", "avx2", "fma"}
    text = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd asimddp\nCPU part\t: 0xd0c\n"
    assert host_features() == {"fp", "asimd", "asimddp"}

    def missing(self: Any) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(targets.Path, "read_text", missing)
    assert host_features() == frozenset()


@pytest.mark.parametrize(
    ("cpus", "files", "count"),
    [
        ({0, 1, 2, 3}, {"thread_siblings_list": "unique"}, 4),
        ({0, 1, 2, 3}, {"thread_siblings_list": "0,1"}, 1),
        ({0, 1, 2, 3}, {}, 4),
        ({0, 1, 2, 3}, {"cpu.max": "max 100000"}, 4),
        ({0, 1, 2, 3}, {"cpu.max": "150000 100000"}, 2),
        ({0, 1, 2, 3}, {"cpu.max": "10000 100000"}, 1),
        ({0, 1, 2, 3}, {"cpu.cfs_quota_us": "250000", "cpu.cfs_period_us": "100000"}, 3),
        ({0, 1, 2, 3}, {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, 4),
        ({5}, {"cpu.max": "800000 100000"}, 1),
        ({0, 1}, {"cpu.max": "nonsense"}, 2),
    ],
)
def test_default_threads(monkeypatch: Any, cpus: set[int], files: dict[str, str], count: int) -> None:
    def read_text(self: Any) -> str:
        if self.name not in files:
            raise FileNotFoundError(self)
        return str(self) if files[self.name] == "unique" else files[self.name]

    monkeypatch.setattr(threads.Path, "read_text", read_text)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: cpus)
    assert threads.default_threads() == count
