"""kernels/dialect.py: every reference against a formulation of its own, and every shape rule against the result."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llmc.kernels import dialect, pack
from llmc.kernels.dialect import ACTIVATIONS, OPS
from llmc.kernels.formats import W4, find_format

T, HQ, HKV, D = 11, 6, 2, 8
STARTS = [0, 4, 5, 11]


def _g(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=_g(seed))


def _close(a: torch.Tensor, b: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=atol)


POSITIONS = torch.tensor([*range(4), 0, *range(3, 9)])
_ATTENTION = (_rand(T, HQ, D, seed=1), _rand(T, HKV, D, seed=2), _rand(T, HKV, D, seed=3), POSITIONS,
              torch.tensor(STARTS))  # fmt: skip
X, W, BIAS, RESIDUAL = _rand(T, 40), _rand(24, 40, seed=1), _rand(24, seed=2), _rand(T, 24, seed=3)
CASES: dict[str, tuple[Any, ...]] = {
    "embed": (torch.tensor([3, 0, 6]), _rand(9, 32), 2.0, 2, "f32"),
    "linear": (X, W, BIAS, RESIDUAL, "silu", False, "f32"),
    "linear gated": (X, W, BIAS, None, "gelu", True, "w8"),
    "moe": (
        X,
        _rand(T, 4),
        None,
        _rand(4 * 24, 40, seed=1),
        None,
        _rand(4 * 40, 24, seed=2),
        None,
        "softmax",
        2,
        1,
        1,
        1,
        True,
        0.0,
        0.0,
        1.0,
        "relu",
        False,
        "f32",
    ),
    "moe gated": (
        X,
        _rand(T, 6),
        _rand(6, seed=5),
        _rand(2 * 6 * 16, 40, seed=1),
        _rand(2 * 6 * 16, seed=3),
        _rand(6 * 40, 16, seed=2),
        _rand(6 * 40, seed=4),
        "sigmoid",
        3,
        3,
        2,
        2,
        True,
        1e-6,
        1e-3,
        2.5,
        "silu",
        True,
        "w8",
    ),
    "row_gate": (X, _rand(T, 1), "sigmoid"),
    "rms_norm": (_rand(T, 3, 16), _rand(16), 1e-5),
    "rms_norm_add": (_rand(T, 16), _rand(T, 16, seed=2), _rand(16, seed=1), 1e-5),
    "layer_norm": (_rand(T, 16), _rand(16), _rand(16, seed=1), 1e-5),
    "rope_table": (POSITIONS, _rand(4).abs(), 1.5),
    "rope": (_rand(T, HQ, D), _rand(T, 6), False),
    "attention": (*_ATTENTION, None, 0.3, 0, 0.0, 0),
    "attention sinks": (*_ATTENTION, _rand(HQ), 0.3, 3, 5.0, 1),
    "act": (X, "tanh"),
    "gated_act": (X, X + 1, "silu"),
    "add": (X, X + 1),
    "mul": (X, X + 1),
    "scale": (X, 0.5),
    "softcap": (X, 3.0),
    "select_rows": (_rand(T, 5), torch.tensor([1, 10])),
}


def test_every_op_is_among_the_cases() -> None:
    assert {name.split()[0] for name in CASES} == OPS.keys()


@pytest.mark.parametrize("name", CASES)
def test_the_shape_rule_is_the_shape(name: str) -> None:
    op, arguments = OPS[name.split()[0]], CASES[name]
    meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]
    real, shaped = op(*arguments), op(*meta)
    assert shaped.is_meta and shaped.shape == real.shape and shaped.dtype == real.dtype == torch.float32


@pytest.mark.parametrize("name", CASES)
def test_operands_are_left_alone_and_results_are_new(name: str) -> None:
    arguments = CASES[name]
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    result = OPS[name.split()[0]](*arguments)
    for a, b in zip(arguments, before, strict=True):
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b) and a.data_ptr() != result.data_ptr()


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="op add is registered twice"):
        dialect._op("add(Tensor a, Tensor b) -> Tensor")(lambda a, b: a)
    assert OPS["add"] is torch.ops.llmc.add.default


# ---- attention


def _sdpa(q: Any, k: Any, v: Any, positions: Any, scale: float, window: int) -> torch.Tensor:
    """One sequence through torch's own attention; [T, H, D]."""
    delta = positions[:, None] - positions[None, :]
    visible = (delta >= 0) & (delta < window if window else torch.ones_like(delta, dtype=torch.bool))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, visible, scale=scale, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.parametrize("window", [0, 1, 3, 100])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (5, 1)])
