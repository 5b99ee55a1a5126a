"""kernels/weights.py: every recipe against plain numpy, whole and by any range of rows; equality by value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc.kernels.weights import (
    Affine,
    Concat,
    Rows,
    Stored,
    Transposed,
    WeightRef,
    Zeros,
    concat,
    item,
    rows,
    stacked,
    transposed,
    unzip_heads,
)

_RNG = np.random.default_rng(0)
TENSORS = {
    "a": _RNG.standard_normal((6, 5)).astype(np.float32),
    "b": _RNG.standard_normal((1, 5)).astype(np.float32),
    "t": _RNG.standard_normal((5, 9)).astype(np.float32),
    "heads": _RNG.standard_normal((24, 5)).astype(np.float32),  # 3 heads of q 4, k 2, v 2
    "bias": _RNG.standard_normal(24).astype(np.float32),
}
A, B, T = Stored((6, 5), "a"), Stored((1, 5), "b"), Stored((5, 9), "t")
PIECES = ((0, 4), (4, 6), (6, 8))


def reader(name: str, start: int, stop: int) -> Any:
    assert 0 <= start <= stop <= len(TENSORS[name])
    return TENSORS[name][start:stop]


def _unzipped(x: Any) -> Any:
    by_head = x.reshape(3, 8, *x.shape[1:])
    return np.concatenate([by_head[:, lo:hi].reshape(-1, *x.shape[1:]) for lo, hi in PIECES])


RECIPES: dict[str, tuple[WeightRef, Any]] = {
    "stored": (A, TENSORS["a"]),
    "zeros": (Zeros((4, 5)), np.zeros((4, 5))),
    "zeros vector": (Zeros((4,)), np.zeros(4)),
    "transposed": (Transposed((9, 5), T), TENSORS["t"].T),
    "affine": (Affine((6, 5), A, 2.0, 1.0), TENSORS["a"] * 2 + 1),
    "concat": (
        concat((A, B, Transposed((9, 5), T), A)),
        np.concatenate([TENSORS["a"], TENSORS["b"], TENSORS["t"].T, TENSORS["a"]]),
    ),
    "rows": (Rows((3, 5), A, 2), TENSORS["a"][2:5]),
    "rows of a concat": (Rows((5, 5), concat((A, B, A)), 4), np.concatenate([TENSORS[n] for n in "aba"])[4:9]),
    "nested concat": (concat((concat((A, B)), Zeros((2, 5)))), np.r_[TENSORS["a"], TENSORS["b"], np.zeros((2, 5))]),
    "unzipped": (unzip_heads(Stored((24, 5), "heads"), 3, PIECES), _unzipped(TENSORS["heads"])),
    "unzipped bias": (unzip_heads(Stored((24,), "bias"), 3, PIECES), _unzipped(TENSORS["bias"])),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_reads_what_numpy_computes(name: str) -> None:
    ref, wanted = RECIPES[name]
    found = ref.read(reader)
    assert found.dtype == np.float32 and found.shape == ref.shape == wanted.shape
    np.testing.assert_array_equal(found, wanted.astype(np.float32))


@settings(deadline=None, max_examples=200, derandomize=True)
@given(name=st.sampled_from(sorted(RECIPES)), bounds=st.tuples(st.integers(0, 24), st.integers(0, 24)))
def test_any_range_of_rows_is_that_part_of_the_whole(name: str, bounds: tuple[int, int]) -> None:
    ref, wanted = RECIPES[name]
    lo, hi = sorted(min(b, ref.shape[0]) for b in bounds)
    found = ref.read(reader, lo, hi)
    np.testing.assert_array_equal(found, wanted[lo:hi].astype(np.float32))
    np.testing.assert_array_equal(ref.read(reader, lo), wanted[lo:].astype(np.float32))


def test_one_part_is_itself() -> None:
    assert concat((A,)) is A and isinstance(concat((A, B)), Concat) and concat((A, B)).shape == (7, 5)


def test_recipes_are_equal_by_value_only() -> None:
    def make(scale: float, start: int) -> WeightRef:
        return concat((Affine((6, 5), Stored((6, 5), "a"), scale, 1.0), Rows((3, 5), Stored((6, 5), "a"), start)))

    assert make(2.0, 1) == make(2.0, 1) and hash(make(2.0, 1)) == hash(make(2.0, 1))
    assert len({make(2.0, 1), make(2.0, 1), make(2.0, 2), make(3.0, 1), A, B, Zeros((6, 5)), Zeros((5, 6))}) == 7
    assert Stored((6, 5), "a") != Stored((5, 6), "a")


def test_a_recipe_names_the_tensors_it_comes_from() -> None:
    nested = concat((Affine((6, 5), A, 2.0, 1.0), Rows((1, 5), B, 0), Zeros((2, 5)), Transposed((9, 5), T)))
    assert nested.tensors() == ("a", "b", "t") and Zeros((4,)).tensors() == ()


def test_the_transpose_of_a_transpose_is_the_weight() -> None:
    assert transposed(T) == Transposed((9, 5), T) and transposed(transposed(T)) is T


def test_descriptions_tell_recipes_apart() -> None:
    assert concat((A, Affine((6, 5), B, 1.0, 0.5))).describe() == "concat(a, affine(b, 1.0, 0.5))"
    assert Rows((3, 5), Transposed((9, 5), T), 2).describe() == "rows(transpose(t), 2, 5)"
    described = [ref.describe() for ref, _ in RECIPES.values() if not isinstance(ref, Zeros)]
    assert len(set(described)) == len(described)


def test_a_recipe_without_rules_is_our_fault() -> None:
    for method in (lambda: WeightRef((1,)).read(reader), lambda: WeightRef((1,)).describe()):
        with pytest.raises(NotImplementedError, match="WeightRef"):
            method()


def test_a_stack_and_its_parts() -> None:
    stack = stacked(tuple(Stored((4, 3), name) for name in "abc"))
    values = {name: np.arange(12, dtype=np.float32).reshape(4, 3) + 100 * i for i, name in enumerate("abc")}
    values["s"] = np.stack([values[name] for name in "abc"])

    def reader(name: str, start: int, stop: int) -> Any:
        return values[name][start:stop]

    assert stack.shape == (3, 4, 3) and np.array_equal(stack.read(reader, 1, 3), values["s"][1:3])
    assert item(stack, 1) == Stored((4, 3), "b")  # a stored part is itself: nothing else is read
    stored = item(Stored((3, 4, 3), "s"), 2)
    assert stored.shape == (4, 3) and np.array_equal(stored.read(reader, 1, 3), values["c"][1:3])
    assert stored.codes(lambda *_: None) is None
    many = stacked(tuple(Stored((4, 3), f"e{i}") for i in range(64)))
    assert many.describe() == "stack(e0, … 64 in all …, e63)"


def test_rows_of_a_concatenation_are_its_parts() -> None:
    a, b = Stored((4, 3), "a"), Stored((2, 3), "b")
    both = concat((a, b))
    assert rows(both, 0, 4) == a and rows(both, 4, 6) == b and rows(both, 0, 6) == both
    assert rows(both, 1, 3) == Rows((2, 3), a, 1) and rows(both, 3, 5) == Rows((2, 3), both, 3)
