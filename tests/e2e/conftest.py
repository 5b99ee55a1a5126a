"""Plans of the real model, each built once per run, and what runs on them.

LLMC_E2E_PLANS=DIR keeps the plans in DIR and takes those that are there: for work on the tests themselves, as
nothing checks that they come from the present sources.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_harness import FIGURES, MODEL, Server, llmc, report, serving
from e2e_reference import Reference


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if FIGURES:
        terminalreporter.section("measured, not asserted")
        for line in FIGURES:
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def plan_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("LLMC_E2E_PLANS")
    return Path(kept) if kept else tmp_path_factory.mktemp("plans")


def _build(path: Path, *flags: str) -> Path:
    if not path.exists():
        done = llmc("build", MODEL, "--target", "native", "-o", path, *flags)
        assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="session")
def fp32_plan(plan_dir: Path) -> Path:
    return _build(plan_dir / "fp32.plan", "--fp32", "--no-eval")


@pytest.fixture(scope="session")
def int8_plan(plan_dir: Path) -> Path:
    return _build(plan_dir / "int8.plan", "--int8")


@pytest.fixture(scope="session")
def int4_plan(plan_dir: Path) -> Path:
    return _build(plan_dir / "int4.plan", "--int4")


@pytest.fixture(scope="session")
def fp32_server(fp32_plan: Path) -> Iterator[Server]:
    with serving(fp32_plan) as server:
        yield server


@pytest.fixture(scope="session")
def int8_server(int8_plan: Path) -> Iterator[Server]:
    with serving(int8_plan) as server:
        report("ready after exec, int8", f"{server.ready_after:.2f} s")
        yield server


@pytest.fixture(scope="session")
def reference() -> Reference:
    return Reference.load(MODEL)
