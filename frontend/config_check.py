"""Numbers of a configuration that no model can have: refused by name before anything is built from them.

Only what every family means alike is looked at, under the names that transformers gives it (a configuration class maps
its own names, such as n_layer, to them).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from llmc.errors import UserError

_COUNTS = {
    "num_hidden_layers": 4096, "num_attention_heads": 1 << 16, "num_key_value_heads": 1 << 16, "head_dim": 1 << 16,
    "hidden_size": 1 << 20, "intermediate_size": 1 << 24, "vocab_size": 1 << 26, "max_position_embeddings": 1 << 31,
}  # fmt: skip
"""name -> the most that is believed; at least 1. Where a configuration has none, or null, it is not looked at."""


def check_config(config: Any, where: str) -> None:
    """Raises UserError naming the first number that cannot be. where: the file, for the message."""
    for name, most in _COUNTS.items():
        for number in _values(config, name):
            if number is not None and not _is_count(number, most):
                raise UserError(f"{where}: {name} is {number!r}; it must be a whole number from 1 to {most}")
    heads, groups = (_values(config, name)[0] for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        raise UserError(f"{where}: num_key_value_heads is {groups}, which does not divide num_attention_heads, {heads}")
    for name, value in _floats(config.to_dict(), ""):
        if math.isnan(value):
            raise UserError(f"{where}: {name} is not a number (NaN)")
        if name.endswith("rope_theta") and not 0 < value < math.inf:
            raise UserError(f"{where}: {name} is {value:g}; it must be a positive number")


def _values(config: Any, name: str) -> list[Any]:
    """The values of a field: one, or one per layer. What a class computes by itself is not looked at."""
    if isinstance(getattr(type(config), name, None), property):
        return [None]
    if getattr(config, "is_heterogeneous", False) and name != "num_hidden_layers":
        return [getattr(layer, name, None) for layer in config.per_layer_config]
    value = getattr(config, name, None)
    return list(value) if isinstance(value, list | tuple) and value else [value]


def _is_count(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _floats(values: Mapping[Any, Any], path: str) -> Iterator[tuple[str, float]]:
    """(dotted name, value) of every number with a fraction, and of every rope_theta."""
    for key, value in values.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            yield from _floats(value, f"{name}.")
        elif isinstance(value, float) or (name.endswith("rope_theta") and isinstance(value, int)):
            yield name, float(value)
