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
constexpr int kGroupPages = 4;  // pages in one visit: converted to float32 they stay in the first-level cache

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

// The pages of a group, and those that are read after them: the tiles prefetch these as they go, because pages lie
// anywhere and the hardware sees no stream. Without pages ahead: null.
template <class E>
struct PageGroup {
  const E *pages[kGroupPages], *ahead[kGroupPages];
};

// scores [ROWS][W * 16] = q . k, in rows of LDS. q [ROWS][LDQ]; keys: pages of [D][16], W of them from `page`.
template <bool AHEAD, int ROWS, int W, int D, int LDQ, int LDS, class E>
LLMC_INLINE void score_tile(const float* q, const PageGroup<E>& keys, int page, float* scores) {
  f32x16 s[ROWS][W];
  for (int r = 0; r < ROWS; ++r)
    for (int w = 0; w < W; ++w) s[r][w] = f32x16{};
  const E *k[W], *ahead[W];
  for (int w = 0; w < W; ++w) k[w] = keys.pages[page + w], ahead[w] = keys.ahead[page + w];
  for (int d = 0; d < D; ++d)
    for (int w = 0; w < W; ++w) {
      f32x16 v = kv_load_n(k[w] + d * kPageSize, kPageSize);
      if constexpr (AHEAD) __builtin_prefetch(ahead[w] + d * kPageSize);
      const float* x = W > 1 ? reread(q + d) : q + d;
      for (int r = 0; r < ROWS; ++r) s[r][w] = fma(splat(x[r * LDQ]), v, s[r][w]);
    }
  for (int r = 0; r < ROWS; ++r)
    for (int w = 0; w < W; ++w) store(scores + r * LDS + (page + w) * kPageSize, s[r][w]);
}

// acc [ROWS][W * 16] += sum_j weights[r][j] * value j, positions begin .. end - 1 of the group, in rows of LDW and
// LDACC. values: pages of [16][LD], W chunks from column `at`; N: elements in the last of them.
template <bool AHEAD, int ROWS, int W, int N, int LD, int LDW, int LDACC, class E>
LLMC_INLINE void value_tile(const float* weights, const PageGroup<E>& values, int at, Range positions, float* acc) {
  f32x16 a[ROWS][W];
  for (int r = 0; r < ROWS; ++r)
    for (int w = 0; w < W; ++w) a[r][w] = load<f32x16>(acc + r * LDACC + at + w * kLanes);
  for (int begin = positions.begin, end = positions.end; begin < end;) {
    int page = begin / kPageSize, stop = (page + 1) * kPageSize < end ? (page + 1) * kPageSize : end;
    const E* v = values.pages[page] + (begin % kPageSize) * LD + at;
    const E* ahead = values.ahead[page] + (begin % kPageSize) * LD + at;
    for (; begin < stop; ++begin, v += LD, ahead += LD)
      for (int w = 0; w < W; ++w) {
        f32x16 chunk = kv_load_n(v + w * kLanes, w == W - 1 ? N : kLanes);
        if constexpr (AHEAD)
          if (w * kLanes * sizeof(E) % 64 == 0) __builtin_prefetch(ahead + w * kLanes);
        const float* x = W > 1 ? reread(weights + begin) : weights + begin;
        for (int r = 0; r < ROWS; ++r) a[r][w] = fma(splat(x[r * LDW]), chunk, a[r][w]);
      }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int w = 0; w < W; ++w) store(acc + r * LDACC + at + w * kLanes, a[r][w]);
}

// Scores of ROWS rows with the pages begin .. end - 1 of a group.
template <bool AHEAD, int ROWS, int D, int LDQ, int LDS, class E>
__attribute__((noinline)) void score_pages(const float* q, const PageGroup<E>& keys, Range pages, float* scores) {
  constexpr int W = tile_width(ROWS);
  int page = pages.begin;
  for (; page + W <= pages.end; page += W) score_tile<AHEAD, ROWS, W, D, LDQ, LDS>(q, keys, page, scores);
  if constexpr (W > 1)
    for (; page < pages.end; ++page) score_tile<AHEAD, ROWS, 1, D, LDQ, LDS>(q, keys, page, scores);
}

// acc [ROWS][LDACC] of ROWS rows over the positions begin .. end - 1 of a group.
template <bool AHEAD, int ROWS, int D, int LD, int LDW, int LDACC, class E>
__attribute__((noinline)) void weigh_values(const float* weights, const PageGroup<E>& values, Range positions,
                                            float* acc) {
  constexpr int W = tile_width(ROWS), kWhole = D / kLanes * kLanes;
  int d = 0;
  for (; d + W * kLanes <= kWhole; d += W * kLanes)
    value_tile<AHEAD, ROWS, W, kLanes, LD, LDW, LDACC>(weights, values, d, positions, acc);
  if constexpr (kWhole % (W * kLanes) != 0)
    for (; d < kWhole; d += kLanes)
      value_tile<AHEAD, ROWS, 1, kLanes, LD, LDW, LDACC>(weights, values, d, positions, acc);
  if constexpr (D != kWhole)
    value_tile<AHEAD, ROWS, 1, D - kWhole, LD, LDW, LDACC>(weights, values, d, positions, acc);
}

}  // namespace llmc
