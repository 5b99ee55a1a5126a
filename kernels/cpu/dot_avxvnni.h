// Integer dot products of one group in AVX-VNNI (VNNI on 256 bits, of CPUs without AVX-512); dot.h says what each file
// of this kind defines.
#pragma once
#include "quantize.h"

namespace llmc {

typedef i32x8 SumLanes;
typedef f32x8 FloatLanes;
constexpr int kAbreast = 1;

LLMC_INLINE i32x8 dot4(i32x8 acc, __m256i w, const int8_t* x) {
  return (i32x8)_mm256_dpbusd_avx_epi32((__m256i)acc, w, _mm256_set1_epi32(quad_at(x)));
}

template <int TT>
LLMC_INLINE void dot_group_w8(const uint8_t* w, int64_t, int piece, const int8_t* x, int stride, const int32_t* xsum,
                              int sum_stride, SumLanes (&sums)[1][TT]) {
  for (int t = 0; t < TT; ++t) sums[0][t] = i32x8{} + xsum[t * sum_stride];
#pragma clang loop unroll(full)
  for (int j = 0; j < 8; ++j) {
    __m256i wv = _mm256_loadu_si256((const __m256i*)(w + 64 * j + 32 * piece));
    for (int t = 0; t < TT; ++t) sums[0][t] = dot4(sums[0][t], wv, x + t * stride + 4 * j);
  }
}

template <int TT>
LLMC_INLINE void dot_group_w4(const uint8_t* w, int64_t, int piece, const int8_t* x, int stride,
                              SumLanes (&sums)[1][TT]) {
  for (int t = 0; t < TT; ++t) sums[0][t] = i32x8{};
  const __m256i nibble = _mm256_set1_epi8(15);
#pragma clang loop unroll(full)
  for (int j = 0; j < 4; ++j) {
    __m256i both = _mm256_loadu_si256((const __m256i*)(w + 64 * j + 32 * piece));
    __m256i low = _mm256_and_si256(both, nibble), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
    for (int t = 0; t < TT; ++t) {
      sums[0][t] = dot4(sums[0][t], low, x + t * stride + 4 * j);
      sums[0][t] = dot4(sums[0][t], high, x + t * stride + 16 + 4 * j);
    }
  }
}

}  // namespace llmc
