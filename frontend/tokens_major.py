"""Turns an exported graph, with its batch dimension of 1, into the tokens-major form that passes work on.

Every value that depends on the number of tokens T gets T as its first dimension and loses the batch dimension:
[1, H, T, D] and [1, T, H, D] both become [T, H, D], and a transpose between them disappears. Bookkeeping ops (asserts,
clones, casts to the same type, symbolic sizes) disappear too. Ops on weights alone become `WeightRef` recipes, ops on
constants alone are evaluated. What is left is aten on tokens-major values plus `llmc::attention`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from llmc.errors import UserError
from llmc.frontend.architecture import op_meaning
from llmc.frontend.export import ATTENTION, ExportedModel
from llmc.frontend.row_ops import IN_PLACE, ROW_OPS, row_op
from llmc.kernels import ops
from llmc.kernels.experts import DOWN, UP
from llmc.kernels.weights import Affine, Item, WeightRef, transposed, weight_name

aten = torch.ops.aten
_IDENTITY = {aten.alias.default, aten.clone.default, aten.contiguous.default, aten.detach.default,
             aten.dropout.default, aten.type_as.default, aten._to_copy.default, aten.to.dtype,
             aten.to.device, aten.to.dtype_layout}  # fmt: skip
_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default,
          aten.squeeze.dim, aten.squeeze.dims, aten.flatten.using_ints}  # fmt: skip
_POINTWISE = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Scalar,
              aten.rsqrt.default, aten.neg.default, aten.cos.default, aten.sin.default, aten.tanh.default,
              aten.silu.default, aten.gelu.default, aten.relu.default, aten.sigmoid.default,
              aten.exp.default, aten.sqrt.default, aten.square.default}  # fmt: skip
_BIG = 1 << 60
_MAX_RANGE = 1 << 20
"""Elements of a range that the graph makes of numbers, which come from the configuration."""


def module_path(node: fx.Node) -> str:
    """Where in the module tree a node comes from, e.g. "model.layers.0.mlp"."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]).removeprefix("model.") if stack else "(model)"


def import_graph(exported: ExportedModel, recipes: Mapping[str, WeightRef]) -> fx.Graph:
    """The tokens-major graph. Inputs: tokens, positions, query_start, rows (int64), weights (placeholders with
    meta["weight"], a WeightRef) and constants (placeholders with meta["constant"]). Output: logits [T, V].

    recipes: of the module's parameters and persistent buffers, by name. Raises UserError naming the op and module that
    cannot be imported.
    """
    return _Importer(exported, recipes).run()


