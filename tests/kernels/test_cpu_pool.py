"""The thread pool: every thread runs every phase, in step, again and again."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

import numpy as np
import pytest
from cpu_harness import NO_MAT, PORTABLE, Mat, QuantBuf, Unit, Weight, aligned_bytes, as_mat, require

from llmc.kernels import pack
from llmc.kernels.formats import W8

WRAPPERS = """
struct Job { int phases, failures; int counts[64]; };
EXPORT void* create(int nt, int* error) { return pool_create(nt, error); }
EXPORT void destroy(void* pool) { pool_destroy((Pool*)pool); }
static void work(void* ctx, Par par) {
  Job& job = *(Job*)ctx;
  for (int phase = 0; phase < job.phases; ++phase) {
    __atomic_fetch_add(&job.counts[phase], 1, __ATOMIC_RELAXED);
    par.barrier();  // after it, every thread has counted this phase and none the next but one
    if (__atomic_load_n(&job.counts[phase], __ATOMIC_RELAXED) != par.nt)
      __atomic_fetch_add(&job.failures, 1, __ATOMIC_RELAXED);
    if (phase > 0 && job.counts[phase - 1] != par.nt) __atomic_fetch_add(&job.failures, 1, __ATOMIC_RELAXED);
  }
}
// Every phase has `pieces` units of work in pieces of `size`. In the odd ones thread 0 is held up in its first piece
// until all others are done.
struct Shares { int phases, pieces, size, failures, done; int times[64][200]; };
static void share(void* ctx, Par par) {
  Shares& s = *(Shares*)ctx;
  for (int phase = 0; phase < s.phases; ++phase) {
    bool held_up = par.tid == 0 && par.nt > 1 && phase % 2 == 1;
    share_pieces(par, s.pieces, s.size, [&](Range r) {
      for (int i = r.begin; i < r.end; ++i) __atomic_fetch_add(&s.times[phase][i], 1, __ATOMIC_RELAXED);
      if (r.end - r.begin > s.size || r.end <= r.begin) __atomic_fetch_add(&s.failures, 1, __ATOMIC_RELAXED);
      int done = __atomic_add_fetch(&s.done, r.end - r.begin, __ATOMIC_SEQ_CST);
      while (held_up && done < (phase + 1) * s.pieces) done = __atomic_load_n(&s.done, __ATOMIC_SEQ_CST);
    });
    par.barrier();
  }
}
EXPORT void run_shares(void* pool, Shares* s) { ((Pool*)pool)->run(share, s); }
struct Layer { int t; Mat x, normed, out; QuantBuf q; Weight w; };
static void layer(void* ctx, Par par) {
  Layer& l = *(Layer*)ctx;
  rms_norm<1, 96>(par, l.t, l.x, nullptr, 1e-6f, l.normed);
  quantize<96, Fmt::w8>(par, l.t, l.normed, l.q);
  par.barrier();
  linear<Fmt::w8, 96, 96, Act::silu, false>(par, l.t, l.q, l.w, nullptr, l.x, l.x);
  par.barrier();
}
EXPORT void run_layer(void* pool, Layer* l, int times) {
  for (int i = 0; i < times; ++i) ((Pool*)pool)->run(layer, l);
}
EXPORT int run_jobs(void* pool, int times, int phases) {
  int failures = 0;
  for (int i = 0; i < times; ++i) {
    Job job{phases, 0, {}};
    ((Pool*)pool)->run(work, &job);
    for (int p = 0; p < phases; ++p) failures += job.counts[p] != ((Pool*)pool)->nt;
    failures += job.failures;
  }
  return failures;
}
"""


@pytest.fixture(scope="module")
def library():
    lib = Unit(WRAPPERS, require(PORTABLE)).library
    lib.create.restype = ctypes.c_void_p
    lib.destroy.argtypes = [ctypes.c_void_p]
    lib.run_jobs.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    return lib


@pytest.mark.parametrize("threads", [1, 2, 3, 9])
def test_phases_stay_in_step(library, threads):
    error = ctypes.c_int(-1)
    pool = library.create(threads, ctypes.byref(error))
    assert pool and error.value == 0
    assert library.run_jobs(pool, 400 if threads < 3 else 30, 5) == 0
    time.sleep(0.05)  # workers are asleep now
    assert library.run_jobs(pool, 5, 64) == 0
    library.destroy(pool)


class Shares(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("phases", "pieces", "size", "failures", "done")]
    _fields_ += [("times", ctypes.c_int * 200 * 64)]


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize(("pieces", "size"), [(0, 1), (1, 1), (2, 3), (37, 1), (64, 2), (199, 7)])
def test_every_piece_is_done_once_even_if_its_thread_is_held_up(library, threads, pieces, size):
    pool = library.create(threads, ctypes.byref(ctypes.c_int()))
    for _ in range(3):  # an odd number of barriers in each run
        shares = Shares(phases=6, pieces=pieces, size=size)
        library.run_shares(ctypes.c_void_p(pool), ctypes.byref(shares))
        assert shares.failures == 0
        assert (np.array(shares.times)[:6, :pieces] == 1).all()
    library.destroy(pool)


class Layer(ctypes.Structure):
    _fields_ = [
        ("t", ctypes.c_int),
        ("x", Mat),
        ("normed", Mat),
        ("out", Mat),
        ("q", QuantBuf),
        ("w", Weight),
    ]


def run_layers(library, threads):
    """Twenty layers that feed each other, on a pool of so many threads; what comes out."""
    rng = np.random.default_rng(1)
    x, normed = rng.standard_normal((13, 96)).astype(np.float32), np.empty((13, 96), np.float32)
    q, scale, total = np.empty((13, 96), np.int16), np.empty((13, 3), np.float32), np.empty((13, 3), np.int32)
    w = rng.standard_normal((96, 96)).astype(np.float32)
    memory = aligned_bytes(pack.pack(W8, w))
    regions = [memory.ctypes.data + r.offset for r in pack.packed_layout(W8, 96, 96).regions]
    buffers = QuantBuf(q.ctypes.data, scale.ctypes.data, total.ctypes.data)
    layer = Layer(13, as_mat(x), as_mat(normed), NO_MAT, buffers, Weight(*regions, None))
    pool = library.create(threads, ctypes.byref(ctypes.c_int()))
    library.run_layer(ctypes.c_void_p(pool), ctypes.byref(layer), 20)
    library.destroy(pool)
    return x


def test_kernels_on_real_threads_give_the_same_bits(library):
    want = run_layers(library, 1)
    assert np.isfinite(want).all()
    for threads in (2, 3, 2, 3):
        assert np.array_equal(run_layers(library, threads).view(np.uint32), want.view(np.uint32))


def test_threads_have_names(library):
    pool = library.create(4, ctypes.byref(ctypes.c_int()))
    names = {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    assert {"llmc-pool-1", "llmc-pool-2", "llmc-pool-3"} <= names
    library.destroy(pool)


def test_create_and_destroy_often(library):
    error = ctypes.c_int(-1)
    for i in range(60):
        pool = library.create(1 + i % 4, ctypes.byref(error))
        if i % 3:
            assert library.run_jobs(pool, 2, 3) == 0
        library.destroy(pool)


def test_idle_workers_use_no_cpu(library):
    error = ctypes.c_int(-1)
    pool = library.create(3, ctypes.byref(error))
    assert library.run_jobs(pool, 1, 1) == 0
    time.sleep(0.02)
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.05
    library.destroy(pool)


@pytest.mark.parametrize("threads", [0, -1, 257])
def test_bad_thread_counts_are_errors(library, threads):
    error = ctypes.c_int(0)
    assert library.create(threads, ctypes.byref(error)) is None
    assert error.value != 0
    library.destroy(None)
