// Activations to int8 in groups of 32 along K, as the W8 and W4 matrix products take them.
#pragma once
#include "mat.h"
#include "weights.h"

namespace llmc {

// Of T rows with K padded to Kp, a multiple of 32: q [T][Kp] in [-127, 127], scale [T][Kp/32], and sum [T][Kp/32], of q
// over its group in the form that the product adds: for W8 -128 times the sum, which makes unsigned weights signed; for
// W4 the sum as float32. The padding is 0. An element of q is of one byte, or of two where is_widened.
struct QuantBuf {
  int8_t* q;
  float* scale;
  int32_t* sum;
};

// AVX2 multiplies W8 weights by inputs of 16 bits, the even ones of a quad before the odd: 0 2 1 3 (dot_avx2.h).
constexpr bool is_widened(Fmt weights) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
  return weights == Fmt::w8;
#else
  return false && weights == Fmt::w8;
#endif
}

// Bytes of n elements of q.
constexpr int q_bytes(Fmt weights, int n) { return is_widened(weights) ? 2 * n : n; }

// Four consecutive values of q, as one lane of a vector holds them.
LLMC_INLINE int32_t quad_at(const int8_t* x) { return load<int32_t>(x); }

// One group: scale = amax / 127, q = round to nearest even (x / scale). With a NaN or infinity in the group, q is 0 and
// the scale NaN, so that the products are NaN too instead of a plausible number.
template <Fmt FMT>
LLMC_INLINE void quantize_group(f32x16 a, f32x16 b, int8_t* q, float* scale, int32_t* sum) {
  // As integers, magnitudes have the order of their values, and what is not finite comes after all others.
  i32x16 am = (i32x16)abs(a), bm = (i32x16)abs(b);
  int32_t most = __builtin_reduce_max(am > bm ? am : bm);
  float amax;
  __builtin_memcpy(&amax, &most, sizeof(amax));
  bool finite = most < 0x7f800000;
  float s = amax / 127.0f;
  f32x16 divisor = splat(s > 0.0f ? s : 1.0f);
  const float shift = 0x1.8p23f;  // adding it rounds to the nearest integer, ties to even
  i32x16 total{};
  for (int half = 0; half < 2; ++half) {
    f32x16 v = min(max((half == 0 ? a : b) / divisor, splat(-127.0f)), splat(127.0f));
    i32x16 n = (i32x16)(v + shift) - (i32x16)splat(shift);
    n = s > 0.0f && finite ? n : i32x16{};
    total += n;
    if constexpr (is_widened(FMT)) {
      i16x16 wide = __builtin_convertvector(n, i16x16);
      store(q + half * 2 * kLanes,
            __builtin_shufflevector(wide, wide, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
    } else {
      store(q + half * kLanes, __builtin_convertvector(n, i8x16));
    }
  }
  *scale = finite ? s : __builtin_nanf("");
  int32_t whole = __builtin_reduce_add(total);
  if constexpr (FMT == Fmt::w8) {
    *sum = -128 * whole;
  } else {
    float value = (float)whole;
    __builtin_memcpy(sum, &value, sizeof(value));
  }
}

// For products with weights of the format FMT. By token.
template <int K, Fmt FMT>
inline void quantize(Par par, int num_tokens, Mat x, QuantBuf out) {
  constexpr int kGroups = round_up(K, kGroup) / kGroup;
  Range r = tokens_of(par, num_tokens);
  for (int t = r.begin; t < r.end; ++t) {
    const float* row = x.row(t);
    for (int g = 0; g < kGroups; ++g) {
      int left = K - g * kGroup;
      f32x16 a = load_n(row + g * kGroup, left < kLanes ? left : kLanes), b{};
      if (left > kLanes) b = load_n(row + g * kGroup + kLanes, left < kGroup ? left - kLanes : kLanes);
      int64_t i = (int64_t)t * kGroups + g;
      quantize_group<FMT>(a, b, out.q + i * q_bytes(FMT, kGroup), out.scale + i, out.sum + i);
    }
  }
}

}  // namespace llmc