class _Importer:
    def __init__(self, exported: ExportedModel, recipes: Mapping[str, WeightRef]) -> None:
        self.exported, self.recipes = exported, recipes
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Any] = {}
        """exported node -> new node, WeightRef, or constant Tensor"""
        self.inputs = {name: self.graph.placeholder(name) for name in INPUTS}
        self.parameters: dict[WeightRef, fx.Node] = {}
        self.last_input = self.inputs[INPUTS[-1]]
        """the input after which the next weight goes"""
        self.num_constants = 0
        self.joins: dict[tuple[Any, int], fx.Node] = {}

    def run(self) -> fx.Graph:
        self.exported.graph.eliminate_dead_code()
        for node in self.exported.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = self.placeholder(node)
            elif node.op == "call_function":
                new = self.call(node)
                if isinstance(new, fx.Node) and "path" not in new.meta:
                    new.meta["path"] = module_path(node)
                self.values[node] = new
            elif node.op == "output":
                self.graph.output(self.operand(node.args[0][0]))
        return self.graph

    def placeholder(self, node: fx.Node) -> Any:
        if node.name in ("tokens", "positions"):
            return self.inputs[node.name]
        if node.name in self.exported.constants:
            return self.exported.constants[node.name]
        return self.recipes[self.exported.parameters[node.name]]

    def operand(self, value: Any, rank: int | None = None) -> Any:
        """What a new node takes for an exported argument; values over T are viewed to the rank of the result."""
        if not isinstance(value, fx.Node):
            return value
        new = self.values[value]
        if isinstance(new, WeightRef):
            return self.weight(new)
        if isinstance(new, Tensor):
            if new.ndim == 0:
                return float(new)
            return self.constant(new)
        shape = _shape(value)
        if rank is not None and len(shape) < rank and _token_dim(shape) is not None:
            padded = [1] * (rank - len(shape)) + shape
            return self.reshape(new, _tokens_major(padded))
        return new

    def weight(self, ref: WeightRef) -> fx.Node:
        if ref not in self.parameters:
            with self.graph.inserting_after(self.last_input):
                self.last_input = self.parameters[ref] = self.graph.placeholder(weight_name(ref))
            self.last_input.meta["weight"] = ref
        return self.parameters[ref]

    def constant(self, value: Tensor) -> fx.Node:
        with self.graph.inserting_after(self.inputs["rows"]):
            node = self.graph.placeholder(f"c_{self.num_constants}")
        self.num_constants += 1
        node.meta["constant"] = value
        return node

    def reshape(self, x: fx.Node, shape: list[int]) -> fx.Node:
        return self.graph.call_function(aten.view.default, (x, [-1, *shape[1:]]))

    def call(self, node: fx.Node) -> Any:
        target = node.target
        if target in (aten._assert_tensor_metadata.default, aten.sym_size.int) or "assert" in str(target):
            return None
        tensors = [self.values[a] for a in node.all_input_nodes if self.values[a] is not None]
        if target is aten.arange.start_step and not node.all_input_nodes and node.meta["val"].numel() <= _MAX_RANGE:
            return self.fold(node)
        if tensors and all(isinstance(t, Tensor) for t in tensors):
            return self.fold(node)
        if tensors and all(isinstance(t, WeightRef | Tensor) for t in tensors):
            return self.weight_op(node)
        handler = self.handler(target)
        if handler is None:
            self.refuse(node, "the importer has no rule for it")
        return handler(node)

    def fold(self, node: fx.Node) -> Any:
        """An op on constants alone, evaluated (on the CPU, wherever it was traced)."""
        if node.target in _IDENTITY:
            return self.values[node.args[0]].to(node.meta["val"].dtype)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self.values[n])
        return node.target(*args, **{k: v for k, v in kwargs.items() if k != "device"})

    def handler(self, target: Any) -> Callable[[fx.Node], Any] | None:
        if target in _IDENTITY:
            return self.identity
        if target in _VIEWS:
            return self.view
        if target in _POINTWISE:
            return self.pointwise
        if target in ROW_OPS:
            return self.row_op
        if target in IN_PLACE:
            return self.in_place
        return {
            aten.transpose.int: self.permute, aten.permute.default: self.permute,
            aten.select.int: self.select, aten.slice.Tensor: self.slice, aten.split.Tensor: self.split,
            aten.split_with_sizes.default: self.split, aten.chunk.default: self.split,
            operator.getitem: self.getitem, aten.cat.default: self.cat, aten.stack.default: self.stack,
            aten.repeat_interleave.self_int: self.repeat, aten.mean.dim: self.mean,
            aten.embedding.default: self.embedding, aten.linear.default: self.same,
            aten.addmm.default: self.addmm, aten.mm.default: self.addmm, aten.layer_norm.default: self.same,
            ATTENTION: self.attention, UP: self.same, DOWN: self.same,
        }.get(target)  # fmt: skip

    def refuse(self, node: fx.Node, reason: str) -> NoReturn:
        raise UserError(
            f"llmc cannot build this architecture: it has {op_meaning(node)}: op {node.target} at {module_path(node)} "
            f"cannot be imported: {reason}"
        )

    # ---- ops on weights alone become recipes

    def weight_op(self, node: fx.Node) -> WeightRef:
        target = node.target
        if target in _IDENTITY:
            result: WeightRef = self.values[node.args[0]]
            return result
        refs = [self.values[a] for a in node.all_input_nodes if isinstance(self.values[a], WeightRef)]
        if target in (aten.transpose.int, aten.t.default, aten.permute.default) and len(refs[0].shape) == 2:
            return transposed(refs[0])
        if target in (aten.add.Tensor, aten.mul.Tensor) and len(refs) == 1:
            other = next(a for a in node.args if not (isinstance(a, fx.Node) and self.values[a] is refs[0]))
            value = float(self.values[other]) if isinstance(other, fx.Node) else float(other)
            scale, shift = (1.0, value) if target is aten.add.Tensor else (value, 0.0)
            return Affine(refs[0].shape, refs[0], scale, shift)
        if target is aten.squeeze.default and len(refs[0].shape) == 2 and refs[0].shape[0] == 1:
            return Item(refs[0].shape[1:], refs[0], 0)
        self.refuse(node, "it computes on weights in a way that has no recipe")

    # ---- structural ops

    def identity(self, node: fx.Node) -> Any:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        before, after = source.meta["val"].dtype, node.meta["val"].dtype
        if after == torch.bool and before != after:
            return self.graph.call_function(aten.ne.Scalar, (self.operand(source), 0))
        if before != after and not (before == torch.int64 and after == torch.float32):
            self.refuse(node, f"cast from {before} to {after}")
        if before != after:
            return self.graph.call_function(aten._to_copy.default, (self.operand(source),), {"dtype": after})
        return self.values[source]

    def view(self, node: fx.Node) -> Any:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        before, after = _shape(source), _shape(node)
        if not _same_to_tokens(source, node):
            for shape in (before, after):
                token = _token_dim(shape)
                if token is None or any(d != 1 for d in shape[:token]):
                    self.refuse(node, "a view mixes tokens with other dimensions")
        if _tokens_major(before) == _tokens_major(after):
            return self.values[source]
        return self.reshape(self.operand(source), _tokens_major(after))

    def permute(self, node: fx.Node) -> Any:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        shape = _shape(source)
        order = list(range(len(shape)))
        if node.target is aten.transpose.int:
            a, b = (int(d) % len(shape) for d in node.args[1:3])
            order[a], order[b] = order[b], order[a]
        else:
            order = [int(d) % len(shape) for d in node.args[1]]
        before, after = _kept_dims(shape), [order[d] for d in _kept_dims(_shape(node))]
        if before == after:
            return self.values[source]
        if sorted(before) != sorted(after):
            self.refuse(node, "a permutation moves the batch dimension")
        return self.graph.call_function(aten.permute.default, (self.operand(source), [before.index(d) for d in after]))

    def mapped_dim(self, node: fx.Node, shape: list[int], dim: int) -> int:
        kept = _kept_dims(shape)
        dim %= len(shape)
        if dim not in kept or kept.index(dim) == 0:
            self.refuse(node, "it works across tokens or the batch dimension")
        return kept.index(dim)

    def select(self, node: fx.Node) -> Any:
        source, dim, index = node.args
        assert isinstance(source, fx.Node)
        shape = _shape(source)
        if int(dim) % len(shape) not in _kept_dims(shape) and index == 0:
            return self.values[source]
        d = self.mapped_dim(node, shape, int(dim))
        inner = _tokens_major(shape)
        width, first = math.prod(inner[d + 1 :]), int(index) % inner[d]
        x = self.joined(self.operand(source), inner, d)
        part = self.slice_node(x, d, first * width, (first + 1) * width)
        part.meta["path"] = module_path(node)
        return part if len(inner) == d + 2 else self.reshape(part, _tokens_major(_shape(node)))

    def joined(self, x: fx.Node, shape: list[int], dim: int) -> fx.Node:
        """x with the dimensions from dim on as one; the same node for all that ask for it."""
        base = x.args[0] if x.target is aten.view.default else x
        if (base, dim) not in self.joins:
            self.joins[base, dim] = self.reshape(base, [*shape[:dim], math.prod(shape[dim:])])
        return self.joins[base, dim]

    def slice(self, node: fx.Node) -> Any:
        source, dim, start, stop = (*node.args, *(0, 0, None, _BIG)[len(node.args) :])[:4]
        assert isinstance(source, fx.Node)
        step = int(node.args[4]) if len(node.args) > 4 else 1
        if step not in (1, 2):
            self.refuse(node, f"a slice with a step of {step}")
        shape = _shape(source)
        if shape == _shape(node):
            return self.values[source]
        d = self.mapped_dim(node, shape, int(dim))
        size = _tokens_major(shape)[d]
        lo, hi, _ = slice(start, stop).indices(size)
        if step != 1:
            return self.graph.call_function(aten.slice.Tensor, (self.operand(source), d, lo, hi, step))
        return self.slice_node(self.operand(source), d, lo, hi)

    def slice_node(self, x: fx.Node, dim: int, lo: int, hi: int) -> fx.Node:
        return self.graph.call_function(aten.slice.Tensor, (x, dim, lo, hi))

    def split(self, node: fx.Node) -> Any:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        dim = int(node.args[2]) if len(node.args) > 2 else int(node.kwargs.get("dim", 0))
        shape = _shape(source)
        d = self.mapped_dim(node, shape, dim)
        x, pieces, base = self.operand(source), [], 0
        for value in node.meta["val"]:
            size = int(value.shape[dim % len(shape)])
            pieces.append(self.slice_node(x, d, base, base + size))
            pieces[-1].meta["path"] = module_path(node)
            base += size
        return pieces

    def getitem(self, node: fx.Node) -> Any:
        return self.values[node.args[0]][node.args[1]]

    def cat(self, node: fx.Node) -> Any:
        parts = [p for p in node.args[0] if 0 not in _shape(p)]
        if len(parts) == 1:
            return self.values[parts[0]]
        dim = int(node.args[1]) if len(node.args) > 1 else 0
        d = self.mapped_dim(node, _shape(node), dim)
        return self.graph.call_function(aten.cat.default, ([self.operand(p) for p in parts], d))

    def stack(self, node: fx.Node) -> Any:
        shape = _shape(node)
        dim = int(node.args[1]) if len(node.args) > 1 else 0
        d = self.mapped_dim(node, shape, dim)
        return self.graph.call_function(aten.stack.default, ([self.operand(p) for p in node.args[0]], d))

    def repeat(self, node: fx.Node) -> Any:
        """Every value several times in turn, along one dimension."""
        source, times = node.args[:2]
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
        if dim is None or "output_size" in node.kwargs:
            self.refuse(node, "a repetition of everything")
        d = self.mapped_dim(node, _shape(source), int(dim))
        return self.graph.call_function(aten.repeat_interleave.self_int, (self.operand(source), times, d))

    # ---- arithmetic

    def pointwise(self, node: fx.Node) -> Any:
        rank = len(_shape(node))
        args = [self.operand(a, rank) for a in node.args]
        if node.target is aten.mul.Tensor and args[1] == 1.0:
            return args[0]
        if node.target is aten.square.default:
            return self.graph.call_function(aten.pow.Tensor_Scalar, (*args, 2))
        if node.target is aten.add.Tensor and node.kwargs.get("alpha", 1) != 1:
            self.refuse(node, "an addition with alpha")
        kwargs = {k: v for k, v in node.kwargs.items() if k != "alpha"}
        return self.graph.call_function(node.target, tuple(args), kwargs)

    def row_op(self, node: fx.Node) -> Any:
        try:
            found = row_op(self.graph, node, self.operand)
        except ValueError as error:
            self.refuse(node, str(error))
        for new in found if isinstance(found, list) else []:
            new.meta["path"] = module_path(node)
        return found

    def in_place(self, node: fx.Node) -> Any:
        """An op that writes into its first operand: what reads that afterwards reads the result."""
        target = node.args[0]
        assert isinstance(target, fx.Node)
        if _is_view(target) or any(_is_view(user) for user in target.users):
            self.refuse(node, "it writes into a value that has views")
        node.target = IN_PLACE[node.target]
        self.values[target] = self.call(node)
        return self.values[target]

    def mean(self, node: fx.Node) -> Any:
        source, dims = node.args[:2]
        assert isinstance(source, fx.Node)
        shape = _shape(source)
        mapped = [self.mapped_dim(node, shape, int(d)) for d in dims]
        if not (len(node.args) > 2 and node.args[2]):
            self.refuse(node, "a mean that drops its dimension")
        return self.graph.call_function(aten.mean.dim, (self.operand(source), mapped, True))

    def embedding(self, node: fx.Node) -> Any:
        return self.graph.call_function(
            aten.embedding.default, (self.operand(node.args[0]), self.operand(node.args[1]))
        )

    def same(self, node: fx.Node) -> Any:
        return self.graph.call_function(node.target, tuple(self.operand(a) for a in node.args))

    def addmm(self, node: fx.Node) -> Any:
        """addmm(bias, x, W) and mm(x, W) with W [in, out] are linears of the transposed weight."""
        bias = self.operand(node.args[0]) if node.target is aten.addmm.default else None
        x, w = node.args[-2:]
        ref = self.values[w]
        if not isinstance(ref, WeightRef):
            self.refuse(node, "a matrix product of two activations")
        weight = self.weight(transposed(ref))
        return self.graph.call_function(aten.linear.default, (self.operand(x), weight, bias))

    def attention(self, node: fx.Node) -> Any:
        q, k, v, sinks, scale, window, softcap, layer = node.args
        op = ops.Attention(
            self.operand(q), self.operand(k), self.operand(v), self.inputs["positions"], self.inputs["query_start"],
            self.operand(sinks), scale, window, softcap, layer,
        )  # fmt: skip
        return self.graph.call_function(op.target, op.args)


