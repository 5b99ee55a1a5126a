"""Other CPUs against x86-64-v3, bit for bit: vector functions, attention, the pool's threads and whole models.

aarch64, AVX-512 and AVX-VNNI run emulated, the latter two also on a CPU that has them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_cpu_attention
import test_cpu_linear
import test_cpu_math
import test_cpu_pool
from cpu_batch import BuiltBatch
from cpu_harness import (
    AARCH64,
    AVXVNNI,
    AVXVNNI_IN_BOCHS,
    BOCHS,
    NO_MAT,
    V3,
    V4,
    V4_IN_BOCHS,
    QuantBuf,
    Unit,
    Weight,
    aligned_bytes,
    as_mat,
    emulator,
    require,
)
from cross_guest import Guest, Machine
from tiny_engines import Sequences, compiled, lowered

from llmc.codegen.cpu.compile import compile_unit
from llmc.kernels import pack
from llmc.kernels.formats import W8
from llmc.runtime.batch import Batch, StepOutput
from llmc.runtime.cpu.executor import CpuExecutor, ExecutorConfig
from llmc.runtime.cpu.targets import parse_target
from llmc.runtime.sampling_rows import pack_sampling

pytestmark = pytest.mark.cross

OTHERS = {
    AARCH64: "cpu:aarch64+dotprod",
    V4: "cpu:x86-64-v4",
    V4_IN_BOCHS: "cpu:x86-64-v4",
    AVXVNNI: "cpu:x86-64-v3+avxvnni",
    AVXVNNI_IN_BOCHS: "cpu:x86-64-v3+avxvnni",
}
"""Variant -> the target whose code it is."""


@pytest.fixture(scope="module", params=OTHERS)
def other(request: pytest.FixtureRequest) -> str:
    return require(request.param)


@pytest.fixture(scope="module")
def vectors(other: str) -> list[Unit]:
    return [Unit(test_cpu_math.WRAPPERS, m) for m in (require(V3), other)]


def same(here: Any, there: Any) -> Any:
    """Elementwise: equal bits, or both NaN (what a NaN carries differs between the architectures)."""
    bits = np.dtype(f"u{here.itemsize}")
    return (here.view(bits) == there.view(bits)) | (np.isnan(here) & np.isnan(there))


@pytest.mark.parametrize("name", ["exp", "tanh", "erf", "sigmoid", "silu", "gelu", "gelu_tanh", "quick_gelu", "relu",
                                  "relu2", "act_tanh", "hsum", "hmax"])  # fmt: skip
def test_vector_functions_of_any_bits(vectors: list[Unit], name: str) -> None:
    rng = np.random.default_rng(1)
    x = np.concatenate([
        rng.integers(0, 2**32, 40000, dtype=np.uint32).view(np.float32),
        rng.standard_normal(40000).astype(np.float32) * 10,
        np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-42, -1e-42, 3e38], np.float32),
    ])  # fmt: skip
    here, there = (test_cpu_math.apply(unit, f"v_{name}", x)[1] for unit in vectors)
    assert same(here, there).all()


def test_functions_in_double(vectors: list[Unit]) -> None:
    x = np.random.default_rng(2).uniform(0, 1e6, 40000)
    for name, count in (("v_sincos", 2), ("v_log", 1)):
        results = []
        for unit in vectors:
            results.append([np.empty_like(x) for _ in range(count)])
            unit.run(name, x.size, x, *results[-1])
        assert np.array_equal(*results), name


@pytest.fixture(scope="module")
def attention(other: str) -> list[Unit]:
    return [Unit(test_cpu_attention.WRAPPERS, m) for m in (require(V3), other)]


@pytest.mark.parametrize("options", [{}, {"window": 9, "cap": 1.5}])
@pytest.mark.parametrize(("name", "kv"), test_cpu_attention.CASES)
def test_attention(attention: list[Unit], name: str, kv: str, options: dict[str, Any]) -> None:
    """Shorter than test_cpu_attention.py, which takes minutes in the emulator."""
    here, there = (test_cpu_attention.Sequences(unit, name, kv, [45, 3, 20], 3) for unit in attention)
    for case in (here, there):
        case.step({0: 33, 2: 20}, threads=2, **options)
        case.step({1: 3, 0: 12}, **options)
    assert all(same(a, b).all() and np.isfinite(a).all() for a, b in zip(here.out, there.out, strict=True))


def test_attention_of_threads_that_share_rows(attention: list[Unit]) -> None:
    here, there = (test_cpu_attention.Sequences(unit, "mqa", "bf16", [600], 9) for unit in attention)
    for case in (here, there):
        case.step({0: 599})
        assert case.step({0: 1}, threads=3, scratch=1 << 18).shared
    assert same(here.out[0], there.out[0]).all()


def create_pool(unit: Unit, threads: int) -> Any:
    error = np.full(1, -1, np.int32)
    pool = unit.call("create", threads, error)
    assert pool and error[0] == 0
    return ctypes.c_void_p(pool)


def test_pool_phases_stay_in_step() -> None:
    unit = Unit(test_cpu_pool.WRAPPERS, require(AARCH64))
    for threads in (1, 2, 3, 5):
        pool = create_pool(unit, threads)
        for times, phases in ((30, 5), (3, 64)):
            assert unit.call("run_jobs", pool, times, phases) & 0xFFFFFFFF == 0
        unit.call("destroy", pool)


def test_kernels_on_real_threads_give_the_bits_of_v3() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((13, 96)).astype(np.float32)
    memory = aligned_bytes(pack.pack(W8, rng.standard_normal((96, 96)).astype(np.float32)))
    weight = Weight(*(memory.ctypes.data + r.offset for r in pack.packed_layout(W8, 96, 96).regions), None)

    def run(unit: Unit, threads: int) -> Any:
        out, normed = x.copy(), np.empty((13, 96), np.float32)
        q, scale, total = np.empty((13, 96), np.int16), np.empty((13, 3), np.float32), np.empty((13, 3), np.int32)
        buffers = QuantBuf(q.ctypes.data, scale.ctypes.data, total.ctypes.data)
        layer = test_cpu_pool.Layer(13, as_mat(out), as_mat(normed), as_mat(out), buffers, weight)
        layer.arrays = (out, normed, q, scale, total, memory)
        pool = create_pool(unit, threads)
        unit.call("run_layer", pool, ctypes.byref(layer), 20)
        unit.call("destroy", pool)
        return out

    want = run(Unit(test_cpu_pool.WRAPPERS, require(V3)), 1)
    unit = Unit(test_cpu_pool.WRAPPERS, require(AARCH64))
    for threads in (1, 2, 3):
        assert np.array_equal(run(unit, threads).view(np.uint32), want.view(np.uint32))


@cache
def compiled_for(target: str, family: str, precision: str) -> bytes:
    return compile_unit(lowered(family, precision).source, parse_target(target))


class GuestExecutor:
    """What CpuExecutor is to code for this machine: steps of a plan's code for an emulated one."""

    def __init__(self, path: Path, machine: Machine, weights: memoryview, config: ExecutorConfig) -> None:
        """path: of the shared object."""
        self.guest, self.num_pages = Guest(path, machine), config.num_pages
        self.vocab_size = self.guest.call("llmc_vocab_size", [])
        sizes = [ctypes.c_int32(n) for n in (config.max_num_tokens, config.max_num_rows, config.threads)]
        memory = [np.frombuffer(weights, np.uint8)]
        for size in (self.guest.call("llmc_page_bytes", []) * config.num_pages,
                     self.guest.call("llmc_arena_bytes", sizes)):  # fmt: skip
            memory.append(aligned_bytes(bytes(size)))
        for array in memory:
            self.guest.keep(array)
        error = np.zeros(1, np.int32)
        at = [ctypes.c_void_p(a.ctypes.data) for a in (*memory, error)]
        args = [at[0], at[1], ctypes.c_int64(config.num_pages), at[2], *sizes, at[3]]
        self.engine = ctypes.c_void_p(self.guest.call("llmc_create", args, [error]))
        assert self.engine, error

    def step(self, batch: Batch) -> StepOutput:
        rows, sequences = len(batch.rows), len(batch.query_start) - 1
        sampling, flat = pack_sampling(batch.sampling)
        out = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
        logits = np.empty((rows, self.vocab_size), np.float32)
        counts = {"num_tokens": len(batch.tokens), "num_seqs": sequences, "num_rows": rows,
                  "block_table_stride": batch.block_tables.shape[1]}  # fmt: skip
        built = BuiltBatch(counts, {
            "tokens": batch.tokens, "positions": batch.positions, "query_start": batch.query_start,
            "block_tables": batch.block_tables, "rows": batch.rows, "sampling": sampling, **flat,
            "out_tokens": out[0], "out_logprobs": out[1], "logits": logits,
        })  # fmt: skip
        assert self.guest.call("llmc_step", [self.engine, built.c], built.struct.arrays) & 0xFFFFFFFF == 0
        return StepOutput(*out, logits)

    def close(self) -> None:
        self.guest.call("llmc_destroy", [self.engine])


