"""Rotary tables, rotations, and keys and values in their pages, against the dialect."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_harness import F16, SLACK, Output, launch, meta, pow2

from llmc.kernels.dialect import OPS
from llmc.kernels.triton import rope

F32 = torch.float32
PAGE = 16


def random(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def frequencies(rot, base=10000.0):
    return base ** -(torch.arange(0, rot, 2, dtype=F32) / rot)


@pytest.mark.parametrize(("rot", "sign"), [(6, 1), (32, -1), (80, 1)])
def test_table(rot, sign):
    """At large positions too the cosine is that of the float32 angle: far positions have no worse tables."""
    positions = int32([0, 1, 7, 131071, 999999, 1000000])
    y = Output((8, rot), F32)
    inv_freq = sign * frequencies(rot)
    launch(
        rope.rope_table, (8,), positions=positions, inv_freq=inv_freq, table=y, meta=meta(tokens=6), ROT=rot,
        W=pow2(rot // 2), SCALE=1.25,
    )  # fmt: skip
    got = y.checked(6)
    torch.testing.assert_close(got, OPS["rope_table"](positions, inv_freq, 1.25), rtol=0, atol=3e-7 * SLACK)
    angle = (positions.float()[:, None] * inv_freq).double()
    torch.testing.assert_close(
        got, (torch.cat([angle.cos(), angle.sin()], -1)).float() * 1.25, rtol=0, atol=2e-7 * SLACK
    )


@pytest.mark.parametrize(
    ("d", "rot", "interleaved"),
    [
        (16, 16, False),
        (64, 16, False),
        (80, 32, False),
        (80, 80, False),
        (24, 0, False),
        (16, 16, True),
        (80, 32, True),
    ],
)
def test_rope(d, rot, interleaved):
    """Whole and partial rotation, heads whose width is no power of two, in the middle of wider rows."""
    t, heads = 3, 2
    x, table = random(t, 200), random(t, max(rot, 1), seed=1)
    y = Output((t + 1, heads * d), F32)
    launch(
        rope.rope, (t + 1, heads), x=x, table=table if rot else None, y=y, meta=meta(tokens=t), D=d,
        DP=pow2(d, 16), ROT=rot, INTERLEAVED=interleaved, XC=11, LDX=200, LDY=heads * d,
    )  # fmt: skip
    part = x[:, 11 : 11 + heads * d].reshape(t, heads, d)
    want = (OPS["rope"](part, table, interleaved) if rot else part).reshape(t, heads * d)
    torch.testing.assert_close(y.checked(t), want, rtol=0, atol=1e-6 * SLACK)


class Written:
    """One run of rope_kv_write on two sequences, with scattered pages in a pool of NaN or garbage."""

    POSITIONS = ((14, 15, 16, 17), (0,), (47, 48))
    TABLES = ((7, 2, 5), (3, 0, 0), (1, 9, 4, 8))

    def __init__(self, hq, hkv, d, rot, kv, half, separate=False, interleaved=False):
        self.positions = int32([p for s in self.POSITIONS for p in s])
        self.seqs = int32([i for i, s in enumerate(self.POSITIONS) for _ in s])
        self.t, self.hq, self.hkv, self.d = len(self.positions), hq, hkv, d
        width = (hq + 2 * hkv) * d
        self.x, self.table = random(self.t, width, seed=3), random(self.t, max(rot, 1), seed=4)
        parts = self.x.view(self.t, -1, d).split([hq, hkv, hkv], 1)
        self.parts = parts if rot == 0 else (*(OPS["rope"](p, self.table, interleaved) for p in parts[:2]), parts[2])
        self.q = Output((self.t + 1, hq * d), half)
        self.pools = [Output((10, hkv, PAGE, d), kv) for _ in range(2)]
        self.scales = [Output((10, hkv, PAGE), F32) if kv == torch.int8 else None for _ in range(2)]
        tables = torch.zeros(3, 4, dtype=torch.int32)
        for i, row in enumerate(self.TABLES):
            tables[i, : len(row)] = int32(row)
        if separate:  # three buffers of their own strides instead of one
            inputs = [p.reshape(self.t, -1).contiguous() for p in self.x.view(self.t, -1, d).split([hq, hkv, hkv], 1)]
            where = {"QC": 0, "KC": 0, "VC": 0, "LDQ": hq * d, "LDK": hkv * d, "LDV": hkv * d}
        else:
            inputs = [self.x] * 3
            where = {"QC": 0, "KC": hq * d, "VC": (hq + hkv) * d, "LDQ": width, "LDK": width, "LDV": width}
        launch(
            rope.rope_kv_write, (self.t + 1, hq + 2 * hkv), **dict(zip("qkv", inputs, strict=True)),
            table=self.table if rot else None, q_out=self.q, keys=self.pools[0], values=self.pools[1],
            key_scales=self.scales[0], value_scales=self.scales[1], positions=self.positions, seqs=self.seqs,
            tables=tables, meta=meta(tokens=self.t, seqs=3, stride=4), HQ=hq, HKV=hkv, D=d, DP=pow2(d, 16), ROT=rot,
            INTERLEAVED=interleaved, **where,
        )  # fmt: skip

    def slots(self):
        """(page, offset in the page) of each token, by the definition of a block table."""
        pages = [self.TABLES[s][p // PAGE] for s, p in zip(self.seqs.tolist(), self.positions.tolist(), strict=True)]
        return pages, [p % PAGE for p in self.positions.tolist()]

    def stored(self, which):
        """What lies in the slots of the tokens, [T, HKV, D] and scales; everything else is untouched."""
        pages, offsets = self.slots()
        pool, scale = self.pools[which], self.scales[which]
        parts = []
        for out in (pool, scale):
            if out is None:
                parts.append(None)
                continue
            parts.append(out.checked()[pages, :, offsets].clone())
            out.data[pages, :, offsets] = torch.zeros(1, dtype=out.data.dtype)
            rest = torch.ones(out.shape[:3], dtype=torch.bool)
            rest[pages, :, offsets] = False
            assert (out.data[rest].view(torch.uint8) == 0x5A).all(), "a slot of no token was written"
        return parts


@pytest.mark.parametrize(
    ("hq", "hkv", "d", "rot", "interleaved"),
    [(6, 2, 16, 16, False), (2, 2, 80, 32, False), (3, 1, 64, 0, False), (2, 2, 80, 32, True)],
)
def test_write(hq, hkv, d, rot, interleaved):
    case = Written(hq, hkv, d, rot, F32, F32, separate=d == 80, interleaved=interleaved)
    want_q, *want = case.parts
    torch.testing.assert_close(case.q.checked(case.t), want_q.reshape(case.t, -1), rtol=0, atol=1e-6 * SLACK)
    for which in range(2):
        torch.testing.assert_close(case.stored(which)[0], want[which], rtol=0, atol=1e-6 * SLACK if which == 0 else 0)


def test_write_half():
    case = Written(4, 2, 64, 64, F16, F16)
    torch.testing.assert_close(
        case.q.checked(case.t).float(), case.parts[0].reshape(case.t, -1), rtol=1e-3 * SLACK, atol=1e-6
    )
    torch.testing.assert_close(case.stored(0)[0].float(), case.parts[1], rtol=1e-3 * SLACK, atol=1e-6)
    assert case.stored(1)[0].equal(case.parts[2].to(F16))


def test_write_int8():
    """Half a step from the value at most, a scale per position and head, extremes at +-127."""
    case = Written(2, 2, 80, 32, torch.int8, F16)
    for which, want in enumerate(case.parts[1:]):
        q, scale = case.stored(which)
        torch.testing.assert_close(scale, want.abs().amax(-1) / 127, rtol=1e-6, atol=0)
        assert (q.float().abs().amax(-1) == 127).all()
        assert ((q * scale[..., None] - want).abs() <= 0.5001 * scale[..., None]).all()


def test_not_finite_values_stay_visible_in_int8():
    values = random(1, 32)
    for bad in (float("nan"), float("inf")):
        values[0, 3] = bad
        pool, scales = Output((1, 1, PAGE, 16), torch.int8), Output((1, 1, PAGE), F32)
        other, other_scales = Output((1, 1, PAGE, 16), torch.int8), Output((1, 1, PAGE), F32)
        launch(
            rope.rope_kv_write, (1, 2), q=values, q_out=Output((1, 16), F32), k=values, v=values, keys=pool,
            values=other, key_scales=scales, value_scales=other_scales, positions=int32([2]), seqs=int32([0]),
            tables=int32([[0]]),
            meta=meta(tokens=1, seqs=1, stride=1), HQ=0, HKV=1, D=16, DP=16, ROT=0, INTERLEAVED=False, QC=0, KC=0,
            VC=16, LDQ=32, LDK=32, LDV=32,
        )  # fmt: skip
        assert scales.data[0, 0, 2].isnan()
        assert other_scales.data[0, 0, 2].isfinite()
