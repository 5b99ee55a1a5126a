"""kernels/cpu/limits.h: what the probes read and compute. How fast they are is not tested."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from cpu_harness import PORTABLE, V3, V4, Unit, aligned_bytes, compile_unit, require

WRAPPERS = """
EXPORT void* create(int nt) { int error; return pool_create(nt, &error); }
EXPORT void destroy(void* pool) { pool_destroy((Pool*)pool); }
EXPORT void touch(void* pool, uint8_t* data, int64_t bytes) {
  ReadJob job{data, bytes, 0};
  ((Pool*)pool)->run(touch_memory, &job);
}
EXPORT uint32_t sum(void* pool, uint8_t* data, int64_t bytes) {
  ReadJob job{data, bytes, 0};
  ((Pool*)pool)->run(read_memory, &job);
  return job.sum;
}
EXPORT double bandwidth(void* pool, uint8_t* data, int64_t bytes) { return read_bandwidth((Pool*)pool, data, bytes); }
EXPORT double peak(void* pool, int kind) { return peak_ops((Pool*)pool, kind); }
EXPORT int64_t macs(int kind) { return kind == 1 ? PeakW8::kMacs : PeakW4::kMacs; }
template <class Unit>
static int64_t sum_of_one() {
  Unit unit;
  PeakInts w = unit.x;
  unit.add(w);
  int32_t lanes[sizeof(unit.sum) / 4];
  __builtin_memcpy(lanes, &unit.sum, sizeof(lanes));
  int64_t total = 0;
  for (int32_t lane : lanes) total += lane;
  return total;
}
EXPORT int64_t added(int kind) { return kind == 1 ? sum_of_one<PeakW8>() : sum_of_one<PeakW4>(); }
"""


@pytest.fixture(scope="module", params=[PORTABLE, V3, V4])
def library(request):
    lib = Unit(WRAPPERS, require(request.param)).library
    lib.create.restype = ctypes.c_void_p
    lib.destroy.argtypes = [ctypes.c_void_p]
    for name, result in (("touch", None), ("sum", ctypes.c_uint32), ("bandwidth", ctypes.c_double)):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    lib.peak.restype, lib.peak.argtypes = ctypes.c_double, [ctypes.c_void_p, ctypes.c_int]
    lib.macs.restype = lib.added.restype = ctypes.c_int64
    return lib


@pytest.fixture(params=[1, 3])
def pool(request, library):
    made = library.create(request.param)
    yield made
    library.destroy(made)


@pytest.mark.parametrize("blocks", [1, 2, 7, 100])
def test_every_byte_is_read_once(library, pool, blocks):
    data = np.random.default_rng(blocks).integers(0, 256, blocks * 256, np.uint8)
    memory = aligned_bytes(data.tobytes())
    wanted = int(memory.view(np.uint32).sum(dtype=np.uint64)) % 2**32
    assert library.sum(pool, memory.ctypes.data, memory.nbytes) == wanted


def test_touching_writes_what_is_read_and_nothing_else(library, pool):
    memory = aligned_bytes(bytes(9 * 256 + 64))
    library.touch(pool, memory.ctypes.data, 9 * 256 + 63)
    assert (memory[: 9 * 256] == 1).all() and (memory[9 * 256 :] == 0).all()


def test_rates_are_positive_numbers(library, pool):
    memory = aligned_bytes(bytes(1 << 16))
    rates = [library.bandwidth(pool, memory.ctypes.data, memory.nbytes), *(library.peak(pool, k) for k in range(3))]
    assert all(np.isfinite(rate) and rate > 0 for rate in rates), rates


@pytest.mark.parametrize("kind", [1, 2])
def test_a_unit_does_as_many_multiply_adds_as_it_counts(library, kind):
    """Every product is 3 * 3, so the sum says how many there were."""
    assert library.added(kind) == 9 * library.macs(kind)


@pytest.mark.cross
def test_the_avx512_branch_compiles():
    assert compile_unit(WRAPPERS, V4).exists()
