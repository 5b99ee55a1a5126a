"""Calibration: how much the inputs of every linear weigh, on a text, before its weights are rounded to four bits.

The float32 graph runs over windows of the text; of every linear's input x [T, K] the mean of x^2 over all tokens is
kept, by the recipe of the linear's weight. `codegen/grid_search.py` minimises the error that these say.

A plan must not depend on the machine that built it. Sums of floats do, in their last bits; so the graph runs in
float64, and the means are rounded to five bits of mantissa: two machines differ by 1e-12 before, and in nothing after,
but for a value that lies so close to a boundary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from llmc.codegen.grid_search import search_grids
from llmc.errors import UserError
from llmc.frontend.tokenizer import TokenizerAssets
from llmc.kernels.codes import Array, Codes
from llmc.kernels.dialect import OPS
from llmc.kernels.formats import W4, Format
from llmc.kernels.interpret import run_body
from llmc.kernels.weights import Reader, WeightRef
from llmc.runtime.detokenizer import TextCodec

_SHIPPED = Path(__file__).parent / "data" / "calibration.txt"
WINDOW = 512
"""Tokens of a sequence; a window sees nothing of those before it."""
MAX_TOKENS = 2048
RANDOM_TOKENS = 1024
"""Where the checkpoint has no tokenizer, as many random ids stand for a text."""
_MANTISSA = 32.0
_LEAST = 1e-4
"""Of the mean over K: what a column weighs at least, since a text does not show all that a model can meet."""


@dataclass(frozen=True)
class Text:
    """What is calibrated on. name: for the manifest. sha256: of the text, or of the ids where they are random."""

    tokens: tuple[int, ...]
    name: str
    sha256: str

    def manifest(self) -> dict[str, Any]:
        return {
            "text": self.name,
            "text_sha256": self.sha256,
            "tokens": len(self.tokens),
            "method": "E[x^2] grid search",
        }


def random_text(vocab_size: int) -> Text:
    """Ids that stand for a text, the same on every machine."""
    ids = np.random.Generator(np.random.PCG64(0)).integers(0, vocab_size, RANDOM_TOKENS, dtype=np.int64)
    return Text(tuple(map(int, ids)), "random ids", hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest())


def read_text(path: Path, name: str, encode: Callable[[str], list[int]]) -> Text:
    """The first MAX_TOKENS of a file in UTF-8. Raises OSError or UnicodeDecodeError when it cannot be read."""
    data = path.read_bytes()
    return Text(tuple(encode(data.decode("utf-8"))[:MAX_TOKENS]), name, hashlib.sha256(data).hexdigest())


def choose_text(path: Path | None, assets: TokenizerAssets | None, vocab_size: int) -> Text:
    """The text of --calibration, or the one that ships; random ids where there is no tokenizer to read it with.

    Raises UserError when the user's text cannot be read.
    """
    if assets is None:
        if path is not None:
            raise UserError(f"--calibration {path}: the checkpoint has no tokenizer to read a text with")
        return random_text(vocab_size)
    encode = TextCodec(assets.tokenizer_json).encode
    try:
        text = read_text(path or _SHIPPED, "llmc/data/calibration.txt" if path is None else path.name, encode)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--calibration {path}: cannot be read as UTF-8 text: {error}") from error
    if not text.tokens:
        raise UserError(f"--calibration {path}: is empty")
    return text


@dataclass(frozen=True)
class Calibration:
    """importance: [K] float32 by the recipe of a weight [N, K]; see `collect`."""

    text: Text
    importance: Mapping[WeightRef, Array]

    def quantize(self, ref: WeightRef, format: Format, rows: Array) -> Codes | None:
        """Rows of a weight as codes; None where calibration has nothing to say of it."""
        found = self.importance.get(ref)
        return None if found is None or format is not W4 else search_grids(rows, found)


def collect(
    graph: fx.Graph, reader: Reader, text: Text, max_len: int, layer_done: Callable[[], None] = lambda: None
) -> Calibration:
    """Runs the float32 graph over a text, in windows of at most max_len tokens."""
    window = min(WINDOW, max_len)
    n = len(text.tokens)
    inputs = {
        "tokens": torch.tensor(text.tokens), "positions": torch.arange(n) % window,
        "query_start": torch.tensor([*range(0, n, window), n]), "rows": torch.arange(0),
    }  # fmt: skip
    sums: dict[WeightRef, Tensor] = {}

    def watch(weight: fx.Node, x: Tensor) -> None:
        ref = weight.meta["weight"]
        total = x.square().sum(0)
        sums[ref] = sums[ref] + total if ref in sums else total

    def done(node: fx.Node) -> None:
        if node.target is OPS["attention"]:
            layer_done()

    run_body(graph, inputs, reader, done, torch.float64, watch)
    return Calibration(text, {ref: importance_of((total / n).numpy()) for ref, total in sums.items()})


def importance_of(means: np.ndarray[Any, np.dtype[np.float64]]) -> Array:
    """Means of squares [K], float64, as what columns weigh: float32, rounded to a few bits, none of them nothing. Their
    scale means nothing; it is such that float32 holds their products."""
    largest = float(means.max(initial=0.0))
    if not largest > 0:
        return np.ones(len(means), np.float32)
    _, exponent = np.frexp(largest)
    mantissa, exponents = np.frexp(np.ldexp(means, -exponent))
    rounded = np.ldexp(np.rint(mantissa * _MANTISSA) / _MANTISSA, exponents)
    least = np.ldexp(_LEAST, np.frexp(rounded.mean())[1])
    weights: Array = np.maximum(rounded, least).astype(np.float32)
    return weights
