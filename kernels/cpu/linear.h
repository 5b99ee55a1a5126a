// Matrix products with packed weights (layouts: weights.h) and a fused bias, activation, gate and residual.
//
//   y[t, n] = act(sum_k x[t, k] * w[n, k] + bias[n]) + residual[t, n]
//   gated:    act(x . gate[n] + bias[n]) * (x . up[n] + bias[N + n]) + residual[t, n]
//
// By column: a thread does whole tiles of 16 output columns for all rows, claimed in pieces. bias and residual.p may be
// null; out may be the residual, but not the input.
//
// Rows pass a tile in passes of up to row_tile(FMT). With few rows two tiles stay in the cache while all of them pass,
// and the next ones are fetched meanwhile, so that each weight is read from memory once and in time; two, as one
// stream of reads does not fill a memory channel. With many, blocks of tiles and of K stay in the second-level cache,
// so that the rows are read from further away only once per block.
#pragma once
#include "dot.h"
#include "vmath.h"

namespace llmc {

constexpr int kFewRows = 64;
constexpr int kPrefetchBytes = 1024;         // ahead of use where each weight is used once
constexpr int64_t kBlockBytes = 192 * 1024;  // of weights that stay in the second-level cache
constexpr int kBlockRows = 64;               // rows whose sums are kept while they pass the blocks along K
constexpr int kFewRowsPiece = 2;             // tiles that a thread claims at once when rows are few

// Rows that share the loads of a tile, or of kAbreast tiles, as registers allow.
constexpr int row_tile([[maybe_unused]] Fmt fmt) {
#if defined(__AVX512VNNI__)
  return is_quantized(fmt) ? 6 : 8;
#elif defined(__AVX512F__) || defined(__aarch64__)
  return 8;
#else
  return is_quantized(fmt) ? 4 : 6;
#endif
}

// Whether rows that pass tiles of so many bytes once fetch the next tiles meanwhile. Otherwise they fetch kPrefetchBytes
// ahead, so that the first bytes of a tile come late; with one row or two that costs less than what is fetched in vain
// at the end of a matrix.
constexpr bool fetch_next_tiles([[maybe_unused]] Fmt fmt, [[maybe_unused]] int64_t bytes, [[maybe_unused]] int rows) {
#if defined(__AVX512VNNI__)
  return is_quantized(fmt) && bytes <= kBlockBytes && rows > 2;
#else
  return false;
#endif
}

// What follows the sums of one tile; the same for every row.
struct Epilogue {
  const float* bias;
  Mat residual, out;
};

// One product, as its kernels see it. X is Mat for F32 and BF16 weights, QuantBuf for W8 and W4.
template <class X>
struct Product {
  X x;
  Weight w;
  Epilogue e;
};

constexpr int64_t unit_bytes(Fmt fmt) { return tile_bytes(fmt, kUnit); }
constexpr int padded(Fmt fmt, int k) { return is_quantized(fmt) ? round_up(k, kGroup) : k; }

// K is cut so that a block of several tiles fits kBlockBytes.
constexpr int chunk_of(Fmt fmt, int k) {
  int most = (int)(kBlockBytes / 6 / (tile_bytes(fmt, kUnit) / kUnit)), chunks = (k + most - 1) / most;
  return round_up((k + chunks - 1) / chunks, kUnit);
}

template <Fmt FMT>
struct FloatElement {
  using Type = float;
};
template <>
struct FloatElement<Fmt::bf16> {
  using Type = uint16_t;
};

// The sums of S tiles that follow each other.
template <Fmt FMT, int K, int S, int TT, class X>
LLMC_INLINE void packed_tiles(const Weight& w, int64_t first, X x, int first_row, int from, int to, Ahead ahead,
                              f32x16 (&acc)[S][TT]) {
  if constexpr (is_quantized(FMT)) {
    constexpr int64_t kPadded = padded(FMT, K), kScales = kPadded / kGroup * kLanes;
    const uint16_t* min = FMT == Fmt::w4 ? w.min + first * kScales : nullptr;
    dot_tiles<FMT, kPadded>((const uint8_t*)w.data + first * tile_bytes(FMT, K), w.scale + first * kScales, min, x,
                            first_row, from, to, ahead, acc);
  } else {
    using E = typename FloatElement<FMT>::Type;
    for (int s = 0; s < S; ++s, ahead.p += ahead.stride)
      dot_tile((const E*)w.data + (first + s) * K * kLanes, x, first_row, from, to, ahead, acc[s]);
  }
}

// The sums of one tile and TT rows (and of its `up`, if gated) become output.
template <int N, Act ACT, bool GATED, int TT>
LLMC_INLINE void finish_tile(const Epilogue& e, int tile, int first_row, f32x16 (&acc)[TT], f32x16 (&up)[TT]) {
  int n = tile * kLanes, count = N - n < kLanes ? N - n : kLanes;
  if constexpr (N % kLanes == 0) count = kLanes;
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

// Elements from .. to - 1 along K of rows first_row .. first_row + TT - 1 and S tiles of weights: of as many tiles of
// output columns, from `tile` on, or of one if gated. `sums` holds the sums of the elements before, kBlockRows for each
// tile of weights, and takes these; null when the elements are all there are.
template <Fmt FMT, int N, int K, Act ACT, bool GATED, int S, int TT, class X>
__attribute__((noinline)) void linear_tiles(const Product<X>& p, int tile, int first_row, int from, int to,
                                            Ahead ahead, f32x16* sums) {
  f32x16 acc[S][TT] = {};
  if (from > 0)
    for (int s = 0; s < S; ++s) __builtin_memcpy(acc[s], sums + s * kBlockRows, sizeof(acc[s]));
  packed_tiles<FMT, K>(p.w, GATED ? 2 * (int64_t)tile : tile, p.x, first_row, from, to, ahead, acc);
  if (to < padded(FMT, K)) {
    for (int s = 0; s < S; ++s) __builtin_memcpy(sums + s * kBlockRows, acc[s], sizeof(acc[s]));
  } else if constexpr (GATED) {
    finish_tile<N, ACT, true>(p.e, tile, first_row, acc[0], acc[1]);
  } else {
    for (int s = 0; s < S; ++s) finish_tile<N, ACT, false>(p.e, tile + s, first_row, acc[s], acc[s]);
  }
}

// linear_tiles for a number of rows that is known only now, 1 .. TT.
template <Fmt FMT, int N, int K, Act ACT, bool GATED, int S, int TT, class X>
LLMC_INLINE void linear_rows(int rows, const Product<X>& p, int tile, int first_row, int from, int to, Ahead ahead,
                             f32x16* sums) {
  if constexpr (TT > 0) {
    if (rows == TT) return linear_tiles<FMT, N, K, ACT, GATED, S, TT>(p, tile, first_row, from, to, ahead, sums);
    linear_rows<FMT, N, K, ACT, GATED, S, TT - 1>(rows, p, tile, first_row, from, to, ahead, sums);
  }
}

// S tiles of weights, all rows.
template <Fmt FMT, int N, int K, Act ACT, bool GATED, int S, class X>
LLMC_INLINE void linear_few_rows_of(const Product<X>& p, int tile, int num_rows) {
  constexpr int kPadded = padded(FMT, K), kRows = row_tile(FMT);
  constexpr int64_t kTileBytes = tile_bytes(FMT, K), kUnits = (kPadded + kUnit - 1) / kUnit;
  const char* data = (const char*)p.w.data + tile * kTileBytes * (GATED ? 2 : 1);
  int passes = (num_rows + kRows - 1) / kRows;
  int step = (int)((unit_bytes(FMT) / passes + 63) / 64 * 64);
  for (int pass = 0; pass < passes; ++pass) {
    int begin = num_rows * pass / passes, end = num_rows * (pass + 1) / passes;
    int64_t offset = pass * kUnits * step;  // each pass fetches its part of the tiles that follow
    Ahead ahead{data + S * kTileBytes + offset, offset < kTileBytes ? step : 0, kTileBytes};
    if (passes == 1 && !fetch_next_tiles(FMT, S * kTileBytes, num_rows)) ahead.p = data + kPrefetchBytes;
    linear_rows<FMT, N, K, ACT, GATED, S, kRows>(end - begin, p, tile, begin, 0, kPadded, ahead, nullptr);
  }
}

// Tiles in turn, all rows for each; two tiles of quantised weights at once.
template <Fmt FMT, int N, int K, Act ACT, bool GATED, class X>
inline void linear_few_rows(const Product<X>& p, Range tiles, int num_rows) {
  int i = tiles.begin;
  if constexpr (is_quantized(FMT) && !GATED)
    for (; i + 2 <= tiles.end; i += 2) linear_few_rows_of<FMT, N, K, ACT, GATED, 2>(p, i, num_rows);
  for (; i < tiles.end; ++i) linear_few_rows_of<FMT, N, K, ACT, GATED, GATED ? 2 : 1>(p, i, num_rows);
}

// Tiles of output columns that pass many rows together. Of gated ones, gate and up do.
constexpr int tiles_together(Fmt fmt, bool gated) { return is_quantized(fmt) && !gated ? kAbreast : 1; }

// The most tiles whose elements from one block along K fit kBlockBytes: 3 or more, as chunk_of says.
constexpr int block_tiles(Fmt fmt, int k, bool gated) {
  int64_t bytes = tile_bytes(fmt, chunk_of(fmt, padded(fmt, k))) * (gated ? 2 : 1);
  return (int)(kBlockBytes / bytes) / tiles_together(fmt, gated) * tiles_together(fmt, gated);
}

// One block of tiles, and for that blocks of rows and of K.
template <Fmt FMT, int N, int K, Act ACT, bool GATED, class X>
inline void linear_many_rows(const Product<X>& p, Range tiles, int num_rows) {
  constexpr int kPadded = padded(FMT, K), kRows = row_tile(FMT), kChunk = chunk_of(FMT, kPadded);
  constexpr bool kWhole = kChunk >= kPadded;
  constexpr Ahead kNothing{nullptr, 0, 0};
  constexpr int kKept = kWhole ? 1 : block_tiles(FMT, K, GATED);  // tiles whose sums are kept
  f32x16 sums[kKept][2 * kBlockRows];
  const int block_rows = kWhole ? num_rows : kBlockRows;
  for (int r = 0; r < num_rows; r += block_rows) {
    int rows_end = r + block_rows < num_rows ? r + block_rows : num_rows;
    for (int from = 0; from < kPadded; from += kChunk) {
      int to = from + kChunk < kPadded ? from + kChunk : kPadded;
      for (int t = r; t < rows_end; t += kRows) {
        int count = t + kRows < rows_end ? kRows : rows_end - t;
        auto sums_of = [&](int i) { return &sums[kWhole ? 0 : i - tiles.begin][kWhole ? 0 : t - r]; };
        int i = tiles.begin;
        if constexpr (tiles_together(FMT, GATED) == 2)
          for (; i + 2 <= tiles.end; i += 2)
            linear_rows<FMT, N, K, ACT, false, 2, kRows>(count, p, i, t, from, to, kNothing, sums_of(i));
        for (; i < tiles.end; ++i)
          linear_rows<FMT, N, K, ACT, GATED, GATED ? 2 : 1, kRows>(count, p, i, t, from, to, kNothing, sums_of(i));
      }
    }
  }
}

template <Fmt FMT, int N, int K, Act ACT, bool GATED, class X>
inline void linear(Par par, int num_rows, X x, Weight w, const float* bias, Mat residual, Mat out) {
  const Product<X> p{x, w, {bias, residual, out}};
  constexpr int kTiles = round_up(N, kLanes) / kLanes, kBlock = block_tiles(FMT, K, GATED);
  if (num_rows == 0) return;
  if (num_rows <= kFewRows) {
    share_pieces(par, kTiles, kFewRowsPiece,
                 [&](Range tiles) { linear_few_rows<FMT, N, K, ACT, GATED>(p, tiles, num_rows); });
    return;
  }
  // Blocks of one size, so that no thread comes late with a large one.
  int share = (kTiles + par.nt - 1) / par.nt, blocks = (share + kBlock - 1) / kBlock;
  int size = (share + blocks - 1) / blocks;
  share_pieces(par, kTiles, round_up(size, tiles_together(FMT, GATED)),
               [&](Range tiles) { linear_many_rows<FMT, N, K, ACT, GATED>(p, tiles, num_rows); });
}

}  // namespace llmc
