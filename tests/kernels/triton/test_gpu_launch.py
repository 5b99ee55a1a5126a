"""The path by which op tests reach a GPU (gpu_launch.py), over an interpreted one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llmc.kernels.triton import rows

ROOT = Path(__file__).parents[3]
SOME = ("test_triton_linear.py::test_gated[w4]", "test_triton_rows.py::test_select_rows",
        "test_triton_attention.py::test_edges_of_a_window")  # fmt: skip
pytestmark = pytest.mark.skipif("LLMC_TEST_DEVICE" in os.environ, reason="this run is on a device already")


@pytest.mark.slow
def test_op_tests_run_on_an_interpreted_gpu() -> None:
    directory = Path(__file__).parent
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *(directory / name for name in SOME)], cwd=ROOT,
        env=os.environ | {"LLMC_TEST_DEVICE": "interpreted", "PYTHONPATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and f"{len(SOME)} passed" in done.stdout, done.stdout + done.stderr


def _select(rows_of_y: int, count: int) -> torch.Tensor:
    """Runs select_rows of `count` rows into an array of `rows_of_y`."""
    import gpu_launch

    y = torch.zeros(rows_of_y, 64)
    x = torch.arange(4 * 64, dtype=torch.float32).view(4, 64) + 1
    meta = torch.zeros(16, dtype=torch.int32)
    meta[1] = count
    args = {"x": x, "rows": torch.tensor([2, 0], dtype=torch.int32), "y": y, "meta": meta}
    gpu_launch.launch(rows.select_rows, (count, 1), args | {"C": 64, "XC": 0, "LDX": 64, "BLOCK": 64})
    return y


def test_what_a_kernel_writes_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_TEST_DEVICE", "interpreted")
    y = _select(2, 2)
    assert y[0].tolist() == list(range(129, 193)) and y[1].tolist() == list(range(1, 65))


def test_what_a_kernel_writes_outside_its_arrays_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_TEST_DEVICE", "interpreted")
    with pytest.raises(AssertionError, match="the kernel wrote outside all arrays"):
        _select(1, 2)


def test_pointers_that_are_not_aligned_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_TEST_DEVICE", "interpreted")
    import gpu_launch

    x, meta = torch.zeros(65)[1:].view(1, 64), torch.ones(16, dtype=torch.int32)
    args = {"x": x, "rows": meta, "y": torch.zeros(1, 64), "meta": meta, "C": 64, "XC": 0, "LDX": 64, "BLOCK": 64}
    with pytest.raises(AssertionError, match="multiples of 16"):
        gpu_launch.launch(rows.select_rows, (1, 1), args)
