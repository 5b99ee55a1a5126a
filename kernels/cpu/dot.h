// The inner loops of the matrix products: one tile of 16 output columns against TT rows of the input.
//
// For each (row, column) the operations and their order are the same for every TT and instruction set: F32 and BF16
// accumulate over k in order; W8 and W4 form an exact integer sum per group of 32 and accumulate over groups in order.
#pragma once
#include "quantize.h"
#include "weights.h"

namespace llmc {

// A tile is multiplied in pieces as wide as a register: SumLanes and FloatLanes hold the lanes of one piece.
//
// dot_group_w8: sum[t][lane] = sum over the 32 k of a group of weight[lane][k] * x[t * stride + k], exact in int32, for
// the lanes of one piece. The weights are stored as q + 128, the result is for q; xsum[t * sum_stride] is the sum of x
// over the group. dot_group_w4: the same for the unsigned four-bit elements of a group of W4.

LLMC_INLINE int32_t quad_at(const int8_t* x) { return load<int32_t>(x); }

#if defined(__AVX512VNNI__)

typedef i32x16 SumLanes;
typedef f32x16 FloatLanes;

LLMC_INLINE i32x16 dot4(i32x16 acc, __m512i w, const int8_t* x) {
  return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, w, _mm512_set1_epi32(quad_at(x)));
}

template <int TT>
LLMC_INLINE void dot_group_w8(const uint8_t* w, int, const int8_t* x, int stride, const int32_t* xsum, int sum_stride,
                              SumLanes (&sum)[TT]) {
  for (int t = 0; t < TT; ++t) sum[t] = splat(-128 * xsum[t * sum_stride]);
#pragma clang loop unroll(full)
  for (int j = 0; j < 8; ++j) {
    __m512i wv = _mm512_loadu_si512(w + 64 * j);
    for (int t = 0; t < TT; ++t) sum[t] = dot4(sum[t], wv, x + t * stride + 4 * j);
  }
}

template <int TT>
LLMC_INLINE void dot_group_w4(const uint8_t* w, int, const int8_t* x, int stride, SumLanes (&sum)[TT]) {
  for (int t = 0; t < TT; ++t) sum[t] = i32x16{};
  const __m512i nibble = _mm512_set1_epi8(15);
#pragma clang loop unroll(full)
  for (int j = 0; j < 4; ++j) {
    __m512i both = _mm512_loadu_si512(w + 64 * j);
    __m512i low = _mm512_and_si512(both, nibble), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
    for (int t = 0; t < TT; ++t) {
      sum[t] = dot4(sum[t], low, x + t * stride + 4 * j);
      sum[t] = dot4(sum[t], high, x + t * stride + 16 + 4 * j);
    }
  }
}

#elif defined(__AVX2__)

typedef i32x8 SumLanes;
typedef f32x8 FloatLanes;

// |w| * (x with the sign of w): no pair of products saturates, as 2 * 127 * 127 < 2^15.
template <int TT>
LLMC_INLINE void dot_group_w8(const uint8_t* w, int piece, const int8_t* x, int stride, const int32_t*, int,
                              SumLanes (&sum)[TT]) {
  const __m256i bias = _mm256_set1_epi8((char)0x80), ones = _mm256_set1_epi16(1);
  for (int t = 0; t < TT; ++t) sum[t] = i32x8{};
#pragma clang loop unroll(full)
  for (int j = 0; j < 8; ++j) {
    __m256i q = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(w + 64 * j + 32 * piece)), bias);
    __m256i magnitude = _mm256_abs_epi8(q);
    for (int t = 0; t < TT; ++t) {
      __m256i xv = _mm256_sign_epi8(_mm256_set1_epi32(quad_at(x + t * stride + 4 * j)), q);
      sum[t] += (i32x8)_mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, xv), ones);
    }
  }
}

// A whole group fits 16 bits: 16 products of at most 15 * 127 fall on each of the two halves of a lane.
template <int TT>
LLMC_INLINE void dot_group_w4(const uint8_t* w, int piece, const int8_t* x, int stride, SumLanes (&sum)[TT]) {
  const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256i part[TT];
  for (int t = 0; t < TT; ++t) part[t] = _mm256_setzero_si256();
#pragma clang loop unroll(full)
  for (int j = 0; j < 4; ++j) {
    __m256i both = _mm256_loadu_si256((const __m256i*)(w + 64 * j + 32 * piece));
    __m256i low = _mm256_and_si256(both, nibble), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
    for (int t = 0; t < TT; ++t) {
      const int8_t* xt = x + t * stride + 4 * j;
      __m256i a = _mm256_maddubs_epi16(low, _mm256_set1_epi32(quad_at(xt)));
      __m256i b = _mm256_maddubs_epi16(high, _mm256_set1_epi32(quad_at(xt + 16)));
      part[t] = _mm256_add_epi16(part[t], _mm256_add_epi16(a, b));
    }
  }
  for (int t = 0; t < TT; ++t) sum[t] = (i32x8)_mm256_madd_epi16(part[t], ones);
}

#else

typedef i32x16 SumLanes;
typedef f32x16 FloatLanes;

