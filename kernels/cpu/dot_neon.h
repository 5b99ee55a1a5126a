// Integer dot products of one group in NEON with the dot product extension; dot.h says what each file of this kind
// defines. A piece of 8 lanes: the sums of 6 rows (12 registers), half of their inputs (6) and the weights at work stay
// in the 32 registers.
#pragma once
#include <arm_neon.h>

#include "quantize.h"

namespace llmc {

typedef i32x8 SumLanes;
typedef f32x8 FloatLanes;
constexpr int kAbreast = 1;

// sum[t] += the J-th four of 16 inputs x[t], times the weights w of the eight lanes.
template <int J, int TT>
LLMC_INLINE void dot4(const int8x16_t (&x)[TT], int8x16_t low_lanes, int8x16_t high_lanes, int32x4_t (&sum)[TT][2]) {
  for (int t = 0; t < TT; ++t) {
    sum[t][0] = vdotq_laneq_s32(sum[t][0], low_lanes, x[t], J);
    sum[t][1] = vdotq_laneq_s32(sum[t][1], high_lanes, x[t], J);
  }
}

// weights(j, h): those of inputs 4*j .. 4*j+3 for the lanes 4*h .. 4*h+3 of the piece.
template <int TT, class Weights>
LLMC_INLINE void dot_group(Weights weights, const int8_t* x, int stride, SumLanes (&sum)[TT]) {
  int32x4_t part[TT][2] = {};
#pragma clang loop unroll(full)
  for (int half = 0; half < 2; ++half) {
    int8x16_t xv[TT];
    for (int t = 0; t < TT; ++t) xv[t] = vld1q_s8(x + t * stride + 16 * half);
    int j = 4 * half;
    dot4<0>(xv, weights(j, 0), weights(j, 1), part);
    dot4<1>(xv, weights(j + 1, 0), weights(j + 1, 1), part);
    dot4<2>(xv, weights(j + 2, 0), weights(j + 2, 1), part);
    dot4<3>(xv, weights(j + 3, 0), weights(j + 3, 1), part);
  }
  for (int t = 0; t < TT; ++t) sum[t] = __builtin_shufflevector(part[t][0], part[t][1], 0, 1, 2, 3, 4, 5, 6, 7);
}

// q + 128 becomes q by inverting the highest bit.
template <int TT>
LLMC_INLINE void dot_group_w8(const uint8_t* w, int64_t, int piece, const int8_t* x, int stride, const int32_t*,
                              int, SumLanes (&sums)[1][TT]) {
  auto weights = [=](int j, int h) __attribute__((always_inline)) {
    return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w + 64 * j + 32 * piece + 16 * h), vdupq_n_u8(0x80)));
  };
  dot_group(weights, x, stride, sums[0]);
}

template <int TT>
LLMC_INLINE void dot_group_w4(const uint8_t* w, int64_t, int piece, const int8_t* x, int stride,
                              SumLanes (&sums)[1][TT]) {
  auto weights = [=](int j, int h) __attribute__((always_inline)) {
    uint8x16_t both = vld1q_u8(w + 64 * (j % 4) + 32 * piece + 16 * h);
    return vreinterpretq_s8_u8(j < 4 ? vandq_u8(both, vdupq_n_u8(15)) : vshrq_n_u8(both, 4));
  };
  dot_group(weights, x, stride, sums[0]);
}

}  // namespace llmc