@pytest.mark.parametrize(
    ("family", "precision"),
    [("llama", "int8"), ("llama", "int4"), ("llama", "bf16"), ("gemma2", "int8"), ("gpt2", "fp32")],
)
def test_whole_models_give_the_logits_of_v3(tmp_path: Path, family: str, precision: str, other: str) -> None:
    """The code as a plan holds it: prefill of two sequences, then decoding. On two threads where the emulator has any
    (Bochs is one CPU)."""
    require(V3)
    weights = compiled(family, precision)[1]
    config = ExecutorConfig(64, 64, 8, 1 if other in BOCHS else 2)
    code, machine = compiled_for(OTHERS[other], family, precision), emulator(other)
    here = CpuExecutor(compiled_for("cpu:x86-64-v3", family, precision), weights, config)
    if machine is None:
        there: Any = CpuExecutor(code, weights, config)
    else:
        path = tmp_path / "step.so"
        path.write_bytes(code)
        there = GuestExecutor(path, machine, weights, config)
    runs = []
    for executor in (here, there):
        run = Sequences(executor, [[5, 9, 200, 3, 17, 44, 8] * 3, [1, 2, 3]])
        run.decode(run.step({0: 21, 1: 3}), 3)
        runs.append(run)
        executor.close()
    assert runs[0].tokens == runs[1].tokens
    for s in range(2):
        assert np.array_equal(runs[0].rows(s).view(np.uint32), runs[1].rows(s).view(np.uint32))


@pytest.mark.parametrize(("code", "cpu"), [(V4, AVXVNNI_IN_BOCHS), (AVXVNNI, V4_IN_BOCHS)])
def test_an_emulated_cpu_has_its_own_instructions_only(code: str, cpu: str) -> None:
    """So what passes above needs no more than its target promises, whatever this machine has."""
    x, weight, _, _ = test_cpu_linear.inputs("w8", 1, test_cpu_linear.N, test_cpu_linear.K, 1)
    packed = test_cpu_linear.Packed("w8", weight)
    with pytest.raises(RuntimeError, match="#UD"):
        unit = Unit(test_cpu_linear.WRAPPERS, code, require(cpu))
        test_cpu_linear.product(unit, "linear", "w8", x, packed, test_cpu_linear.N, None, NO_MAT)