def _is_view(node: fx.Node) -> bool:
    """Whether an exported value may share its storage with its operand."""
    pieces = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and node.args[0].target in pieces
    others = (aten.transpose.int, aten.permute.default, aten.select.int, aten.slice.Tensor, aten.expand.default)
    return node.op == "placeholder" or node.target in {*_VIEWS, *_IDENTITY, *pieces, *others}


INPUTS = ("tokens", "positions", "query_start", "rows")
"""The inputs of every graph, besides weights and constants."""


def _shape(node: Any) -> list[int]:
    """Dimensions of an exported value; -1 for every dimension that depends on T."""
    return [d if isinstance(d, int) else -1 for d in node.meta["val"].shape]


def _token_dim(shape: list[int]) -> int | None:
    return shape.index(-1) if shape.count(-1) == 1 else None


def _same_to_tokens(before: fx.Node, after: fx.Node) -> bool:
    """Whether a view leaves the dimension of tokens, which is the same number of them, and what lies before it."""
    token = _token_dim(_shape(before))
    shapes = [[str(d) for d in node.meta["val"].shape[: (token or 0) + 1]] for node in (before, after)]
    return token is not None and shapes[0] == shapes[1]


def _kept_dims(shape: list[int]) -> list[int]:
    """Indices of the exported dimensions that the tokens-major value keeps, T first. A leading 1 is the batch."""
    token = _token_dim(shape)
    if token is None:
        return list(range(len(shape)))
    skip = 1 if token > 0 and shape[0] == 1 else 0
    return [token, *(d for d in range(skip, len(shape)) if d != token)]


def _tokens_major(shape: list[int]) -> list[int]:
    return [shape[d] for d in _kept_dims(shape)]
