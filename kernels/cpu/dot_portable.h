// Integer dot products of one group in plain C++; dot.h says what each file of this kind defines.
#pragma once
#include "quantize.h"

namespace llmc {

typedef i32x16 SumLanes;
typedef f32x16 FloatLanes;
constexpr int kAbreast = 1;

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
LLMC_INLINE void dot_group_w8(const uint8_t* w, int64_t, int, const int8_t* x, int stride, const int32_t*,
                              int, SumLanes (&sums)[1][TT]) {
  for (int t = 0; t < TT; ++t) sums[0][t] = i32x16{};
  for (int j = 0; j < 8; ++j) {
    u8x64 wv = load<u8x64>(w + 64 * j);
    for (int t = 0; t < TT; ++t) sums[0][t] = dot4(sums[0][t], wv, 128, x + t * stride + 4 * j);
  }
}

template <int TT>
LLMC_INLINE void dot_group_w4(const uint8_t* w, int64_t, int, const int8_t* x, int stride,
                              SumLanes (&sums)[1][TT]) {
  for (int t = 0; t < TT; ++t) sums[0][t] = i32x16{};
  for (int j = 0; j < 4; ++j) {
    u8x64 both = load<u8x64>(w + 64 * j);
    u8x64 low = both & 15, high = both >> 4;
    for (int t = 0; t < TT; ++t) {
      sums[0][t] = dot4(sums[0][t], low, 0, x + t * stride + 4 * j);
      sums[0][t] = dot4(sums[0][t], high, 0, x + t * stride + 16 + 4 * j);
    }
  }
}

}  // namespace llmc
