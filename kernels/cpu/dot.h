// The inner loops of the matrix products: one tile of 16 output columns against TT rows of the input.
//
// For each (row, column) the operations and their order are the same for every TT and instruction set: F32 and BF16
// accumulate over k in order; W8 and W4 form an exact integer sum per group of 32 and accumulate over groups in order.
//
// The integer sums are written once per instruction set, in dot_*.h. A tile is multiplied in pieces as wide as a
// register: SumLanes and FloatLanes hold the lanes of one piece. kAbreast tiles at most share each load of the inputs.
//
// dot_group_w8: sums[a][t][lane] = sum over the 32 k of a group of weight[lane][k] * x[t][k], exact in int32, for the
// lanes of one piece of tile a. Tile a starts a * apart bytes after w, x[t] starts t * stride bytes after x, in the form
// that quantize gives it for the format. The weights are stored as q + 128, the result is for q; xsum[t * sum_stride] is
// what quantize gives for that. dot_group_w4: the same for the unsigned four-bit elements of a group of W4.
#pragma once
#include "quantize.h"
#include "weights.h"
#if defined(__AVX512VNNI__)
#include "dot_avx512.h"
#elif defined(__AVXVNNI__)
#include "dot_avxvnni.h"
#elif defined(__AVX2__)
#include "dot_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "dot_neon.h"
#else
#include "dot_portable.h"
#endif

namespace llmc {

constexpr int kPiece = sizeof(SumLanes) / sizeof(int32_t), kPieces = kLanes / kPiece;

// The scales of one piece.
LLMC_INLINE FloatLanes scales_at(const uint16_t* p) {
  u16x16 h{};
  __builtin_memcpy(&h, p, kPiece * sizeof(uint16_t));
  f32x16 wide = f16_to_f32(h);
  FloatLanes v;
  __builtin_memcpy(&v, &wide, sizeof(v));
  return v;
}

// Lines to be fetched into the cache while tiles are multiplied: `step` bytes of each, a multiple of 64, for every kUnit
// elements along K. Tiles are `stride` bytes apart.
struct Ahead {
  const char* p;
  int step;
  int64_t stride;
  LLMC_INLINE void fetch(int tile) const {
    for (int i = 0; i < step; i += 64) __builtin_prefetch(p + tile * stride + i, 0, 2);
  }
  LLMC_INLINE void advance() { p += step; }
};
constexpr int kUnit = kGroup;

LLMC_INLINE f32x16 load_weights(const float* p) { return load<f32x16>(p); }
LLMC_INLINE f32x16 load_weights(const uint16_t* p) { return bf16_to_f32(load<u16x16>(p)); }

// acc[t] += sum over k, from..to - 1, of weight[lane][k] * x[t][k], in order. E is float (F32) or uint16_t (BF16); w is
// one tile.
template <int TT, class E>
LLMC_INLINE void dot_tile(const E* w, Mat x, int first_row, int from, int to, Ahead ahead, f32x16 (&acc)[TT]) {
  const float* rows[TT];
  for (int t = 0; t < TT; ++t) rows[t] = x.row(first_row + t);
  for (int k = from; k < to;) {
    ahead.fetch(0);
    ahead.advance();
    for (int end = k + kUnit < to ? k + kUnit : to; k < end; ++k) {
      f32x16 wv = load_weights(w + (int64_t)k * kLanes);
      for (int t = 0; t < TT; ++t) acc[t] = fma(splat(rows[t][k]), wv, acc[t]);
    }
  }
}

// The same for quantised weights and inputs, by groups, of S tiles that follow each other: in step, so that memory is
// read in S places at once. data, scale and min point at the first tile. K is padded.
template <Fmt FMT, int K, int TT, int S>
LLMC_INLINE void dot_tiles(const uint8_t* data, const uint16_t* scale, const uint16_t* min, QuantBuf x, int first_row,
                           int from, int to, Ahead ahead, f32x16 (&acc)[S][TT]) {
  constexpr int kGroups = K / kGroup, kBytes = FMT == Fmt::w8 ? 512 : 256, kStride = q_bytes(FMT, K);
  const int8_t* q = x.q + (int64_t)first_row * kStride;
  const float* xscale = x.scale + (int64_t)first_row * kGroups;
  const int32_t* xsum = x.sum + (int64_t)first_row * kGroups;
  FloatLanes part[S][TT][kPieces];
  __builtin_memcpy(part, acc, sizeof(acc));
  constexpr int kTogether = S % kAbreast == 0 ? kAbreast : 1;  // tiles that share the loads of the inputs
  for (int g = from / kGroup; g < to / kGroup; ++g, ahead.advance()) {
#pragma clang loop unroll(full)
    for (int first = 0; first < S; first += kTogether) {
      for (int s = first; s < first + kTogether; ++s) ahead.fetch(s);
      const uint8_t* w = data + ((int64_t)first * kGroups + g) * kBytes;
#pragma clang loop unroll(full)
      for (int piece = 0; piece < kPieces; ++piece) {
        __asm__ volatile("" ::: "memory");  // or the inputs that the pieces share would be kept, and spill
        SumLanes sum[kTogether][TT];
        const int8_t* qg = q + g * q_bytes(FMT, kGroup);
        if constexpr (FMT == Fmt::w8)
          dot_group_w8(w, kGroups * kBytes, piece, qg, kStride, xsum + g, kGroups, sum);
        else
          dot_group_w4(w, kGroups * kBytes, piece, qg, kStride, sum);
        for (int i = 0; i < kTogether; ++i) {
          const int scales = ((first + i) * kGroups + g) * kLanes + piece * kPiece;
          FloatLanes ws = scales_at(scale + scales), wm{};
          if constexpr (FMT == Fmt::w4) wm = scales_at(min + scales);
          for (int t = 0; t < TT; ++t) {
            FloatLanes xs = xscale[t * kGroups + g] - FloatLanes{}, &a = part[first + i][t][piece];
            a = fma(__builtin_convertvector(sum[i][t], FloatLanes), ws * xs, a);
            if constexpr (FMT == Fmt::w4) a = fma(wm * xs, load<float>(xsum + t * kGroups + g) - FloatLanes{}, a);
          }
        }
      }
    }
  }
  __builtin_memcpy(acc, part, sizeof(acc));
}

}  // namespace llmc
