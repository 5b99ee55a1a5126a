// Matrix products with packed weights (layouts: weights.h) and a fused bias, activation, gate and residual.
//
//   y[t, n] = act(sum_k x[t, k] * w[n, k] + bias[n]) + residual[t, n]
//   gated:    act(x . gate[n] + bias[n]) * (x . up[n] + bias[N + n]) + residual[t, n]
//
// By column: a thread does whole tiles of 16 output columns for all rows. bias and residual.p may be null; out may be
// the residual, but not the input. Weights go through the second-level cache in blocks of tiles while all rows pass
// by; with few rows each weight is read once, ahead of use.
#pragma once
#include "dot.h"
#include "vmath.h"

namespace llmc {

constexpr int kStreamRows = 4;                // up to so many rows a step is bound by reading the weights
constexpr int64_t kBlockBytes = 192 * 1024;   // of weights that stay in the second-level cache
#if defined(__AVX512F__)
constexpr int kRowTile = 8;
#else
constexpr int kRowTile = 6;
#endif

// What follows the sums of one tile; the same for every row.
struct Epilogue {
  const float* bias;
  Mat residual, out;
};

template <Fmt FMT, int K, int TT, bool STREAM, class X>
LLMC_INLINE void packed_tile(const Weight& w, int64_t tile, X x, int first_row, f32x16 (&acc)[TT]) {
  if constexpr (FMT == Fmt::f32) {
    dot_tile<K, TT, STREAM>((const float*)w.data + tile * K * kLanes, x, first_row, acc);
  } else if constexpr (FMT == Fmt::bf16) {
    dot_tile<K, TT, STREAM>((const uint16_t*)w.data + tile * K * kLanes, x, first_row, acc);
  } else {
    constexpr int64_t kScales = round_up(K, kGroup) / kGroup * kLanes;
    const uint16_t* min = FMT == Fmt::w4 ? w.min + tile * kScales : nullptr;
    dot_tile<FMT, K, TT, STREAM>((const uint8_t*)w.data + tile * tile_bytes(FMT, K), w.scale + tile * kScales, min,
                                 x, first_row, acc);
  }
}

// Output columns 16*tile .. of rows first_row .. first_row + TT - 1.
template <Fmt FMT, int N, int K, Act ACT, bool GATED, int TT, bool STREAM, class X>
__attribute__((noinline)) void linear_tile(X x, const Weight& w, int tile, int first_row, const Epilogue& e) {
  int n = tile * kLanes, count = N - n < kLanes ? N - n : kLanes;
  if constexpr (N % kLanes == 0) count = kLanes;
  f32x16 acc[TT], up[TT];
  packed_tile<FMT, K, TT, STREAM>(w, GATED ? 2 * (int64_t)tile : tile, x, first_row, acc);
  if constexpr (GATED) packed_tile<FMT, K, TT, STREAM>(w, 2 * (int64_t)tile + 1, x, first_row, up);
  for (int t = 0; t < TT; ++t) {
    f32x16 y = acc[t];
    if (e.bias != nullptr) y += load_n(e.bias + n, count);
    y = activate<ACT>(y);
    if constexpr (GATED) {
      if (e.bias != nullptr) up[t] += load_n(e.bias + N + n, count);
      y *= up[t];
    }
    if (e.residual.p != nullptr) y += load_n(e.residual.row(first_row + t) + n, count);
    store_n(e.out.row(first_row + t) + n, y, count);
  }
}

// The last rows of a block, fewer than a full row tile.
template <Fmt FMT, int N, int K, Act ACT, bool GATED, int TT, bool STREAM, class X>
LLMC_INLINE void linear_rest(int rows, X x, const Weight& w, int tile, int first_row, const Epilogue& e) {
  if constexpr (TT > 0) {
    if (rows == TT) return linear_tile<FMT, N, K, ACT, GATED, TT, STREAM>(x, w, tile, first_row, e);
    linear_rest<FMT, N, K, ACT, GATED, TT - 1, STREAM>(rows, x, w, tile, first_row, e);
  }
}

// X is Mat for F32 and BF16 weights, QuantBuf (from quantize<K>) for W8 and W4.
template <Fmt FMT, int N, int K, Act ACT, bool GATED, class X>
inline void linear(Par par, int num_tokens, X x, Weight w, const float* bias, Mat residual, Mat out) {
  constexpr int kTiles = round_up(N, kLanes) / kLanes;
  constexpr int64_t kTileBytes = tile_bytes(FMT, K) * (GATED ? 2 : 1);
  constexpr int kBlock = kTileBytes >= kBlockBytes ? 1 : (int)(kBlockBytes / kTileBytes);
  const Epilogue e{bias, residual, out};
  Range tiles = share_of(par, kTiles);
  if (num_tokens <= kStreamRows) {
    for (int i = tiles.begin; i < tiles.end; ++i)
      linear_rest<FMT, N, K, ACT, GATED, kStreamRows, true>(num_tokens, x, w, i, 0, e);
    return;
  }
  for (int begin = tiles.begin; begin < tiles.end; begin += kBlock) {
    int end = begin + kBlock < tiles.end ? begin + kBlock : tiles.end;
    int t = 0;
    for (; t + kRowTile <= num_tokens; t += kRowTile)
      for (int i = begin; i < end; ++i) linear_tile<FMT, N, K, ACT, GATED, kRowTile, false>(x, w, i, t, e);
    for (int i = begin; i < end; ++i)
      linear_rest<FMT, N, K, ACT, GATED, kRowTile - 1, false>(num_tokens - t, x, w, i, t, e);
  }
}

}  // namespace llmc
