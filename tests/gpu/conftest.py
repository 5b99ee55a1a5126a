"""Everything here needs an NVIDIA GPU and is skipped, with the reason, where there is none.

LLMC_GPU_PLANS=DIR keeps the plans in DIR and takes those that are there: for work on the tests themselves, as
nothing checks that they come from the present sources, nor for which GPU they are.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))  # the command line, the server, prompts, the reference

from e2e_harness import MODEL
from e2e_reference import Reference
from gpu_plans import FIGURES, Plans

from llmc.errors import UserError
from llmc.runtime.cuda.driver import open_device
from llmc.runtime.cuda.targets import CUDA_TARGETS, check_driver, choose_cuda_target


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if FIGURES:
        terminalreporter.section("measured on the GPU, not asserted")
        for line in FIGURES:
            terminalreporter.line(line)


@pytest.fixture(scope="session", autouse=True)
def gpu_target() -> str:
    """The target that plans for this GPU are built for."""
    try:
        device = open_device()
        try:
            target = choose_cuda_target([t.name for t in CUDA_TARGETS], device.capability)
            check_driver(target, device.driver_version)
            return target.name
        finally:
            device.close()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def plans(gpu_target: str, tmp_path_factory: pytest.TempPathFactory) -> Plans:
    kept = os.environ.get("LLMC_GPU_PLANS")
    return Plans(Path(kept) if kept else tmp_path_factory.mktemp("gpu-plans"), gpu_target)


@pytest.fixture(scope="session")
def reference(gpu_target: str) -> Reference:
    return Reference.load(MODEL)
