"""The thread pool: every thread runs every phase, in step, again and again."""

from __future__ import annotations

import ctypes
import time

import pytest
from cpu_harness import PORTABLE, Unit, require

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
