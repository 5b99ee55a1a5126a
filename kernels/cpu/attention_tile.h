// The two products of attention over pages, in tiles of rows that stay in registers.
//
// Every score is one chain over the head size and every weighted value one chain over the positions, both ascending,
// so no result depends on the tile's shape. Shapes are chosen for as many chains at once as a fused multiply-add takes
// cycles, times those that start in one.
#pragma once
#include "kv.h"

namespace llmc {

// Vectors of 16 sums that fit into the registers beside an operand.
#if defined(__AVX512F__)
constexpr int kTileSums = 24, kTileRows = 12;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kTileSums = 6, kTileRows = 6;
#else
constexpr int kTileSums = 3, kTileRows = 3;
#endif
constexpr int kVisitPages = 4;  // pages whose values a tile takes at once: they stay in the first-level cache
constexpr int kAheadPages = 4;  // pages between the one that is read and the one that is fetched into the cache

// Pages, or chunks of 16 values, that a tile of so many rows takes at once: a power of two.
constexpr int tile_width(int rows) { return rows * 4 <= kTileSums ? 4 : rows * 2 <= kTileSums ? 2 : 1; }

// Rows of the next tile of `left`: tiles are of about the same size.
LLMC_INLINE int tile_rows(int left) {
  int tiles = (left + kTileRows - 1) / kTileRows;
  return (left + tiles - 1) / tiles;
}

// A pointer that the compiler does not know for the same: what is read through it is read again, where keeping it would
// spill the sums.
LLMC_INLINE const float* reread(const float* p) {
  __asm__ volatile("" : "+r"(p));
  return p;
}

// Pages in the order in which they are read. The tiles fetch the page that comes kAheadPages later, because pages lie
// anywhere and the hardware sees no stream: there is always one.
template <class E>
using PageList = const E* const*;

// scores [ROWS][W * 16] = q . k, in rows of LDS. q [ROWS][LDQ]; keys: pages of [D][16], W of them.
template <int ROWS, int W, int D, int LDQ, int LDS, class E>
LLMC_INLINE void score_tile(const float* q, PageList<E> keys, float* scores) {
  f32x16 s[ROWS][W];
  for (int r = 0; r < ROWS; ++r)
    for (int w = 0; w < W; ++w) s[r][w] = f32x16{};
  const E *k[W], *ahead[W];
  for (int w = 0; w < W; ++w) k[w] = keys[w], ahead[w] = keys[w + kAheadPages];
  for (int d = 0; d < D; ++d)
    for (int w = 0; w < W; ++w) {
      f32x16 v = kv_lanes(k[w] + d * kPageSize, kPageSize);
      __builtin_prefetch(ahead[w] + d * kPageSize);
      const float* x = W > 1 ? reread(q + d) : q + d;
      for (int r = 0; r < ROWS; ++r) s[r][w] = fma(splat(x[r * LDQ]), v, s[r][w]);
    }
  for (int r = 0; r < ROWS; ++r)
    for (int w = 0; w < W; ++w) store(scores + r * LDS + w * kPageSize, in_order<E>(s[r][w]));
}

// acc [ROWS][W * 16] += sum_j weights[r][j] * value j, positions begin .. end - 1, in rows of LDW and LDACC and lanes as
// kv_lanes() has them. values: pages of [16][D], W chunks from column `at`; N: elements in the last of them.
template <int ROWS, int W, int N, int D, int LDW, int LDACC, class E>
LLMC_INLINE void value_tile(const float* weights, PageList<E> values, int at, Range positions, float* acc) {
  f32x16 a[ROWS][W];
  for (int r = 0; r < ROWS; ++r)
    for (int w = 0; w < W; ++w) a[r][w] = load<f32x16>(acc + r * LDACC + at + w * kLanes);
  for (int begin = positions.begin, end = positions.end; begin < end;) {
    int page = begin / kPageSize, stop = (page + 1) * kPageSize < end ? (page + 1) * kPageSize : end;
    const E* v = values[page] + (begin % kPageSize) * D + at;
    const E* ahead = values[page + kAheadPages] + (begin % kPageSize) * D + at;
    for (; begin < stop; ++begin, v += D, ahead += D)
      for (int w = 0; w < W; ++w) {
        f32x16 chunk = kv_lanes(v + w * kLanes, w == W - 1 ? N : kLanes);
        if (w * kLanes * sizeof(E) % 64 == 0) __builtin_prefetch(ahead + w * kLanes);
        const float* x = W > 1 ? reread(weights + begin) : weights + begin;
        for (int r = 0; r < ROWS; ++r) a[r][w] = fma(splat(x[r * LDW]), chunk, a[r][w]);
      }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int w = 0; w < W; ++w) store(acc + r * LDACC + at + w * kLanes, a[r][w]);
}

// Scores of ROWS rows with the pages begin .. end - 1.
template <int ROWS, int D, int LDQ, int LDS, class E>
__attribute__((noinline)) void score_pages(const float* q, PageList<E> keys, Range pages, float* scores) {
  constexpr int W = tile_width(ROWS);
  int page = pages.begin;
  for (; page + W <= pages.end; page += W)
    score_tile<ROWS, W, D, LDQ, LDS>(q, keys + page, scores + page * kPageSize);
  if constexpr (W > 1)
    for (; page < pages.end; ++page) score_tile<ROWS, 1, D, LDQ, LDS>(q, keys + page, scores + page * kPageSize);
}

// acc [ROWS][LDACC] of ROWS rows over the positions begin .. end - 1, some pages after the other.
template <int ROWS, int D, int LDW, int LDACC, class E>
__attribute__((noinline)) void weigh_values(const float* weights, PageList<E> values, Range positions, float* acc) {
  constexpr int W = tile_width(ROWS), kWhole = D / kLanes * kLanes, kVisit = kVisitPages * kPageSize;
  for (int begin = positions.begin, end; begin < positions.end; begin = end) {
    end = (begin / kVisit + 1) * kVisit < positions.end ? (begin / kVisit + 1) * kVisit : positions.end;
    int d = 0;
    for (; d + W * kLanes <= kWhole; d += W * kLanes)
      value_tile<ROWS, W, kLanes, D, LDW, LDACC>(weights, values, d, {begin, end}, acc);
    if constexpr (kWhole % (W * kLanes) != 0)
      for (; d < kWhole; d += kLanes) value_tile<ROWS, 1, kLanes, D, LDW, LDACC>(weights, values, d, {begin, end}, acc);
    if constexpr (D != kWhole) value_tile<ROWS, 1, D - kWhole, D, LDW, LDACC>(weights, values, d, {begin, end}, acc);
  }
}

}  // namespace llmc
