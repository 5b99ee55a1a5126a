"""A mixture of experts on the CPU, kernel by kernel, against the dialect's reference; bits over batches and threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from cpu_harness import EMULATED, PORTABLE, V3, V4, VNNI_EMULATED, QuantBuf, Unit, Weight, aligned_bytes, require

from llmc.kernels import pack
from llmc.kernels.dialect import OPS
from llmc.kernels.formats import find_format
from llmc.kernels.routing import Router, route

FORMATS = ("f32", "bf16", "w8", "w4")


@dataclass(frozen=True)
class Shape:
    """experts of width n over rows of k."""

    experts: int
    top_k: int
    k: int
    n: int
    act: str
    gated: bool
    formats: tuple[str, ...]


SHAPES = {
    "gated": Shape(7, 3, 80, 48, "silu", True, ("f32", "w8", "w4")),
    "plain": Shape(40, 8, 32, 16, "gelu", False, ("w8",)),
    "one": Shape(1, 1, 32, 16, "relu", False, ("f32",)),
}
ROUTERS = {
    "softmax": (7, Router("softmax", 3)),
    "normalised": (40, Router("softmax", 8, normalise=True, scale=1.5)),
    "sigmoid": (40, Router("sigmoid", 3, normalise=True, floor=1e-12, eps=1e-6, scale=2.5)),
    "grouped": (24, Router("sigmoid", 4, 8, 3, 2, normalise=True, eps=1e-20)),
    "best": (24, Router("softmax", 5, 3, 2, 1)),
    "large groups": (40, Router("sigmoid", 2, 2, 1, 2)),
    "one": (1, Router("softmax", 1)),
}


def _wrappers() -> str:
    lines = []
    for name, (experts, r) in ROUTERS.items():
        shape = f"{experts}, {r.top_k}, Scores::{r.scores}, {r.groups}, {r.top_groups}, {r.group_best}"
        lines.append(
            f"EXPORT void route_{name.replace(' ', '_')}(Par p, int t, Mat l, const float* c, float f, float e,"
            f" float s, Mat out) {{ route<{shape}, {str(r.normalise).lower()}>(p, t, l, c, f, e, s, out); }}"
        )
    for name, s in SHAPES.items():
        for fmt in s.formats:
            x, pairs = ("QuantBuf", f"{s.experts}, {s.top_k}") if fmt[0] == "w" else ("Mat", f"{s.experts}, {s.top_k}")
            up = f"Fmt::{fmt}, {s.n}, {s.k}, Act::{s.act}, {str(s.gated).lower()}, {pairs}"
            lines += [
                f"EXPORT void gather_{name}_{fmt}(Par p, int t, {x} x, Mat c, {x} out) {{"
                f" gather_pairs<{pairs}, {s.k}, Fmt::{fmt}>(p, t, x, c, out); }}",
                f"EXPORT void up_{name}_{fmt}(Par p, int t, Mat c, {x} x, Weight w, const float* b, Mat out) {{"
                f" expert_linear<{up}>(p, t, c, x, w, b, out); }}",
                f"EXPORT void down_{name}_{fmt}(Par p, int t, Mat c, {x} x, Weight w, const float* b, Mat out) {{"
                f" expert_linear<Fmt::{fmt}, {s.k}, {s.n}, Act::none, false, {pairs}>(p, t, c, x, w, b, out); }}",
            ]
            if fmt[0] == "w":
                lines += [
                    f"EXPORT void quantize_{name}_{fmt}_{k}(Par p, int t, Mat x, QuantBuf q) {{"
                    f" quantize<{k}, Fmt::{fmt}>(p, t, x, q); }}"
                    for k in (s.k, s.n)
                ]
        lines.append(
            f"EXPORT void combine_{name}(Par p, int t, Mat c, Mat y, Mat out) {{"
            f" combine_pairs<{s.k}, {s.top_k}>(p, t, c, y, out); }}"
        )
    lines.append("EXPORT int widened(int fmt) { return is_widened((Fmt)fmt); }")
    lines.append(
        "EXPORT void gate(Par p, int t, Mat x, Mat g, Mat out) { row_gate<Act::sigmoid, 40>(p, t, x, g, out); }"
    )
    return "\n".join(lines)


@pytest.fixture(scope="module", params=[PORTABLE, V3, VNNI_EMULATED, V4, *EMULATED])
def unit(request):
    return Unit(_wrappers(), require(request.param))


def _choices(index: Any, weights: Any) -> Any:
    """As the kernels have them: expert, weight and room for the pair."""
    found = np.zeros((*index.shape, 3), np.float32)
    found[..., 0] = index.astype(np.int32).view(np.float32)
    found[..., 1] = weights
    return found.reshape(len(index), -1)


def _quants(unit, fmt, rows, k):
    wide = unit.call("widened", FORMATS.index(fmt)) == 1
    groups = -(-k // 32)
    arrays = (np.zeros((rows, groups * 32), np.int16 if wide else np.int8), np.zeros((rows, groups), np.float32),
              np.zeros((rows, groups), np.int32))  # fmt: skip
    buf = QuantBuf(*(a.ctypes.data for a in arrays))
    buf.arrays = arrays
    return buf


class Mixture:
    """Random weights of one shape, packed."""

    def __init__(self, name: str, fmt: str, biased: bool) -> None:
        self.name, self.fmt, s = name, fmt, SHAPES[name]
        self.shape, rng = s, np.random.default_rng(len(name))
        sides = 2 if s.gated else 1
        self.up = rng.standard_normal((sides * s.experts * s.n, s.k)).astype(np.float32)
        self.down = rng.standard_normal((s.experts * s.k, s.n)).astype(np.float32)
        self.up_bias = rng.standard_normal(len(self.up)).astype(np.float32) if biased else None
        self.down_bias = rng.standard_normal(len(self.down)).astype(np.float32) if biased else None
        halves = (self.up[: s.experts * s.n], self.up[s.experts * s.n :]) if s.gated else (self.up, None)
        self._packed = [self._pack(*halves), self._pack(self.down, None)]

    def _pack(self, rows: Any, up: Any) -> Weight:
        layout = pack.packed_layout(find_format(self.fmt), *rows.shape, gated=up is not None)
        memory = aligned_bytes(pack.pack(find_format(self.fmt), rows, up))
        at = {r.name: memory.ctypes.data + r.offset for r in layout.regions}
        weight = Weight(at["data"], at.get("scale"), at.get("min"))
        weight.arrays = (memory,)
        return weight

    def run(self, unit: Unit, x: Any, choices: Any, threads: int = 1) -> Any:
        """The kernels after the router in their order."""
        s, name, fmt, t = self.shape, self.name, self.fmt, len(x)
        pairs, quantized = t * s.top_k, fmt[0] == "w"
        choices = choices.copy()
        source, rows = x, np.full((pairs, s.k), np.nan, np.float32)
        if quantized:
            source, rows = _quants(unit, fmt, t, s.k), _quants(unit, fmt, pairs, s.k)
            unit.run(f"quantize_{name}_{fmt}_{s.k}", t, x, source, threads=threads)
        unit.run(f"gather_{name}_{fmt}", t, source, choices, rows, threads=1)  # reads what all threads write
        h = np.full((pairs, s.n), np.nan, np.float32)
        unit.run(f"up_{name}_{fmt}", t, choices, rows, self._packed[0], self.up_bias, h, threads=threads)
        inner = h
        if quantized:
            inner = _quants(unit, fmt, pairs, s.n)
            unit.run(f"quantize_{name}_{fmt}_{s.n}", pairs, h, inner, threads=threads)
        y = np.full((pairs, s.k), np.nan, np.float32)
        unit.run(f"down_{name}_{fmt}", t, choices, inner, self._packed[1], self.down_bias, y, threads=threads)
        out = np.full((t, s.k), np.nan, np.float32)
        unit.run(f"combine_{name}", t, choices, y, out, threads=threads)
        return out

    def wanted(self, x: Any, index: Any, weights: Any) -> Any:
        """The dialect's reference with a router that chooses just that: logits whose softmax are the weights."""
        s = self.shape
        out = np.zeros_like(x)
        for j in range(s.top_k):
            logits = torch.full((len(x), s.experts), -100.0).scatter(1, torch.from_numpy(index[:, j : j + 1]), 100.0)
            tensors = (
                None if a is None else torch.from_numpy(a) for a in (self.up, self.up_bias, self.down, self.down_bias)
            )
            router = ("softmax", 1, 1, 1, 1, False, 0.0, 0.0, 1.0)
            y = OPS["moe"](torch.from_numpy(x), logits, None, *tensors, *router, s.act, s.gated, self.fmt)
            out += weights[:, j : j + 1] * y.numpy()
        return out


