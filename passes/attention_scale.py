"""A constant factor on the queries belongs to the attention's scale (OPT scales q after its projection).

attention(view(scale(x, c)), k, v, scale=s)  ->  attention(view(x), k, v, scale=s * c)
"""

from __future__ import annotations

from torch import fx

from llmc.kernels.dialect import OPS
from llmc.kernels.ops import Attention, Scale
from llmc.passes.match import aten, calls, is_call, only_user
from llmc.passes.result import PassContext, PassResult


def run(graph: fx.Graph, ctx: PassContext) -> PassResult:
    count = 0
    for node in calls(graph, OPS["attention"]):
        attention = Attention.of(node)
        query, chain = attention.q, []
        while is_call(query, aten.view.default, OPS["rope"]) and only_user(query) is not None:
            chain.append(query)
            query = query.args[0]
        scale = Scale.match(query)
        if scale is None or only_user(query) is None or not chain:
            continue
        query.replace_all_uses_with(scale.x)
        node.args = Attention.of(node).evolve(scale=attention.scale * scale.value).args
        count += 1
    return PassResult(count)
