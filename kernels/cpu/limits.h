// What the machine can do, measured with the engine's own threads: bytes/s read from memory, and operations/s of the
// arithmetic that the matrix products are made of. `llmc bench` compares steps with these.
#pragma once
#include "clock.h"
#include "mat.h"
#include "pool.h"
#include "simd.h"
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace llmc {

// The value stays in its register, but the compiler no longer knows it: what is computed from it is computed again.
template <class V>
LLMC_INLINE void forget(V& v) {
#if defined(__aarch64__)
  __asm__ volatile("" : "+w"(v));
#else
  __asm__ volatile("" : "+x"(v));
#endif
}

// ---- reading

constexpr int kReadStreams = 4;        // places that a thread reads at once
constexpr int kReadAhead = 2048;       // bytes asked for ahead of use, in each
constexpr int kReadUnit = 64 * kReadStreams;

struct ReadJob {
  uint8_t* data;
  int64_t bytes;
  uint32_t sum;
};

struct ReadShare {
  uint8_t* data;
  int64_t stream_bytes;
};
inline ReadShare read_share(const ReadJob& job, Par par) {
  int64_t units = job.bytes / kReadUnit, begin = units * par.tid / par.nt, end = units * (par.tid + 1) / par.nt;
  return {job.data + begin * kReadUnit, (end - begin) * 64};
}

// Gives a thread's share of the memory real pages, near that thread: untouched ones all share one page of zeros.
inline void touch_memory(void* ctx, Par par) {
  ReadShare share = read_share(*(ReadJob*)ctx, par);
  __builtin_memset(share.data, 1, share.stream_bytes * kReadStreams);
}

inline void read_memory(void* ctx, Par par) {
  ReadJob& job = *(ReadJob*)ctx;
  ReadShare share = read_share(job, par);
  u32x16 sum[kReadStreams] = {};
  for (int64_t i = 0; i < share.stream_bytes; i += 64) {
#pragma clang loop unroll(full)
    for (int s = 0; s < kReadStreams; ++s) {
      const uint8_t* p = share.data + s * share.stream_bytes + i;
      __builtin_prefetch(p + kReadAhead, 0, 2);
      sum[s] += load<u32x16>(p);
    }
  }
  uint32_t total = 0;
  for (int s = 0; s < kReadStreams; ++s) total += (uint32_t)hsum((i32x16)sum[s]);
  __atomic_fetch_add(&job.sum, total, __ATOMIC_RELAXED);
}

// Bytes/s of one pass over memory that touch_memory has been through.
inline double read_bandwidth(Pool* pool, uint8_t* data, int64_t bytes) {
  ReadJob job{data, bytes, 0};
  int64_t start = now_ns();
  pool->run(read_memory, &job);
  return (double)(bytes / kReadUnit * kReadUnit) * 1e9 / (double)(now_ns() - start);
}

// ---- arithmetic. A unit is one accumulator; add() is the best exact sequence of this instruction set.

#if defined(__AVX512F__)
typedef f32x16 PeakFloats;
#elif defined(__AVX2__)
typedef f32x8 PeakFloats;
#else
typedef f32x4 PeakFloats;
#endif

struct PeakF32 {
  static constexpr int kMacs = sizeof(PeakFloats) / sizeof(float);
  PeakFloats sum = {}, x = PeakFloats{} + 0.5f;
  LLMC_INLINE void add(PeakFloats& w) {
    forget(w);
    sum = fma(w, x, sum);
  }
};

// int8 x int8, and below 4 bits x int8, into int32.
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
typedef __m512i PeakInts;
struct PeakW8 {
  static constexpr int kMacs = 64;
  PeakInts sum = _mm512_setzero_si512(), x = _mm512_set1_epi8(3);
  LLMC_INLINE void add(PeakInts& w) {
    forget(w);
    sum = _mm512_dpbusd_epi32(sum, w, x);
  }
};
typedef PeakW8 PeakW4;
#elif defined(__AVXVNNI__)
typedef __m256i PeakInts;
struct PeakW8 {
  static constexpr int kMacs = 32;
  PeakInts sum = _mm256_setzero_si256(), x = _mm256_set1_epi8(3);
  LLMC_INLINE void add(PeakInts& w) {
    forget(w);
    sum = _mm256_dpbusd_avx_epi32(sum, w, x);
  }
};
typedef PeakW8 PeakW4;
#elif defined(__AVX2__)
typedef __m256i PeakInts;
struct PeakW8 {
  static constexpr int kMacs = 16;
  PeakInts sum = _mm256_setzero_si256(), x = _mm256_set1_epi16(3);
  LLMC_INLINE void add(PeakInts& w) {
    forget(w);
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(w, x));
  }
};
// A group of 32 is summed in 16 bits, and widened once.
struct PeakW4 {
  static constexpr int kMacs = 8 * 32;
  PeakInts sum = _mm256_setzero_si256(), x = _mm256_set1_epi8(3);
  LLMC_INLINE void add(PeakInts& w) {
    __m256i part = _mm256_setzero_si256();
#pragma clang loop unroll(full)
    for (int i = 0; i < 8; ++i) {
      forget(w);
      part = _mm256_add_epi16(part, _mm256_maddubs_epi16(w, x));
    }
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(part, _mm256_set1_epi16(1)));
  }
};
#elif defined(__SSE2__)
typedef __m128i PeakInts;
struct PeakW8 {
  static constexpr int kMacs = 8;
  PeakInts sum = _mm_setzero_si128(), x = _mm_set1_epi16(3);
  LLMC_INLINE void add(PeakInts& w) {
    forget(w);
    sum = _mm_add_epi32(sum, _mm_madd_epi16(w, x));
  }
};
typedef PeakW8 PeakW4;
#elif defined(__ARM_FEATURE_DOTPROD)
typedef int8x16_t PeakInts;
struct PeakW8 {
  static constexpr int kMacs = 16;
  int32x4_t sum = vdupq_n_s32(0);
  PeakInts x = vdupq_n_s8(3);
  LLMC_INLINE void add(PeakInts& w) {
    forget(w);
    sum = vdotq_s32(sum, w, x);
  }
};
typedef PeakW8 PeakW4;
#else
typedef int32_t PeakInts __attribute__((vector_size(16)));
struct PeakW8 {
  static constexpr int kMacs = 4;
  PeakInts sum = {}, x = PeakInts{} + 3;
  LLMC_INLINE void add(PeakInts& w) {
    forget(w);
    sum += w * x;
  }
};
typedef PeakW8 PeakW4;
#endif

