"""The dialect verifier: runs after the pipeline (and its shape rules after every pass).

A lowered graph consists of dialect ops and of views (aten.view, aten.slice) only; every activation has T or R rows; a
weight is used by linears, embeddings and norms in the shapes that they take.
"""

from __future__ import annotations

from torch import fx

from llmc.errors import UserError
from llmc.kernels.dialect import OPS
from llmc.passes.match import aten
from llmc.passes.shapes import PROBE_R, PROBE_T

VIEWS = (aten.view.default, aten.slice.Tensor)
_MEANINGS = {
    aten.sigmoid.default: "a sigmoid that gates values",
    aten.mul.Tensor: "a product that no rewrite knows",
    aten.select.int: "one of several values in every head",
}
"""What an op that is left says of an architecture."""


def verify_lowered(graph: fx.Graph, skipped: dict[str, list[tuple[str, str]]]) -> None:
    """Raises UserError naming the first op that no rewrite knows, its module, and the rewrites that declined it.

    skipped: pass name -> (node name, reason), as the pipeline collected it.
    """
    allowed = {*OPS.values(), *VIEWS}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target not in allowed:
            reasons = [f"{name}: {why}" for name, notes in skipped.items() for who, why in notes if who == node.name]
            declined = "; ".join(reasons) or "no rewrite matches it"
            meaning = _MEANINGS.get(node.target, "an operation without a rule")
            raise UserError(
                f"llmc cannot build this architecture: it has {meaning}: op {node.target} at "
                f"{node.meta.get('path', '?')} has no lowering ({declined})"
            )
        if node.meta["shape"][0] not in (PROBE_T, PROBE_R):
            raise UserError(f"op {node.target} at {node.meta.get('path', '?')} does not keep tokens in rows")
