// A pool of threads that run one function together, with barriers between its phases.
//
// Every thread, the caller as thread 0, runs fn(ctx, Par{tid, nt, pool}). Waiting spins for a while and then sleeps
// on a futex, so that neither a barrier nor an idle pool keeps a core from a server that shares it. Between two barriers
// threads may claim pieces of work from each other, so that one that is held up does not hold up all. Linux only.
#pragma once
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace llmc {

struct Pool;

// What a kernel knows of the team: it is thread tid of nt.
struct Par {
  int tid, nt;
  Pool* pool;
  // Returns when all nt threads have called it; what any wrote before, all see after.
  void barrier() const;
  // Claims the next `count` pieces of thread `owner`'s, which begin with the returned one: 0 after a barrier. nt > 1.
  int claim(int owner, int count) const;
};

using StepFn = void (*)(void* ctx, Par par);

constexpr int kBarrierSpins = 2000;  // pauses (about 40 cycles each) before a thread sleeps inside a step
constexpr int kIdleSpins = 2000;     // the same between steps
constexpr int kRousedSpins = 8000;   // the same when a step is about to begin
constexpr int kMaxThreads = 256;

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// A counter that threads wait on until it changes.
struct alignas(64) Signal {
  uint32_t value = 0;
  uint32_t sleepers = 0;

  uint32_t get() const { return __atomic_load_n(&value, __ATOMIC_ACQUIRE); }

  void wait_while(uint32_t old, int spins) {
    for (;; spins = kRousedSpins) {
      for (int i = 0; i < spins; ++i) {
        if (get() != old) return;
        cpu_pause();
      }
      __atomic_fetch_add(&sleepers, 1, __ATOMIC_SEQ_CST);
      if (__atomic_load_n(&value, __ATOMIC_SEQ_CST) == old)
        syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
      __atomic_fetch_sub(&sleepers, 1, __ATOMIC_SEQ_CST);
    }
  }

  // Sleepers count themselves before they look at value, and we change value before we count them: none is missed.
  void advance() {
    __atomic_fetch_add(&value, 1, __ATOMIC_SEQ_CST);
    rouse();
  }

  // Sleepers spin again: waking takes them a while, and the change is near.
  void rouse() {
    if (__atomic_load_n(&sleepers, __ATOMIC_SEQ_CST) != 0)
      syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, kMaxThreads, nullptr, nullptr, 0);
  }
};

// How many pieces of a thread's work are claimed, in phases of even and of odd number. A phase ends with a barrier;
// before a thread comes to that, it clears what it will use in the next one, as nobody reads it any more.
struct alignas(64) Claimed {
  uint32_t pieces[2] = {0, 0};
};

struct Pool {
  struct Worker {
    Pool* pool;
    int tid;
    pthread_t thread;
  };

  Signal start;    // advanced once per run, and once to stop
  Signal barrier;  // advanced by the last thread to arrive
  alignas(64) uint32_t arrived = 0;
  alignas(64) int nt = 1;
  bool stop = false;
  StepFn fn = nullptr;
  void* ctx = nullptr;
  Worker workers[kMaxThreads];
  Claimed claimed[kMaxThreads];

  // Runs fn on every thread and returns when all have finished. One caller at a time.
  void run(StepFn f, void* c) {
    fn = f;
    ctx = c;
    if (nt > 1) start.advance();
    f(c, Par{0, nt, this});
    wait_for_all(0);
  }

  void wait_for_all(int tid) {
    if (nt == 1) return;
    uint32_t phase = barrier.get();
    __atomic_store_n(&claimed[tid].pieces[~phase & 1], 0, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&arrived, 1, __ATOMIC_ACQ_REL) == (uint32_t)nt) {
      __atomic_store_n(&arrived, 0, __ATOMIC_RELAXED);
      barrier.advance();
    } else {
      barrier.wait_while(phase, kBarrierSpins);
    }
  }
};

inline void Par::barrier() const { pool->wait_for_all(tid); }

inline int Par::claim(int owner, int count) const {
  uint32_t phase = pool->barrier.get();  // does not change before this thread has come to the barrier
  return (int)__atomic_fetch_add(&pool->claimed[owner].pieces[phase & 1], (uint32_t)count, __ATOMIC_RELAXED);
}

inline void* pool_worker(void* arg) {
  auto* worker = (Pool::Worker*)arg;
  Pool* pool = worker->pool;
  for (uint32_t seen = 0;; ++seen) {
    pool->start.wait_while(seen, kIdleSpins);
    if (pool->stop) return nullptr;
    pool->fn(pool->ctx, Par{worker->tid, pool->nt, pool});
    pool->wait_for_all(worker->tid);
  }
}

inline void pool_stop(Pool* pool, int started) {
  pool->stop = true;
  pool->start.advance();
  for (int i = 1; i < started; ++i) pthread_join(pool->workers[i].thread, nullptr);
  free(pool);
}

// A pool of nt threads (nt - 1 new ones). On failure returns null and sets *error to an errno value.
inline Pool* pool_create(int nt, int* error) {
  *error = EINVAL;
  if (nt < 1 || nt > kMaxThreads) return nullptr;
  void* memory = nullptr;
  *error = posix_memalign(&memory, alignof(Pool), sizeof(Pool));
  if (*error != 0) return nullptr;
  Pool* pool = (Pool*)memory;
  *pool = Pool();
  pool->nt = nt;
  for (int i = 1; i < nt; ++i) {
    pool->workers[i] = Pool::Worker{pool, i, {}};
    *error = pthread_create(&pool->workers[i].thread, nullptr, pool_worker, &pool->workers[i]);
    if (*error != 0) {
      pool_stop(pool, i);
      return nullptr;
    }
    char name[16];  // as top -H shows it, and runtime/cpu/numa.py looks for it
    snprintf(name, sizeof(name), "llmc-pool-%d", i);
    pthread_setname_np(pool->workers[i].thread, name);
  }
  return pool;
}

// Not while run() is in progress.
inline void pool_destroy(Pool* pool) {
  if (pool != nullptr) pool_stop(pool, pool->nt);
}

}  // namespace llmc
