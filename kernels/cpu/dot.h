// The inner loops of the matrix products: one tile of 16 output columns against TT rows of the input.
//
// For each (row, column) the operations and their order are the same for every TT and instruction set: F32 and BF16
// accumulate over k in order; W8 and W4 form an exact integer sum per group of 32 and accumulate over groups in order.
#pragma once
#include "quantize.h"
#include "weights.h"

namespace llmc {

// sum[t][lane] = sum over the 32 k of a group of weight[lane][k] * x[t * stride + k], exact in int32. The weights are
// stored as q + 128; the result is for q. xsum[t * sum_stride] is the sum of x over the group.
template <int TT>
LLMC_INLINE void dot_group_w8(const uint8_t* w, const int8_t* x, int stride, const int32_t* xsum, int sum_stride,
                              i32x16 (&sum)[TT]);

// The same for a group of W4: the result is for the unsigned four-bit elements.
template <int TT>
LLMC_INLINE void dot_group_w4(const uint8_t* w, const int8_t* x, int stride, i32x16 (&sum)[TT]);

LLMC_INLINE int32_t quad_at(const int8_t* x) { return load<int32_t>(x); }

#if defined(__AVX512VNNI__)

LLMC_INLINE i32x16 dot4(i32x16 acc, __m512i w, const int8_t* x) {
  return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, w, _mm512_set1_epi32(quad_at(x)));
}

template <int TT>
LLMC_INLINE void dot_group_w8(const uint8_t* w, const int8_t* x, int stride, const int32_t* xsum, int sum_stride,
                              i32x16 (&sum)[TT]) {
  for (int t = 0; t < TT; ++t) sum[t] = splat(-128 * xsum[t * sum_stride]);
#pragma clang loop unroll(full)
  for (int j = 0; j < 8; ++j) {
    __m512i wv = _mm512_loadu_si512(w + 64 * j);
    for (int t = 0; t < TT; ++t) sum[t] = dot4(sum[t], wv, x + t * stride + 4 * j);
  }
}

template <int TT>
LLMC_INLINE void dot_group_w4(const uint8_t* w, const int8_t* x, int stride, i32x16 (&sum)[TT]) {
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

LLMC_INLINE i32x16 concat(__m256i low, __m256i high) {
  typedef int32_t i32x8 __attribute__((vector_size(32)));
  return __builtin_shufflevector((i32x8)low, (i32x8)high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

// |w| * (x with the sign of w): no pair of products saturates, as 2 * 127 * 127 < 2^15.
template <int TT>
LLMC_INLINE void dot_group_w8(const uint8_t* w, const int8_t* x, int stride, const int32_t*, int,
                              i32x16 (&sum)[TT]) {
  const __m256i bias = _mm256_set1_epi8((char)0x80), ones = _mm256_set1_epi16(1);
  __m256i part[2][TT];
  for (int half = 0; half < 2; ++half) {
    for (int t = 0; t < TT; ++t) part[half][t] = _mm256_setzero_si256();
#pragma clang loop unroll(full)
    for (int j = 0; j < 8; ++j) {
      __m256i q = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)(w + 64 * j + 32 * half)), bias);
      __m256i magnitude = _mm256_abs_epi8(q);
      for (int t = 0; t < TT; ++t) {
        __m256i xv = _mm256_sign_epi8(_mm256_set1_epi32(quad_at(x + t * stride + 4 * j)), q);
        part[half][t] =
            _mm256_add_epi32(part[half][t], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, xv), ones));
      }
    }
  }
  for (int t = 0; t < TT; ++t) sum[t] = concat(part[0][t], part[1][t]);
}

