"""tests/peers/serving.py over the real model, as briefly as it goes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from e2e_harness import environment

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parents[1] / "peers" / "serving.py"


def test_the_benchmark_of_the_server(int8_plan: Path) -> None:
    flags = ["--name", "real", "--no-docs", "--threads", "2", "--starts", "1", "--rounds", "1", "--decode", "6"]
    command = [sys.executable, str(SCRIPT), str(int8_plan), *flags]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "## Serving real" in done.stdout and "16 streams of 6 tokens" in done.stdout
    found = re.search(r"HTTP\): (-?[0-9.]+)% of the server's CPU time", done.stdout)
    # A difference of two CPU times, about nothing in a run this short; nearly all if the pool's thread were not found.
    assert found and -20 < float(found[1]) < 50
