// Integer dot products of one group in AVX2; dot.h says what each file of this kind defines.
#pragma once
#include "quantize.h"

namespace llmc {

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

}  // namespace llmc