// A whole group fits 16 bits: 16 products of at most 15 * 127 fall on each of the two halves of a lane.
template <int TT>
LLMC_INLINE void dot_group_w4(const uint8_t* w, const int8_t* x, int stride, i32x16 (&sum)[TT]) {
  const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256i part[2][TT];
  for (int half = 0; half < 2; ++half) {
    for (int t = 0; t < TT; ++t) part[half][t] = _mm256_setzero_si256();
#pragma clang loop unroll(full)
    for (int j = 0; j < 4; ++j) {
      __m256i both = _mm256_loadu_si256((const __m256i*)(w + 64 * j + 32 * half));
      __m256i low = _mm256_and_si256(both, nibble), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
      for (int t = 0; t < TT; ++t) {
        const int8_t* xt = x + t * stride + 4 * j;
        __m256i a = _mm256_maddubs_epi16(low, _mm256_set1_epi32(quad_at(xt)));
        __m256i b = _mm256_maddubs_epi16(high, _mm256_set1_epi32(quad_at(xt + 16)));
        part[half][t] = _mm256_add_epi16(part[half][t], _mm256_add_epi16(a, b));
      }
    }
  }
  for (int t = 0; t < TT; ++t)
    sum[t] = concat(_mm256_madd_epi16(part[0][t], ones), _mm256_madd_epi16(part[1][t], ones));
}

#else

// acc[lane] += sum over j of w[4*lane + j] * x[j]: even and odd bytes as 16-bit lanes; a sum of two products of at
// most 127 * 127 fits 16 bits.
LLMC_INLINE i32x16 dot4(i32x16 acc, u8x64 w, int bias, const int8_t* x) {
  i16x32 even = (i16x32)((u16x32)w & 0xff) - (int16_t)bias, odd = (i16x32)((u16x32)w >> 8) - (int16_t)bias;
  uint32_t even_x = (uint16_t)x[0] | (uint32_t)(uint16_t)x[2] << 16;
  uint32_t odd_x = (uint16_t)x[1] | (uint32_t)(uint16_t)x[3] << 16;
  i32x16 pairs = (i32x16)(even * (i16x32)splat((int32_t)even_x) + odd * (i16x32)splat((int32_t)odd_x));
  return acc + (i32x16)((u32x16)pairs << 16) / 65536 + (pairs >> 16);
}

template <int TT>
LLMC_INLINE void dot_group_w8(const uint8_t* w, const int8_t* x, int stride, const int32_t*, int,
                              i32x16 (&sum)[TT]) {
  for (int t = 0; t < TT; ++t) sum[t] = i32x16{};
  for (int j = 0; j < 8; ++j) {
    u8x64 wv = load<u8x64>(w + 64 * j);
    for (int t = 0; t < TT; ++t) sum[t] = dot4(sum[t], wv, 128, x + t * stride + 4 * j);
  }
}

template <int TT>
LLMC_INLINE void dot_group_w4(const uint8_t* w, const int8_t* x, int stride, i32x16 (&sum)[TT]) {
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
  for (int t = 0; t < TT; ++t) acc[t] = f32x16{};
  for (int g = 0; g < kGroups; ++g) {
    if constexpr (STREAM) prefetch<kBytes>(data + (int64_t)g * kBytes);
    i32x16 sum[TT];
    if constexpr (FMT == Fmt::w8)
      dot_group_w8<TT>(data + (int64_t)g * kBytes, q + g * kGroup, kPadded, xsum + g, kGroups, sum);
    else
      dot_group_w4<TT>(data + (int64_t)g * kBytes, q + g * kGroup, kPadded, sum);
    f32x16 ws = f16_to_f32(load<u16x16>(scale + g * kLanes)), wm{};
    if constexpr (FMT == Fmt::w4) wm = f16_to_f32(load<u16x16>(min + g * kLanes));
    for (int t = 0; t < TT; ++t) {
      f32x16 xs = splat(xscale[t * kGroups + g]);
      acc[t] = fma(to_float(sum[t]), ws * xs, acc[t]);
      if constexpr (FMT == Fmt::w4) acc[t] = fma(wm * xs, splat((float)xsum[t * kGroups + g]), acc[t]);
    }
  }
}

}  // namespace llmc