def _inputs(s: Shape, t: int, seed: int, experts: int | None = None) -> tuple[Any, Any, Any]:
    """Rows, and experts with weights; experts: of so many only, so that the others have no tokens."""
    rng = np.random.default_rng(seed)
    index = np.stack([rng.permutation(min(max(experts or s.experts, s.top_k), s.experts))[: s.top_k] for _ in range(t)])
    return (
        rng.standard_normal((t, s.k)).astype(np.float32), index.reshape(t, s.top_k),
        rng.uniform(0.1, 1, (t, s.top_k)).astype(np.float32),
    )  # fmt: skip


CASES = [(name, fmt) for name, s in SHAPES.items() for fmt in s.formats]


@pytest.mark.parametrize(("name", "fmt"), CASES)
@pytest.mark.parametrize(("t", "experts"), [(1, None), (2, None), (9, 3), (37, None), (75, 4)])
def test_a_mixture(unit, name, fmt, t, experts):
    mixture = Mixture(name, fmt, biased=t != 2)
    x, index, weights = _inputs(mixture.shape, t, t, experts)
    got = mixture.run(unit, x, _choices(index, weights), threads=2)
    want = mixture.wanted(x, index, weights)
    apart = np.abs(got - want) / np.abs(want).max()
    # a value of the activation that lies between two int8 numbers may fall on either
    assert (apart <= 2e-5).mean() >= (1 if fmt == "f32" else 0.97) and apart.max() <= (2e-5 if fmt == "f32" else 5e-3)


