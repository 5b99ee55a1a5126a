"""Which code of a plan a GPU runs, and how a plan's device is chosen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from llmc.errors import UserError
from llmc.runtime.cuda import load
from llmc.runtime.cuda.occupancy import resident_blocks
from llmc.runtime.cuda.targets import CUDA_TARGETS, choose_cuda_target, find_cuda_target

ALL = [t.name for t in CUDA_TARGETS]


@pytest.mark.parametrize(
    ("available", "capability", "chosen"),
    [
        (ALL, 80, "cuda:sm_80"), (ALL, 86, "cuda:sm_86"), (ALL, 87, "cuda:sm_86"), (ALL, 89, "cuda:sm_89"),
        (ALL, 90, "cuda:sm_90"), (ALL, 100, "cuda:sm_100"), (ALL, 120, "cuda:sm_120"),
        (["cpu:x86-64", "cuda:sm_80"], 89, "cuda:sm_80"),
    ],
)  # fmt: skip
def test_the_newest_code_that_runs_is_taken(available: list[str], capability: int, chosen: str) -> None:
    assert choose_cuda_target(available, capability).name == chosen


@pytest.mark.parametrize(
    ("available", "capability", "words"),
    [
        (
            ["cuda:sm_90"],
            80,
            r"has code for cuda:sm_90, this GPU is sm_80; rebuild with llmc build .*sm_80",
        ),
        (["cuda:sm_86", "cuda:sm_90"], 80, r"has code for cuda:sm_86, cuda:sm_90, this GPU is sm_80"),
        (["cuda:sm_80"], 90, r"this GPU is sm_90; rebuild with llmc build --target cuda:sm_90"),
        (["cuda:sm_90"], 103, r"this GPU is sm_103; llmc has no code for such a GPU yet"),
        (ALL, 75, r"this GPU is sm_75; llmc has no code for such a GPU yet"),
        (["cpu:x86-64"], 90, r"has code for no GPU, this GPU is sm_90"),
    ],
)
def test_a_capability_that_a_plan_lacks_names_those_it_has(available: list[str], capability: int, words: str) -> None:
    with pytest.raises(UserError, match=words):
        choose_cuda_target(available, capability)


@pytest.mark.parametrize(
    ("target", "warps", "registers", "shared", "blocks"),
    [
        ("cuda:sm_80", 4, 64, 0, 8), ("cuda:sm_80", 4, 65, 0, 7), ("cuda:sm_80", 8, 32, 0, 8),  # registers, threads
        ("cuda:sm_86", 8, 32, 0, 6), ("cuda:sm_80", 1, 16, 0, 32), ("cuda:sm_86", 1, 16, 0, 16),
        ("cuda:sm_80", 1, 16, 54 * 1024, 2), ("cuda:sm_80", 1, 16, 163 * 1024, 1), ("cuda:sm_80", 1, 16, 164 * 1024, 0),
        ("cuda:sm_90", 4, 128, 56 * 1024, 4), ("cuda:sm_90", 4, 128, 56 * 1024 + 1, 3), ("cuda:sm_120", 4, 255, 0, 2),
    ],
)  # fmt: skip
def test_blocks_on_a_multiprocessor(target: str, warps: int, registers: int, shared: int, blocks: int) -> None:
    """As NVIDIA's occupancy calculator has them; 54 KiB and the system's 1 KiB three times are one KiB too many."""
    assert resident_blocks(find_cuda_target(target), warps, registers, shared) == blocks


def test_an_unknown_target_names_those_that_are_known() -> None:
    with pytest.raises(UserError, match=r"cuda:sm_75: unknown GPU target \(known: cuda:sm_80, .*cuda:sm_120\)"):
        find_cuda_target("cuda:sm_75")


class _Plan:
    def __init__(self, *targets: str) -> None:
        self.path, self.manifest = "x.plan", {"targets": list(targets)}


class _Device:
    def __init__(self, capability: int, driver_version: int = 13000) -> None:
        self.capability, self.driver_version, self.closed = capability, driver_version, False

    def close(self) -> None:
        self.closed = True


def _with_gpu(monkeypatch: pytest.MonkeyPatch, found: _Device | None) -> None:
    def open_device(index: int = 0) -> Any:
        if found is None:
            raise UserError("no NVIDIA driver was found")
        return found

    monkeypatch.setattr("llmc.runtime.cuda.driver.open_device", open_device)


def test_auto_takes_the_gpu_that_the_plan_has_code_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device(90)
    _with_gpu(monkeypatch, device)
    plan: Any = _Plan("cpu:x86-64", "cuda:sm_90")
    assert load.choose_gpu(plan, "auto") == (device, find_cuda_target("cuda:sm_90"))
    assert load.choose_gpu(plan, "cpu") is None
    other: Any = _Plan("cpu:x86-64", "cuda:sm_80")
    assert load.choose_gpu(other, "auto") is None and device.closed


@pytest.mark.parametrize(
    ("capability", "target", "version", "needs"),
    [
        (80, "cuda:sm_80", 11080, "R525 or newer (CUDA 12.0)"), (90, "cuda:sm_90", 11080, "R525 or newer (CUDA 12.0)"),
        (100, "cuda:sm_100", 12090, "R580 or newer (CUDA 13.0)"),
        (120, "cuda:sm_120", 12080, "R580 or newer (CUDA 13.0)"),
    ],
)  # fmt: skip
def test_a_driver_too_old_for_the_code_is_told_and_auto_goes_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    capability: int, target: str, version: int, needs: str,
) -> None:  # fmt: skip
    device = _Device(capability, version)
    _with_gpu(monkeypatch, device)
    plan: Any = _Plan("cpu:x86-64", target)
    old = f"the NVIDIA driver is too old (CUDA {version // 1000}.{version % 1000 // 10}): {target} needs {needs}; "
    with caplog.at_level("INFO"):
        assert load.choose_gpu(plan, "auto") is None and device.closed
    assert caplog.messages == [f"runs on the CPU: {old}update it"]
    with pytest.raises(UserError, match=re.escape(f"--device cuda: {old}update it")):
        load.choose_gpu(plan, "cuda")
    device.driver_version = find_cuda_target(target).oldest_driver
    assert load.choose_gpu(plan, "auto") == (device, find_cuda_target(target))


def test_auto_goes_to_the_cpu_only_where_the_plan_has_code_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_gpu(monkeypatch, None)
    both: Any = _Plan("cpu:x86-64", "cuda:sm_90")
    alone: Any = _Plan("cuda:sm_90")
    assert load.choose_gpu(both, "auto") is None
    for plan, device, words in (
        (alone, "auto", r"^no NVIDIA driver was found; the plan has code for cuda:sm_90 only$"),
        (both, "cuda", r"^--device cuda: no NVIDIA driver was found$"),
    ):
        with pytest.raises(UserError, match=words):
            load.choose_gpu(plan, device)


def test_the_cuda_extra_adds_only_the_driver_s_bindings() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert [re.split(r"[<>=]", d)[0] for d in project["optional-dependencies"]["cuda"]] == ["cuda-bindings"]
    assert not any(re.match("cuda|triton|torch", d) for d in project["dependencies"])
