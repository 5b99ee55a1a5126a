"""What became of the weights of a checkpoint that is quantised already: for the build's output and the manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from llmc.codegen.weights import WeightTable
from llmc.frontend.checkpoint import Checkpoint


@dataclass(frozen=True)
class StoredWeights:
    """The tensors of one kind in one format. stored: the checkpoint's kind ("Q4_K", "GPTQ int4", …). format: of the
    plan. codes_kept: whether they have the codes of the checkpoint; else their values were rounded to the format."""

    stored: str
    format: str
    weights: int
    codes_kept: bool


def stored_weights(table: WeightTable, checkpoint: Checkpoint) -> list[StoredWeights]:
    """After the weights are packed: what was kept and what was rounded; empty if nothing was quantised."""
    counts = Counter(
        (info.dtype, format.name, kept)
        for (name, format), kept in table.kept.items()
        if (info := checkpoint.tensors[name]).grid is not None
    )
    return [StoredWeights(kind, format, n, kept) for (kind, format, kept), n in sorted(counts.items())]


def stored_lines(found: Sequence[StoredWeights]) -> list[str]:
    """The same in a line for what was kept and one for what was rounded."""
    lines = []
    for kept, verb in ((True, "taken as stored"), (False, "not on a grid of the format, rounded to it")):
        kinds = [f"{s.weights} {s.stored} in {s.format}" for s in found if s.codes_kept is kept]
        if kinds:
            lines.append(f"quantised weights {verb}: {', '.join(kinds)}")
    return lines