def test_attention_is_that_of_torch_on_each_sequence_alone(window: int, heads: tuple[int, int]) -> None:
    hq, hkv = heads
    q, k, v = _rand(T, hq, D, seed=1), _rand(T, hkv, D, seed=2), _rand(T, hkv, D, seed=3)
    found = OPS["attention"](q, k, v, POSITIONS, torch.tensor(STARTS), None, 0.3, window, 0.0, 0)
    parts = [slice(a, b) for a, b in pairwise(STARTS)]
    _close(found, torch.cat([_sdpa(q[p], k[p], v[p], POSITIONS[p], 0.3, window) for p in parts]))


@pytest.mark.parametrize("window", [0, 1, 3])
def test_attention_does_not_depend_on_the_block_of_queries(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (*_ATTENTION, _rand(HQ), 0.3, window, 5.0, 1)
    whole = OPS["attention"](*arguments)
    for scores in (1, 2 * HQ * T):
        monkeypatch.setattr(dialect, "_SCORES_AT_ONCE", scores)
        _close(OPS["attention"](*arguments), whole)


_BY_DEFINITION = [(0, 2.0, False), (2, 0.0, True), (0, 0.0, True), (3, 1.5, True), (0, 0.0, False), (3, 0.0, False)]


@pytest.mark.parametrize(("window", "cap", "sinks"), _BY_DEFINITION)
def test_attention_by_the_definition(window: int, cap: float, sinks: bool) -> None:
    """Softcap and sinks, one query, head and key at a time in float64."""
    q, k, v = (_rand(7, h, D, seed=i) for i, h in enumerate((4, 2, 2)))
    sink = _rand(4, seed=9) if sinks else None
    bounds = [0, 3, 7]
    positions = torch.tensor([*range(3), *range(4)])
    found = OPS["attention"](q, k, v, positions, torch.tensor(bounds), sink, 0.4, window, cap, 0)
    for lo, hi in pairwise(bounds):
        for i in range(lo, hi):
            keys = [j for j in range(lo, i + 1) if not window or i - j < window]
            for h in range(4):
                scores = [float(q[i, h].double() @ k[j, h // 2].double()) * 0.4 for j in keys]
                if cap:
                    scores = [cap * math.tanh(s / cap) for s in scores]
                weights = [math.exp(s) for s in scores]
                total = sum(weights) + (math.exp(float(sink[h])) if sink is not None else 0.0)
                wanted = sum(w / total * v[j, h // 2].double() for w, j in zip(weights, keys, strict=True))
                _close(found[i, h].double(), wanted)  # type: ignore[arg-type]


# ---- everything else


def test_embed() -> None:
    weight = _rand(9, 32)
    ids = torch.tensor([3, 0, 6])
    _close(OPS["embed"](ids, weight, 2.0, 2, "f32"), torch.stack([weight[i + 2] * 2 for i in ids.tolist()]))
    stored = torch.from_numpy(pack.fake_quantize(W4, weight.numpy()))
    _close(OPS["embed"](ids, weight, 1.0, 0, "w4"), F.embedding(ids, stored))


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_linear_in_float32(act: str, gated: bool) -> None:
    y = torch.einsum("tk,nk->tn", X, W) + BIAS
    wanted = _activation(act, y[:, :12]) * y[:, 12:] if gated else _activation(act, y)
    residual = RESIDUAL[:, : wanted.shape[1]]
    _close(OPS["linear"](X, W, BIAS, residual, act, gated, "f32"), wanted + residual, 1e-4)
    plain = OPS["linear"](X, W, None, None, act, gated, "f32")
    y -= BIAS
    _close(plain, _activation(act, y[:, :12]) * y[:, 12:] if gated else _activation(act, y), 1e-4)


@pytest.mark.parametrize("format", ["bf16", "w8", "w4"])
def test_linear_over_stored_weights(format: str) -> None:
    """The integer formats multiply int8 activations of one scale per token and group of 32; K = 40 ends in a group
    of 8."""
    x = X.numpy().astype(np.float64)
    if format != "bf16":
        for t in range(T):
            for lo in range(0, 40, 32):
                group = x[t, lo : lo + 32]
                step = np.float32(np.abs(group).max()) / np.float32(127)
                x[t, lo : lo + 32] = np.rint(np.float32(group) / step) * step
    wanted = x @ pack.fake_quantize(find_format(format), W.numpy()).astype(np.float64).T
    _close(OPS["linear"](X, W, None, None, "none", False, format), torch.from_numpy(wanted).float(), 1e-4)


def test_a_mixture_by_the_definition() -> None:
    """One token and one expert after the other in float64: sigmoid scores, groups of two, biases."""
    (x, logits, correction, up, up_bias, down, down_bias), settings = CASES["moe gated"][:7], CASES["moe gated"][7:-1]
    found = OPS["moe"](*CASES["moe gated"][:-1], "f32")
    assert settings[:5] == ("sigmoid", 3, 3, 2, 2)
    gates, ups = up.double().view(2, 6, 16, 40)
    for t in range(T):
        scores = 1 / (1 + torch.exp(-logits[t].double()))
        ranked = (scores + correction).view(3, 2)
        kept = ranked.sum(1).argsort(descending=True)[:2].tolist()
        chosen = sorted((e for e in range(6) if e // 2 in kept), key=lambda e: -ranked.view(-1)[e])[:3]
        total, wanted = max(float(scores[chosen].sum()), 1e-6) + 1e-3, torch.zeros(40).double()
        for e in chosen:
            bias = up_bias[e * 32 : e * 32 + 32].double()
            gate, value = gates[e] @ x[t].double() + bias[:16], ups[e] @ x[t].double() + bias[16:]
            h = gate / (1 + torch.exp(-gate)) * value
            y = down[e * 40 : e * 40 + 40].double() @ h + down_bias[e * 40 : e * 40 + 40]
            wanted += scores[e] / total * 2.5 * y
        _close(found[t].double(), wanted, 1e-4)


def test_zero_activations_stay_zero() -> None:
    assert not OPS["linear"](torch.zeros(2, 64), _rand(3, 64), None, None, "none", False, "w8").any()


def _activation(name: str, x: torch.Tensor) -> torch.Tensor:
    """By formula, in float64."""
    x = x.double()
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return {
        "none": x, "silu": x / (1 + torch.exp(-x)), "gelu": x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
        "gelu_tanh": 0.5 * x * (1 + torch.tanh(inner)), "relu": x.clamp_min(0),
        "relu2": x.clamp_min(0) ** 2, "tanh": torch.tanh(x), "sigmoid": 1 / (1 + torch.exp(-x)),
    }[name].float()  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_by_formula(name: str) -> None:
    x = torch.linspace(-6, 6, 50).reshape(10, 5)
    _close(OPS["act"](x, name), _activation(name, x))
    _close(OPS["gated_act"](x, x + 1, name), _activation(name, x) * (x + 1))


def test_norms() -> None:
    x, w, b = _rand(T, 3, 16) * 3 + 1, _rand(16, seed=1), _rand(16, seed=2)
    _close(OPS["rms_norm"](x, w, 1e-3), F.rms_norm(x, (16,), w, 1e-3))
    _close(OPS["rms_norm"](x, None, 1e-3), F.rms_norm(x, (16,), None, 1e-3))
    r = _rand(T, 3, 16, seed=3)
    _close(OPS["rms_norm_add"](x, r, w, 1e-3), F.rms_norm(x, (16,), w, 1e-3) + r)
    centred = x - x.mean(-1, keepdim=True)
    plain = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-3)
    _close(OPS["layer_norm"](x, w, b, 1e-3), plain * w + b)
    _close(OPS["layer_norm"](x, None, None, 1e-3), plain)


@pytest.mark.parametrize("rot", [8, 4])
def test_rope_rotates_pairs_as_complex_numbers(rot: int) -> None:
    x, inv_freq = _rand(T, HQ, D), 10000.0 ** -(torch.arange(rot // 2) / (rot // 2))
    table = OPS["rope_table"](POSITIONS, inv_freq, 1.25)
    turned = torch.complex(x[..., : rot // 2].double(), x[..., rot // 2 : rot].double())
    turned = turned * 1.25 * torch.exp(1j * POSITIONS[:, None, None].double() * inv_freq.double())
    halves = torch.cat([turned.real.float(), turned.imag.float(), x[..., rot:]], -1)
    _close(OPS["rope"](x, table, False), halves)
    order = [*range(0, rot, 2), *range(1, rot, 2), *range(rot, D)]
    neighbours = torch.empty_like(x)
    neighbours[..., order] = x
    _close(OPS["rope"](neighbours, table, True)[..., order], halves)


def test_elementwise_and_rows() -> None:
    a, b = _rand(T, 5), _rand(T, 5, seed=1)
    _close(OPS["add"](a, b), a.clone().add_(b))
    _close(OPS["mul"](a, b), a.clone().mul_(b))
    _close(OPS["scale"](a, -0.25), -a / 4)
    _close(OPS["softcap"](a, 2.0), 2 - 4 / (1 + torch.exp(a)))
    assert torch.equal(OPS["select_rows"](a, torch.tensor([10, 1])), torch.stack([a[10], a[1]]))


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_weights_of_another_shape_than_the_op_needs_are_named(device: str) -> None:
    def empty(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device=device)

    x, w = empty(7, 32), empty(8, 32)
    assert OPS["linear"](x, w, empty(8), empty(7, 8), "none", False, "f32").shape == (7, 8)
    cases = [
        ("rms_norm: weight is [1], and must be [32]", lambda: OPS["rms_norm"](x, empty(1), 1e-6)),
        ("rms_norm_add: residual is [7, 1]", lambda: OPS["rms_norm_add"](x, empty(7, 1), None, 1e-6)),
        ("row_gate: gate is [7, 2], and must be [7, 1]", lambda: OPS["row_gate"](x, empty(7, 2), "sigmoid")),
        ("layer_norm: bias is [1], and", lambda: OPS["layer_norm"](x, empty(32), empty(1), 1e-6)),
    ]
    if device == "meta":  # torch checks the product itself
        rest = (None, None, "none", False, "f32")
        moe = (x, empty(7, 4), None, empty(64, 32), None, empty(128, 16), None, "softmax", 2, 1, 1, 1)
        after = (False, 0.0, 0.0, 1.0, "silu", False, "f32")
        assert OPS["moe"](*moe, *after).shape == (7, 32)
        cases += [
            ("moe: up is [64, 32], and must be [80, 32]", lambda: OPS["moe"](x, empty(7, 5), *moe[2:], *after)),
            ("moe: down_bias is [9]", lambda: OPS["moe"](*moe[:6], empty(9), *moe[7:], *after)),
            ("top 5 of 1 groups of 4", lambda: OPS["moe"](*moe[:8], 5, *moe[9:], *after)),
            ("linear: x is [7, 31], and must be [7, 32]", lambda: OPS["linear"](empty(7, 31), w, *rest)),
            ("linear: bias is [9]", lambda: OPS["linear"](x, w, empty(9), None, "none", False, "f32")),
            ("linear: residual is [7, 9]", lambda: OPS["linear"](x, w, None, empty(7, 9), "none", False, "f32")),
        ]
    for words, call in cases:
        with pytest.raises(ValueError, match=re.escape(words)):
            call()
