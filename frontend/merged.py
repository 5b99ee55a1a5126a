"""Parameters that are made of several tensors on loading: the matrices of experts, stored one by one.

transformers' own rules say which tensors go together and how: a `WeightConverter` with MergeModulelist (one tensor per
expert becomes a stack) and Concatenate (gate and up become one matrix). Here the same becomes a recipe.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmc.errors import UserError
from llmc.frontend.checkpoint import Checkpoint
from llmc.kernels.weights import Stored, WeightRef, concat, stacked


@dataclass
class Merged:
    """The tensors of one parameter. parts: by source pattern and number in the place of its `*` -> tensor."""

    converter: Any
    parts: dict[str, dict[int, str]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """All its tensors."""
        return [name for numbered in self.parts.values() for name in numbered.values()]

    def recipe(self, ckpt: Checkpoint, parameter: str, shape: tuple[int, ...]) -> WeightRef:
        """Of the parameter with its shape. Raises UserError when the tensors do not make that."""
        where = ckpt.source_label
        operations = [(type(op).__name__, getattr(op, "dim", 0)) for op in self.converter.operations]
        patterns = list(self.converter.source_patterns)
        if operations not in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)]):
            raise UserError(
                f"{where} holds {self.names[0]}, which is to be loaded by {', '.join(name for name, _ in operations)}; "
                "that layout is not supported"
            )
        for pattern in patterns:
            _check_numbers(where, parameter, pattern, self.parts.get(pattern, {}), shape[0])
        sides = [[_stored(ckpt, self.parts[p][e]) for e in range(shape[0])] for p in patterns]
        width = shape[1] // len(sides)
        for ref in (ref for side in sides for ref in side):
            wanted = (width, *shape[2:])
            if ref.shape != wanted or width * len(sides) != shape[1]:
                raise UserError(
                    f"{where} mis-shapes a tensor of {parameter}: {ref.describe()} {list(ref.shape)} (the "
                    f"configuration needs {list(wanted)}); weights and config.json do not belong together"
                )
        return stacked(tuple(concat(tuple(together)) for together in zip(*sides, strict=True)))


def _stored(ckpt: Checkpoint, name: str) -> Stored:
    return Stored(ckpt.tensors[name].shape, name)


def _check_numbers(where: str, parameter: str, pattern: str, parts: Mapping[int, str], count: int) -> None:
    """Raises UserError unless the experts are numbered 0 … count - 1."""
    last = max(parts, default=-1)
    if last >= count or len(parts) != count:
        missing = next((e for e in range(count) if e not in parts), None)
        what = f"lacks number {missing}" if missing is not None else f"holds a number {last}"
        raise UserError(
            f"{where} {what} of the {count} tensors {pattern!r} that make {parameter}; weights and config.json do not "
            "belong together"
        )


def add_part(
    found: dict[str, Merged], parameter: str, pattern: str, name: str, renamed: str, rules: Iterable[Any]
) -> bool:
    """Files tensor `name`, which a converter of `rules` matched by `pattern` under its new name. False when the pattern
    does not number it, or another tensor has the number."""
    numbered = re.search(re.escape(pattern).replace(r"\*", r"(\d{1,6})") + "$", renamed)
    converter = next((rule for rule in rules if pattern in rule.source_patterns), None)
    if numbered is None or not numbered.groups() or converter is None:
        return False
    parts = found.setdefault(parameter, Merged(converter)).parts.setdefault(pattern, {})
    return parts.setdefault(int(numbered.group(1)), name) == name


def merged_recipes(
    ckpt: Checkpoint, found: Mapping[str, Merged], wanted: Mapping[str, Sequence[int]]
) -> dict[str, WeightRef]:
    """{parameter: recipe} of those that are made of several tensors."""
    return {name: merged.recipe(ckpt, name, tuple(wanted[name])) for name, merged in found.items()}
