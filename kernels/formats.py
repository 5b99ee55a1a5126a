"""The registry of weight formats: how a matrix is stored and multiplied, as values.

Everything that depends on a format reads it here: the packer (kernels/pack.py), the dialect's reference
(kernels/quant.py), the pass that chooses (passes/quantize.py), both backends, the costs and docs/kernels.md. The graph
carries the name, since an op's schema holds text. Nothing is imported, so that tools without torch may ask, too.

A new format is a line here, its packing in kernels/pack.py, and its kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

GROUP = 32
"""Elements along K that share a scale, of weights and of activations."""


@dataclass(frozen=True)
class Format:
    """A format of weights.

    name: as in graphs, plans and the kernels' own code. bits: of a stored element. group: elements along K with a
    scale in common, 0 without scales. symmetric: value = scale * q, else scale * u + minimum. scale: the type of scales
    and minima, "" without. activations: what the other operand of a product becomes: "float", as it is, or "int8",
    quantised per token and group. layout: the packing of the bytes in a plan, which several formats may share.
    backends: those that have a product of it, by the prefix of their targets.
    """

    name: str
    bits: int
    group: int = 0
    symmetric: bool = True
    scale: Literal["", "f16"] = ""
    activations: Literal["float", "int8"] = "float"
    layout: str = ""
    backends: tuple[str, ...] = ("cpu", "cuda", "hip")

    def __str__(self) -> str:
        return self.name

    @property
    def integer_products(self) -> bool:
        """Whether products are sums of integers, so that activations are quantised as well."""
        return self.activations == "int8"

    @property
    def arithmetic(self) -> str:
        """What a product multiplies, as costs name it (runtime/cost.py)."""
        return f"int{self.bits}" if self.integer_products else "float32" if self.bits == 32 else "float16"

    @property
    def stored(self) -> Format:
        """The format whose own layout the bytes have: where they are only read, not multiplied."""
        return FORMATS[self.layout or self.name]

    @property
    def weight_only(self) -> Format | None:
        """These weights with activations as they are, if there is such a format."""
        return next((f for f in FORMATS.values() if f.layout == self.name and not f.integer_products), None)


F32 = Format("f32", 32)
BF16 = Format("bf16", 16)
W8 = Format("w8", 8, GROUP, True, "f16", "int8")
W4 = Format("w4", 4, GROUP, False, "f16", "int8")
W8A16 = Format("w8a16", 8, GROUP, True, "f16", "float", "w8", ("cuda", "hip"))
W4A16 = Format("w4a16", 4, GROUP, False, "f16", "float", "w4", ("cuda", "hip"))


def _registry(*formats: Format) -> Mapping[str, Format]:
    names = [f.name for f in formats]
    if len(set(names)) != len(names):
        raise ValueError(f"a weight format is registered twice: {names}")
    return dict(zip(names, formats, strict=True))


FORMATS = _registry(F32, BF16, W8, W4, W8A16, W4A16)
"""Every format by its name."""


def find_format(name: str) -> Format:
    """The format of a name. Raises ValueError naming those that are known."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ValueError(f"unknown weight format {name!r}; known: {', '.join(FORMATS)}") from None
