// Integer dot products of one group in AVX-512 VNNI; dot.h says what each file of this kind defines.
#pragma once
#include "quantize.h"

namespace llmc {

typedef i32x16 SumLanes;
typedef f32x16 FloatLanes;

LLMC_INLINE i32x16 dot4(i32x16 acc, __m512i w, const int8_t* x) {
  return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, w, _mm512_set1_epi32(quad_at(x)));
}

template <int TT>
LLMC_INLINE void dot_group_w8(const uint8_t* w, int, const int8_t* x, int stride, const int32_t* xsum, int sum_stride,
                              SumLanes (&sum)[TT]) {
  for (int t = 0; t < TT; ++t) sum[t] = splat(xsum[t * sum_stride]);
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

}  // namespace llmc