// acc[lane] += sum over j of w[4*lane + j] * x[j]: even and odd bytes as 16-bit lanes; a sum of two products of at
// most 127 * 127 fits 16 bits.
LLMC_INLINE i32x16 dot4(i32x16 acc, u8x64 w, int bias, const int8_t* x) {
  i16x32 even = (i16x32)((u16x32)w & 0xff) - (int16_t)bias, odd = (i16x32)((u16x32)w >> 8) - (int16_t)bias;
  uint32_t even_x = (uint16_t)x[0] | (uint32_t)(uint16_t)x[2] << 16;
  uint32_t odd_x = (uint16_t)x[1] | (uint32_t)(uint16_t)x[3] << 16;
  i32x16 pairs = (i32x16)(even * (i16x32)splat((int32_t)even_x) + odd * (i16x32)splat((int32_t)odd_x));
  i32x16 low_halves = (i32x16)((u32x16)pairs << 16);
  return acc + (low_halves >> 16) + (pairs >> 16);
}

template <int TT>
LLMC_INLINE void dot_group_w8(const uint8_t* w, int, const int8_t* x, int stride, const int32_t*, int,
                              SumLanes (&sum)[TT]) {
  for (int t = 0; t < TT; ++t) sum[t] = i32x16{};
  for (int j = 0; j < 8; ++j) {
    u8x64 wv = load<u8x64>(w + 64 * j);
    for (int t = 0; t < TT; ++t) sum[t] = dot4(sum[t], wv, 128, x + t * stride + 4 * j);
  }
}

template <int TT>
LLMC_INLINE void dot_group_w4(const uint8_t* w, int, const int8_t* x, int stride, SumLanes (&sum)[TT]) {
  for (int t = 0; t < TT; ++t) sum[t] = i32x16{};
  for (int j = 0; j < 4; ++j) {
    u8x64 both = load<u8x64>(w + 64 * j);
    u8x64 low = both & 15, high = both >> 4;
    for (int t = 0; t < TT; ++t) {
      sum[t] = dot4(sum[t], low, 0, x + t * stride + 4 * j);
      sum[t] = dot4(sum[t], high, 0, x + t * stride + 16 + 4 * j);
    }
  }
}

#endif

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

// Lines of the weight stream asked for ahead of use when a step reads each weight once.
constexpr int kPrefetchBytes = 2048;

template <int BYTES>
LLMC_INLINE void prefetch(const void* p) {
  for (int i = 0; i < BYTES; i += 64) __builtin_prefetch((const char*)p + kPrefetchBytes + i, 0, 2);
}

LLMC_INLINE f32x16 load_weights(const float* p) { return load<f32x16>(p); }
LLMC_INLINE f32x16 load_weights(const uint16_t* p) { return bf16_to_f32(load<u16x16>(p)); }

// acc[t] = sum over k of weight[lane][k] * x[t][k]; E is float (F32) or uint16_t (BF16); w is one tile.
template <int K, int TT, bool STREAM, class E>
LLMC_INLINE void dot_tile(const E* w, Mat x, int first_row, f32x16 (&acc)[TT]) {
  const float* rows[TT];
  for (int t = 0; t < TT; ++t) {
    rows[t] = x.row(first_row + t);
    acc[t] = f32x16{};
  }
  for (int k = 0; k < K; ++k) {
    if constexpr (STREAM) prefetch<sizeof(E) * kLanes>(w + (int64_t)k * kLanes);
    f32x16 wv = load_weights(w + (int64_t)k * kLanes);
    for (int t = 0; t < TT; ++t) acc[t] = fma(splat(rows[t][k]), wv, acc[t]);
  }
}

// The same for quantised weights and inputs; data, scale and min point at one tile.
template <Fmt FMT, int K, int TT, bool STREAM>
LLMC_INLINE void dot_tile(const uint8_t* data, const uint16_t* scale, const uint16_t* min, QuantBuf x, int first_row,
                          f32x16 (&acc)[TT]) {
  constexpr int kPadded = round_up(K, kGroup), kGroups = kPadded / kGroup, kBytes = FMT == Fmt::w8 ? 512 : 256;
  const int8_t* q = x.q + (int64_t)first_row * kPadded;
  const float* xscale = x.scale + (int64_t)first_row * kGroups;
  const int32_t* xsum = x.sum + (int64_t)first_row * kGroups;
  FloatLanes part[TT][kPieces] = {};
  for (int g = 0; g < kGroups; ++g) {
    if constexpr (STREAM) prefetch<kBytes>(data + (int64_t)g * kBytes);
#pragma clang loop unroll(full)
    for (int piece = 0; piece < kPieces; ++piece) {
      __asm__ volatile("" ::: "memory");  // or the inputs that the pieces share would be kept, and spill
      SumLanes sum[TT];
      if constexpr (FMT == Fmt::w8)
        dot_group_w8<TT>(data + (int64_t)g * kBytes, piece, q + g * kGroup, kPadded, xsum + g, kGroups, sum);
      else
        dot_group_w4<TT>(data + (int64_t)g * kBytes, piece, q + g * kGroup, kPadded, sum);
      FloatLanes ws = scales_at(scale + g * kLanes + piece * kPiece), wm{};
      if constexpr (FMT == Fmt::w4) wm = scales_at(min + g * kLanes + piece * kPiece);
      for (int t = 0; t < TT; ++t) {
        FloatLanes xs = FloatLanes{} + xscale[t * kGroups + g], &a = part[t][piece];
        a = fma(__builtin_convertvector(sum[t], FloatLanes), ws * xs, a);
        if constexpr (FMT == Fmt::w4) a = fma(wm * xs, FloatLanes{} + (float)xsum[t * kGroups + g], a);
      }
    }
  }
  for (int t = 0; t < TT; ++t) __builtin_memcpy(&acc[t], part[t], sizeof(acc[t]));
}

}  // namespace llmc
