"""Parameters of the kernels in kernels/triton, read from their source: this process does not import Triton."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "kernels" / "triton"


@cache
def parameters(function: str) -> tuple[str, ...]:
    """The parameter names of "module.function", in order. Raises KeyError for one that does not exist."""
    module, name = function.split(".")
    for node in _functions(module):
        if node.name == name:
            return tuple(a.arg for a in node.args.args)
    raise KeyError(function)


@cache
def _functions(module: str) -> tuple[ast.FunctionDef, ...]:
    tree = ast.parse((KERNELS / f"{module}.py").read_text())
    return tuple(n for n in tree.body if isinstance(n, ast.FunctionDef))
