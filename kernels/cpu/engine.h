// What a generated step stands on: the engine that llmc_create makes (exports.h), the clock of its phases, and short
// names for the operands of kernels.
#pragma once
#include "abi.h"
#include "clock.h"
#include "mat.h"
#include "pool.h"
#include "quantize.h"
#include "weights.h"

namespace llmc {

struct Engine {
  const uint8_t* weights;
  uint8_t* kv;
  int64_t num_pages;
  uint8_t* tokens_arena;  // activations with a row per token
  uint8_t* rows_arena;    // activations with a row per sampled token
  void* scratch;
  int max_tokens, max_rows;
  Pool* pool;
  const Batch* batch;
  int64_t* profile;      // nanoseconds of each phase that steps add to, or null
  mutable int64_t mark;  // when the phase began; only with a profile, only thread 0
};

constexpr Mat none{nullptr, 0};

__attribute__((noinline, cold)) static void add_time(const Engine& e, int phase) {
  int64_t now = now_ns();
  e.profile[phase] += now - e.mark;
  e.mark = now;
}
// Where a phase begins: with a profile, the time of the one before is taken.
LLMC_INLINE void mark_phase(const Engine& e, Par par, int phase) {
  if (__builtin_expect(e.profile != nullptr, 0) && par.tid == 0) add_time(e, phase - 1);
}
// The same with a barrier, after which all threads see what any wrote.
LLMC_INLINE void next_phase(const Engine& e, Par par, int phase) {
  par.barrier();
  mark_phase(e, par, phase);
}

static Mat tokens(const Engine& e, int64_t offset, int width) {
  return Mat{(float*)(e.tokens_arena + offset * e.max_tokens), width};
}
static Mat rows(const Engine& e, int64_t offset, int width) {
  return Mat{(float*)(e.rows_arena + offset * e.max_rows), width};
}
template <Fmt FMT, int WIDTH>
static QuantBuf quants(uint8_t* base, int64_t max_rows) {
  float* scale = (float*)(base + max_rows * q_bytes(FMT, WIDTH));
  return QuantBuf{(int8_t*)base, scale, (int32_t*)(scale + max_rows * (WIDTH / kGroup))};
}

// In a step of few rows each thread makes all of a private value for itself, in rows of its own: that takes less time
// than to wait for a share of so little.
constexpr int kPrivateRows = 4;
static bool is_few(Par par, int rows) { return rows <= kPrivateRows && 2 * rows <= par.nt + 1; }
static Mat own(bool few, Par par, Mat m) { return few ? Mat{m.row(par.tid * kPrivateRows), m.ld} : m; }
template <Fmt FMT, int WIDTH>
static QuantBuf own(bool few, Par par, QuantBuf b) {
  int row = few ? par.tid * kPrivateRows : 0, groups = row * (WIDTH / kGroup);
  return QuantBuf{b.q + row * q_bytes(FMT, WIDTH), b.scale + groups, b.sum + groups};
}

// A buffer with `count` rows in the place of each of its rows.
static Mat pairs(Mat m, int count) { return Mat{m.p, m.ld / count}; }
static Mat columns(Mat m, int first) { return Mat{m.p + first, m.ld}; }
static const float* floats(const Engine& e, int64_t offset) { return (const float*)(e.weights + offset); }
static Weight weight(const Engine& e, int64_t data, int64_t scale, int64_t min) {
  auto half = [&](int64_t at) { return at < 0 ? nullptr : (const uint16_t*)(e.weights + at); };
  return Weight{e.weights + data, half(scale), half(min)};
}

}  // namespace llmc
