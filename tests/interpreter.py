"""Fixtures for tests that run kernels in Triton's interpreter (tests/conftest.py chooses it)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle


def ordered_dot(_builder: Any, a: Any, b: Any, acc: Any, _precision: Any, _imprecise: int) -> Any:
    """A replacement of the interpreter's dot: acc + a b, one k after the other."""
    wide = acc.data.dtype
    total, left, right = acc.data.copy(), a.data.astype(wide), b.data.astype(wide)
    for k in range(left.shape[1]):
        total += left[:, k : k + 1] * right[k]
    return TensorHandle(total, acc.dtype.scalar)


def fused(_builder: Any, x: Any, y: Any, z: Any) -> Any:
    """A replacement of the interpreter's fma of float32: the product is exact, the sum in float64 and then rounded."""
    return TensorHandle((x.data.astype(np.float64) * y.data + z.data).astype(np.float32), z.dtype.scalar)


@pytest.fixture(scope="session", autouse=True)
def quick_device_functions() -> Iterator[None]:
    """A function of ours that a kernel calls does not prepare triton.language again, as the kernel's launch did."""
    original = InterpretedFunction.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = self.fn.__module__.startswith("llmc.")
        return self.rewrite()(*args, **kwargs) if ours else original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "__call__", call)
        yield


@pytest.fixture
def device_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of bits: fused multiply-adds that are fused, and products that sum in the order of K for every row.

    The interpreter's own products come from BLAS, where a row's sums depend on its place in the tile; a tensor core's
    do not.
    """
    monkeypatch.setattr(InterpreterBuilder, "create_dot", ordered_dot)
    monkeypatch.setattr(InterpreterBuilder, "create_fma", fused)
