"""Only the rows that are sampled reach the head.

head(norm(x))  ->  head(norm(llmc.select_rows(x, rows)))
"""

from __future__ import annotations

from torch import fx

from llmc.kernels.ops import SelectRows, op_name
from llmc.passes.result import PassContext, PassResult

_ROWWISE = ("rms_norm", "layer_norm", "softcap", "scale", "act")


def run(graph: fx.Graph, ctx: PassContext) -> PassResult:
    output = next(n for n in graph.nodes if n.op == "output")
    node, seen_head = output.args[0], False
    while isinstance(node, fx.Node) and len(node.users) == 1:
        is_head = op_name(node) == "linear" and not seen_head
        if not is_head and op_name(node) not in _ROWWISE:
            break
        seen_head = seen_head or is_head
        last, node = node, node.args[0]
    if not seen_head:
        return PassResult(0, [(str(output.args[0]), "the output is not a linear of normalised rows")])
    rows = next(n for n in graph.nodes if n.name == "rows")
    assert isinstance(node, fx.Node)
    view = SelectRows(node, rows)
    with graph.inserting_before(last):
        selected = graph.call_function(view.target, view.args)
    selected.meta["path"] = "head"
    last.args = (selected, *last.args[1:])
    return PassResult(1)