@pytest.mark.parametrize("fmt", SHAPES["gated"].formats)
def test_tokens_do_not_depend_on_their_batch_or_threads(unit, fmt):
    mixture = Mixture("gated", fmt, biased=True)
    x, index, weights = _inputs(mixture.shape, 90, 5, 4)  # several experts have more rows than are few
    choices = _choices(index, weights)
    whole = mixture.run(unit, x, choices)
    for threads in (2, 3):
        assert np.array_equal(whole, mixture.run(unit, x, choices, threads))
    for begin, end in [(0, 1), (89, 90), (3, 8), (10, 60)]:
        part = mixture.run(unit, x[begin:end], choices[begin:end])
        assert np.array_equal(part.view(np.uint32), whole[begin:end].view(np.uint32))


def test_gathering_in_parts_is_gathering(unit):
    s, (x, index, weights) = SHAPES["gated"], _inputs(SHAPES["gated"], 23, 1)
    found = []
    for threads in (1, 3):
        choices, rows = _choices(index, weights), np.zeros((23 * 3, s.k), np.float32)
        unit.run("gather_gated_f32", 23, x, choices, rows, threads=threads)
        found.append((choices, rows))
    assert all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in zip(*found, strict=True))
    pairs = found[0][0].reshape(23, 3, 3)[..., 2].view(np.int32)
    assert sorted(pairs.ravel()) == list(range(69))
    assert np.array_equal(found[0][1][pairs], np.repeat(x[:, None], 3, axis=1))
    order = np.argsort(pairs.ravel())
    assert (np.diff(index.ravel()[order]) >= 0).all()  # by expert, and within one by token
    assert all((np.diff(np.sort(pairs[index == e])) == 1).all() for e in range(7))


@pytest.mark.parametrize("mcpu", [VNNI_EMULATED, V4, *EMULATED])
def test_instruction_sets_agree_bit_for_bit(mcpu):
    units = [Unit(_wrappers(), require(m)) for m in (V3, mcpu)]
    logits = np.random.default_rng(4).standard_normal((9, 24)).astype(np.float32)
    for fmt in SHAPES["gated"].formats:
        mixture = Mixture("gated", fmt, biased=True)
        x, index, weights = _inputs(mixture.shape, 9, 3)
        here, there = (mixture.run(u, x, _choices(index, weights)) for u in units)
        assert np.array_equal(here.view(np.uint32), there.view(np.uint32)), fmt
    for name in ("grouped", "best"):
        router, found = ROUTERS[name][1], []
        for u in units:
            found.append(np.zeros((9, router.top_k * 3), np.float32))
            u.run(f"route_{name}", 9, logits, None, router.floor, router.eps, router.scale, found[-1])
        assert np.array_equal(found[0].view(np.uint32), found[1].view(np.uint32)), name


@pytest.mark.parametrize("name", ROUTERS)
def test_route(unit, name):
    experts, router = ROUTERS[name]
    rng = np.random.default_rng(experts)
    logits = rng.standard_normal((33, experts)).astype(np.float32) * 3
    logits[:2] = 0  # all equal: the first are chosen
    correction = rng.standard_normal(experts).astype(np.float32) * 0.3
    for c in (None, correction):
        out = np.zeros((33, router.top_k * 3), np.float32)
        wide = np.full((33, experts + 5), np.nan, np.float32)
        wide[:, :experts] = logits
        args = (router.floor, router.eps, router.scale)
        unit.run(f"route_{name.replace(' ', '_')}", 33, wide, c, *args, out, threads=2)
        found = out.reshape(33, router.top_k, 3)
        index, weights = route(torch.from_numpy(logits), None if c is None else torch.from_numpy(c), router)
        assert np.array_equal(found[..., 0].view(np.int32), index.numpy())
        assert np.abs(found[..., 1] - weights.numpy()).max() <= 2e-6 * router.scale


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_of_garbage_chooses_experts_that_exist(unit, name):
    experts, router = ROUTERS[name]
    logits = np.zeros((4, experts), np.float32)
    logits[0], logits[1, 0], logits[2], logits[3] = np.nan, np.nan, -np.inf, np.inf
    out = np.full((4, router.top_k * 3), np.nan, np.float32)
    unit.run(f"route_{name.replace(' ', '_')}", 4, logits, None, router.floor, router.eps, router.scale, out)
    found = out.reshape(4, router.top_k, 3)
    index = found[..., 0].view(np.int32)
    assert (index >= 0).all() and (index < experts).all()
    assert np.isnan(found[0, :, 1]).all()  # garbage stays visible


def test_row_gate(unit):
    rng = np.random.default_rng(0)
    x, g = rng.standard_normal((5, 40)).astype(np.float32), rng.standard_normal((5, 3)).astype(np.float32)
    out = np.zeros((5, 40), np.float32)
    unit.run("gate", 5, x, g, out, threads=2)
    assert np.abs(out - x / (1 + np.exp(-g[:, :1]))).max() <= 1e-6
