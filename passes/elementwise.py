"""What is left of elementwise arithmetic.

tanh(x / c) * c  ->  llmc.softcap(x, c)      x * c  ->  llmc.scale(x, c)
a + b            ->  llmc.add(a, b)          a * b  ->  llmc.mul(a, b)     (equal shapes)      tanh(x)  ->  llmc.act
"""

from __future__ import annotations

from torch import fx

from llmc.kernels.ops import Act, Add, Mul, Scale, Softcap
from llmc.passes.match import aten, calls, commuted, is_call, only_user, replace_with, scalar, shape
from llmc.passes.result import PassContext, PassResult


def run(graph: fx.Graph, ctx: PassContext) -> PassResult:
    count, skipped = 0, []
    for node in calls(graph, aten.tanh.default):
        divide, times = node.args[0], only_user(node)
        cap = scalar(divide.args[1]) if is_call(divide, aten.div.Tensor) else None
        if cap is not None and is_call(times, aten.mul.Tensor) and (node, cap) in list(commuted(times)):
            replace_with(times, Softcap(divide.args[0], cap))
        else:
            replace_with(node, Act(node.args[0], "tanh"))
        count += 1
    for node in calls(graph, aten.mul.Tensor, aten.add.Tensor, aten.div.Tensor):
        a, b = node.args[:2]
        value = scalar(b)
        if value is not None and node.target is not aten.add.Tensor and isinstance(a, fx.Node):
            factor = value if node.target is aten.mul.Tensor else 1.0 / value
            replace_with(node, Scale(a, factor))
            count += 1
        elif isinstance(a, fx.Node) and isinstance(b, fx.Node) and shape(a) == shape(b):
            if node.target is aten.div.Tensor:
                skipped.append((node.name, "a quotient of two activations"))
                continue
            replace_with(node, Mul(a, b) if node.target is aten.mul.Tensor else Add(a, b))
            count += 1
        elif node.users:
            skipped.append((node.name, "its operands have different shapes"))
    return PassResult(count, skipped)
