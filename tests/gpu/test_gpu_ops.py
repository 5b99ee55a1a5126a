"""Every kernel's tests, on the GPU: the tests of tests/kernels/triton, in bfloat16 and with the tiles of plans."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from e2e_harness import ROOT, environment

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(3600)  # a cold cache: some hundred kernels are compiled, one at a time in each process
def test_the_op_tests_pass_on_the_gpu() -> None:
    processes = min(8, len(os.sched_getaffinity(0)))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/kernels/triton", "-n", str(processes), "-p", "no:cacheprovider",
         "--tb=short"],
        cwd=ROOT, env=environment(LLMC_TEST_DEVICE="cuda"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        pytest.fail(f"exit code {done.returncode}\n{done.stdout[-100_000:]}", pytrace=False)
    passed = [line for line in done.stdout.splitlines() if " passed" in line]
    assert passed, done.stdout
