"""What serving loads: nothing of the compiler. (Who may import whom within llmc is held by import-linter.)"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

COMPILER = ("torch", "transformers", "onnx", "triton", "gguf", "safetensors", "ziglang", "huggingface_hub")
OURS = ("llmc.frontend", "llmc.passes", "llmc.codegen", "llmc.kernels", "llmc.build", "llmc.accuracy")


def _loaded(script: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", script + "\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names: Any = json.loads(done.stdout.splitlines()[-1])
    return set(names)


_RUNTIME = """
import importlib, pkgutil
import llmc.runtime
for module in pkgutil.walk_packages(llmc.runtime.__path__, "llmc.runtime."):
    importlib.import_module(module.name)
"""


_COMMANDS = "import llmc.cli, llmc.bench, llmc.bench_report, llmc.bench_plot, llmc.run, llmc.inspect\n"


def test_the_runtime_and_the_command_line_load_no_compiler() -> None:
    loaded = _loaded(_COMMANDS + _RUNTIME)
    assert {"llmc.runtime.server.app", "llmc.runtime.cpu.executor", "llmc.runtime.chat", "fastapi"} <= loaded
    assert not loaded & {*COMPILER, *OURS}


def test_the_runtime_works_where_the_compiler_is_not_installed() -> None:
    blocked = f"import sys\nfor name in {COMPILER!r}: sys.modules[name] = None\n"
    assert "llmc.runtime.server.app" in _loaded(blocked + _COMMANDS + _RUNTIME)


@pytest.mark.parametrize("module", ["llmc", "llmc.errors", "llmc.runtime.plan", "llmc.runtime.cpu.targets"])
def test_a_light_module_loads_nothing_heavy(module: str) -> None:
    heavy = {*COMPILER, *OURS, "numpy", "fastapi", "pydantic", "tokenizers", "uvicorn", "jinja2"}
    assert not _loaded(f"import {module}") & heavy


def test_help_loads_neither_compiler_nor_server() -> None:
    heavy = {*COMPILER, *OURS, "numpy", "fastapi", "pydantic", "tokenizers", "uvicorn"}
    assert not _loaded("import llmc.cli") & heavy
