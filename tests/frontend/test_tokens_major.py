"""frontend/tokens_major.py over small modules: the graph computes what the module does, without batch and transposes,
and what cannot be imported is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import own_weights
from torch import Tensor, fx, nn

from llmc.errors import UserError
from llmc.frontend.export import ExportedModel
from llmc.frontend.tokens_major import INPUTS, import_graph
from llmc.kernels.interpret import run_graph
from llmc.kernels.weights import Affine, Stored, Transposed, WeightRef

V, C, T = 17, 24, 6
aten = torch.ops.aten


class Toy(nn.Module):
    """An embedding [1, T, C], then `body`."""

    def __init__(self, body: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(V, C)
        self.linear = nn.Linear(C, C)
        self.norm = nn.LayerNorm(C)
        self.matrix, self.vector = nn.Parameter(torch.randn(C, 2 * C)), nn.Parameter(torch.randn(C))
        self.square = nn.Parameter(torch.randn(C, C))
        self.register_buffer("frequencies", torch.rand(C))
        self.body = body

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.body(self, self.table(tokens[None]), positions[None])[0]


def _import(model: nn.Module) -> fx.Graph:
    example = torch.zeros(8, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    dim = torch.export.Dim("T", min=2, max=1 << 20)
    with torch.no_grad():
        program = torch.export.export(model, example, dynamic_shapes=({0: dim}, {0: dim}), strict=False)
    signature = program.graph_signature
    buffers = {p: model.get_buffer(name) for p, name in signature.inputs_to_buffers.items()}
    lifted = {p: program.constants[name] for p, name in signature.inputs_to_lifted_tensor_constants.items()}
    exported = ExportedModel(program.graph, dict(signature.inputs_to_parameters), buffers | lifted)
    return import_graph(exported, own_weights(model))


def _targets(graph: fx.Graph) -> list[Any]:
    return [n.target for n in graph.nodes if n.op == "call_function"]


def _weights(graph: fx.Graph) -> list[WeightRef]:
    return [n.meta["weight"] for n in graph.nodes if "weight" in n.meta]


def _heads(x: Tensor) -> Tensor:
    return x.view(1, -1, 4, 6).transpose(1, 2)


def _rejoin(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(1, -1, 24)


def _split(m: Any, x: Tensor, p: Tensor) -> Tensor:
    a, b = x.split([8, 16], -1)
    c, d = b.chunk(2, -1)
    return torch.cat([d, a * 2, c], -1)


def _rotate(m: Any, x: Tensor, p: Tensor) -> Tensor:
    heads = _heads(x)
    return _rejoin(torch.cat([-heads[..., 3:], heads[..., :3]], -1))


def _turn(heads: Tensor) -> Tensor:
    return torch.stack([-heads[..., 1::2], heads[..., ::2]], -1).flatten(-2)


BODIES: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "transposed heads": lambda m, x, p: _rejoin(_heads(x) * 2),
    "permuted heads": lambda m, x, p: _heads(x).permute(0, 2, 1, 3).flatten(2),
    "split, chunk and cat": _split,
    "halves of heads": _rotate,
    "one of three": lambda m, x, p: x.view(1, -1, 3, 8)[:, :, 1],
    "the second of three in every head": lambda m, x, p: (x.view(1, -1, 4, 3, 2)[..., 1, :] * 2).flatten(2),
    "neighbours in every head": lambda m, x, p: _rejoin(_turn(_heads(x))),
    "each feature twice": lambda m, x, p: x[..., :12].repeat_interleave(2, dim=-1) + x,
    "squares": lambda m, x, p: x.square(),
    "a feature swap": lambda m, x, p: x.view(1, -1, 4, 6).transpose(2, 3),
    "an empty part": lambda m, x, p: torch.cat([x[..., :0], x], -1),
    "mean of squares": lambda m, x, p: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "linear and norm": lambda m, x, p: m.norm(m.linear(x)),
    "stored as [in, out]": lambda m, x, p: torch.mm(x.view(-1, C), m.matrix)[None],
    "stored as [in, out], with a bias": lambda m, x, p: torch.addmm(m.vector, x.view(-1, C), m.square)[None],
    "a weight plus one": lambda m, x, p: x * (1 + m.vector),
    "half a weight": lambda m, x, p: x * (m.vector * 0.5),
    "angles": lambda m, x, p: x * (p[..., None].float() * m.frequencies).cos(),
    "a table over heads": lambda m, x, p: _rejoin(_heads(x) * (p.float()[:, None, :, None] * m.frequencies[:6]).sin()),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_the_graph_computes_what_the_module_does(name: str) -> None:
    model = Toy(BODIES[name])
    graph = _import(model)
    tokens, positions = torch.tensor([3, 1, 16, 0, 3, 9]), torch.arange(T)
    values = {n: p.detach().numpy() for n, p in model.named_parameters()}
    inputs = {"tokens": tokens, "positions": positions, "query_start": torch.tensor([0, T]), "rows": torch.arange(T)}
    found = run_graph(graph, inputs, lambda n, start, stop: values[n][start:stop])
    torch.testing.assert_close(found, model(tokens, positions).detach(), rtol=1e-5, atol=1e-5)
    assert [n.name for n in graph.nodes if n.op == "placeholder"][: len(INPUTS)] == list(INPUTS)


@pytest.mark.parametrize("name", ["transposed heads", "permuted heads", "halves of heads", "a table over heads"])
def test_transposes_between_heads_and_tokens_vanish(name: str) -> None:
    assert not {aten.permute.default, aten.transpose.int, aten.clone.default} & set(
        _targets(_import(Toy(BODIES[name])))
    )


def test_a_transpose_of_features_stays() -> None:
    assert _targets(_import(Toy(BODIES["a feature swap"]))).count(aten.permute.default) == 1


def test_ops_on_weights_become_recipes() -> None:
    table = Stored((V, C), "table.weight")
    vector, matrix = Stored((C,), "vector"), Stored((C, 2 * C), "matrix")
    wanted = {
        "a weight plus one": Affine((C,), vector, 1.0, 1.0), "half a weight": Affine((C,), vector, 0.5, 0.0),
        "stored as [in, out]": Transposed((2 * C, C), matrix),
    }  # fmt: skip
    for name, recipe in wanted.items():
        assert _weights(_import(Toy(BODIES[name]))) == [table, recipe]
    graph = _import(Toy(lambda m, x, p: torch.nn.functional.linear(x, m.matrix.t())))
    assert _weights(graph) == [table, Transposed((2 * C, C), matrix)]


def test_ops_on_constants_are_evaluated() -> None:
    graph = _import(Toy(lambda m, x, p: x + m.frequencies.exp().view(4, 6).flatten()))
    (constant,) = (n.meta["constant"] for n in graph.nodes if "constant" in n.meta)
    torch.testing.assert_close(constant, Toy(BODIES["angles"]).get_buffer("frequencies").exp())
    assert _targets(graph) == [aten.embedding.default, aten.add.Tensor]


def test_a_range_of_numbers_is_a_constant() -> None:
    graph = _import(Toy(lambda m, x, p: x + 1e4 ** (torch.arange(0, 2 * C, 2, dtype=torch.float32) / C)))
    (constant,) = (n.meta["constant"] for n in graph.nodes if "constant" in n.meta)
    torch.testing.assert_close(constant, 1e4 ** (torch.arange(0, 2 * C, 2, dtype=torch.float32) / C))


def test_a_range_too_long_to_be_a_models_is_refused() -> None:
    with pytest.raises(UserError, match=r"aten\.arange\.start_step .* the importer has no rule for it"):
        _import(Toy(lambda m, x, p: x + torch.arange(0, 1 << 22, 1, dtype=torch.float32)[:C]))


def test_a_weight_used_twice_is_one_input() -> None:
    assert len(_weights(_import(Toy(lambda m, x, p: x * m.vector + m.vector)))) == 2  # with the table


def test_nodes_say_which_module_they_come_from() -> None:
    graph = _import(Toy(BODIES["linear and norm"]))
    paths = {n.target: n.meta["path"] for n in graph.nodes if n.op == "call_function"}
    assert paths[aten.linear.default] == "linear" and paths[aten.layer_norm.default] == "norm"


@pytest.mark.parametrize(
    ("words", "body"),
    [
        ("the importer has no rule for it", lambda m, x, p: x.cumsum(-1)),
        ("works across tokens or the batch dimension", lambda m, x, p: x - x.mean(1, keepdim=True)),
        ("works across tokens or the batch dimension", lambda m, x, p: torch.cat([x, x], 1)),
        ("a mean that drops its dimension", lambda m, x, p: x.mean(-1)),
        ("a view mixes tokens with other dimensions", lambda m, x, p: _heads(x).reshape(1, 4, -1)),
        ("a slice with a step of 3", lambda m, x, p: x[..., ::3]),
        ("an addition with alpha", lambda m, x, p: torch.add(x, x, alpha=2)),
        ("cast from torch.float32 to torch.float16", lambda m, x, p: x.half()),
        ("a matrix product of two activations", lambda m, x, p: torch.mm(x[0], m.linear(x)[0].transpose(0, 1))[None]),
        ("computes on weights in a way that has no recipe", lambda m, x, p: x * (m.vector + m.linear.bias)),
        ("computes on weights in a way that has no recipe", lambda m, x, p: x * m.vector.exp()),
    ],
)
def test_what_cannot_be_imported_is_named(words: str, body: Any) -> None:
    with pytest.raises(UserError, match=rf"op aten\..* cannot be imported: .*{words}"):
        _import(Toy(body))
