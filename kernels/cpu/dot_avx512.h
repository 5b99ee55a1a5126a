// Integer dot products of one group in AVX-512 VNNI; dot.h says what each file of this kind defines.
#pragma once
#include "quantize.h"

namespace llmc {

typedef i32x16 SumLanes;
typedef f32x16 FloatLanes;
constexpr int kAbreast = 2;  // the sums of two tiles and six rows, integers and floats, are 24 of the 32 registers

LLMC_INLINE i32x16 dot4(i32x16 acc, __m512i w, const int8_t* x) {
  return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, w, _mm512_set1_epi32(quad_at(x)));
}

template <int A, int TT>
LLMC_INLINE void dot_group_w8(const uint8_t* w, int64_t apart, int, const int8_t* x, int stride, const int32_t* xsum,
                              int sum_stride, SumLanes (&sums)[A][TT]) {
  for (int t = 0; t < TT; ++t)
    for (int a = 0; a < A; ++a) sums[a][t] = splat(xsum[t * sum_stride]);
#pragma clang loop unroll(full)
  for (int j = 0; j < 8; ++j) {
    __m512i wv[A];
    for (int a = 0; a < A; ++a) wv[a] = _mm512_loadu_si512(w + a * apart + 64 * j);
    for (int t = 0; t < TT; ++t)
      for (int a = 0; a < A; ++a) sums[a][t] = dot4(sums[a][t], wv[a], x + t * stride + 4 * j);
  }
}

template <int A, int TT>
LLMC_INLINE void dot_group_w4(const uint8_t* w, int64_t apart, int, const int8_t* x, int stride,
                              SumLanes (&sums)[A][TT]) {
  for (int t = 0; t < TT; ++t)
    for (int a = 0; a < A; ++a) sums[a][t] = i32x16{};
  const __m512i nibble = _mm512_set1_epi8(15);
#pragma clang loop unroll(full)
  for (int j = 0; j < 4; ++j) {
    __m512i low[A], high[A];
    for (int a = 0; a < A; ++a) {
      __m512i both = _mm512_loadu_si512(w + a * apart + 64 * j);
      low[a] = _mm512_and_si512(both, nibble);
      high[a] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
    }
    for (int t = 0; t < TT; ++t) {
      for (int a = 0; a < A; ++a) sums[a][t] = dot4(sums[a][t], low[a], x + t * stride + 4 * j);
      for (int a = 0; a < A; ++a) sums[a][t] = dot4(sums[a][t], high[a], x + t * stride + 16 + 4 * j);
    }
  }
}

}  // namespace llmc