// Enough chains to hide the latency, few enough for the registers.
#if defined(__aarch64__)
constexpr int kChains = 24;
#else
constexpr int kChains = 12;
#endif

struct PeakJob {
  int64_t rounds;
};

template <class Unit, class Operand>
inline void peak_work(void* ctx, Par) {
  const int64_t rounds = ((const PeakJob*)ctx)->rounds;
  Unit chains[kChains];
  Operand w = chains[0].x;
  for (int64_t i = 0; i < rounds; ++i) {
#pragma clang loop unroll(full)
    for (int c = 0; c < kChains; ++c) chains[c].add(w);
  }
#pragma clang loop unroll(full)
  for (int c = 0; c < kChains; ++c) forget(chains[c].sum);
}

// Operations/s of all threads, a multiply-add being two; over a run long enough that starting it does not count.
template <class Unit, class Operand>
inline double peak_of(Pool* pool) {
  constexpr int64_t kEnoughNs = 10000000;
  for (int64_t rounds = 1 << 12;; rounds *= 4) {
    PeakJob job{rounds};
    int64_t start = now_ns();
    pool->run(peak_work<Unit, Operand>, &job);
    int64_t ns = now_ns() - start;
    if (ns >= kEnoughNs) return 2e9 * Unit::kMacs * kChains * (double)rounds * pool->nt / (double)ns;
  }
}

// kind: 0 float32, 1 int8 weights, 2 four-bit weights.
inline double peak_ops(Pool* pool, int kind) {
  if (kind == 0) return peak_of<PeakF32, PeakFloats>(pool);
  return kind == 1 ? peak_of<PeakW8, PeakInts>(pool) : peak_of<PeakW4, PeakInts>(pool);
}

}  // namespace llmc
