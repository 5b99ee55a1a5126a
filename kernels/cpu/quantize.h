// Activations to int8 in groups of 32 along K, as the W8 and W4 matrix products take them.
#pragma once
#include "mat.h"
#include "weights.h"

namespace llmc {

// Of T rows with K padded to Kp, a multiple of 32: q [T][Kp] in [-127, 127], scale [T][Kp/32], and sum [T][Kp/32],
// the sum of q over its group. The padding is 0.
struct QuantBuf {
  int8_t* q;
  float* scale;
  int32_t* sum;
};

// Four consecutive values of q, as one lane of a vector holds them.
LLMC_INLINE int32_t quad_at(const int8_t* x) { return load<int32_t>(x); }

// One group: scale = amax / 127, q = round to nearest even (x / scale). With a NaN or infinity in the group, q is 0 and
// the scale NaN, so that the products are NaN too instead of a plausible number.
LLMC_INLINE void quantize_group(f32x16 a, f32x16 b, int8_t* q, float* scale, int32_t* sum) {
  float amax = hmax(max(abs(a), abs(b)));
  float not_finite = hsum((a - a) + (b - b));  // 0 or NaN
  float s = amax / 127.0f + not_finite;
  f32x16 divisor = splat(s > 0.0f ? s : 1.0f);
  const float shift = 0x1.8p23f;  // adding it rounds to the nearest integer, ties to even
  i32x16 total{};
  for (int half = 0; half < 2; ++half) {
    f32x16 v = (half == 0 ? a : b) / divisor;
    v = s > 0.0f ? min(max(v, splat(-127.0f)), splat(127.0f)) : splat(0.0f);  // 0 if s is NaN
    i32x16 n = (i32x16)(v + shift) - (i32x16)splat(shift);
    total += n;
    store(q + half * kLanes, __builtin_convertvector(n, i8x16));
  }
  *scale = s;
  *sum = hsum(total);
}

// By token.
template <int K>
inline void quantize(Par par, int num_tokens, Mat x, QuantBuf out) {
  constexpr int kGroups = round_up(K, kGroup) / kGroup;
  Range r = tokens_of(par, num_tokens);
  for (int t = r.begin; t < r.end; ++t) {
    const float* row = x.row(t);
    for (int g = 0; g < kGroups; ++g) {
      int left = K - g * kGroup;
      f32x16 a = load_n(row + g * kGroup, left < kLanes ? left : kLanes);
      f32x16 b{};
      if (left > kLanes) b = load_n(row + g * kGroup + kLanes, left < kGroup ? left - kLanes : kLanes);
      int64_t i = (int64_t)t * kGroups + g;
      quantize_group(a, b, out.q + i * kGroup, out.scale + i, out.sum + i);
    }
  }
}

}  // namespace llmc
