// exp, tanh, erf, sigmoid and sine/cosine on vectors, within 3 units in the last place of float32.
//
// The polynomials were fitted for these ranges (Lawson's iteration towards the minimax polynomial); the range
// reductions are the textbook ones (Cody and Waite). tests/kernels/test_cpu_math.py holds the error bounds.
#pragma once
#include "simd.h"

namespace llmc {

constexpr float kLog2E = 1.44269504f;

// Underflows to exactly 0 (also for -inf), overflows to inf; a NaN stays a NaN.
LLMC_INLINE f32x16 exp(f32x16 x) {
  const float shift = 0x1.8p23f;  // adding it rounds to an integer, which then stands in the low mantissa bits
  x = min(max(x, splat(-105.0f)), splat(89.0f));
  f32x16 shifted = fma(x, splat(kLog2E), splat(shift));
  f32x16 n = shifted - shift;
  i32x16 exponent = (i32x16)shifted - (i32x16)splat(shift);
  f32x16 r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  f32x16 p = splat(1.381446491e-3f);
  p = fma(p, r, splat(8.368780836e-3f));
  p = fma(p, r, splat(4.166839272e-2f));
  p = fma(p, r, splat(1.666651964e-1f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r * r, r) + 1.0f;
  // 2^n in two factors: each is a normal number although the result may be subnormal or overflow.
  i32x16 half = exponent >> 1;
  f32x16 a = (f32x16)((half + 127) << 23), b = (f32x16)((exponent - half + 127) << 23);
  return p * a * b;
}

// 2^x of x <= 0; exactly 0 below the normal numbers, and of -inf. A NaN stays a NaN. Cheaper than exp(), for the
// softmax of attention.
LLMC_INLINE f32x16 exp2_of_negative(f32x16 x) {
  const float shift = 0x1.8p23f, lowest = -126.0f;  // adding the first rounds as in exp()
  f32x16 shifted = x + shift;
  f32x16 r = x - (shifted - shift);
  f32x16 p = splat(1.326472731e-3f);
  p = fma(p, r, splat(9.671512991e-3f));
  p = fma(p, r, splat(5.550733581e-2f));
  p = fma(p, r, splat(2.402224243e-1f));
  p = fma(p, r, splat(6.931470037e-1f));
  p = fma(p, r, splat(1.0f));
  return x < lowest ? splat(0.0f) : (f32x16)((i32x16)p + ((i32x16)shifted << 23));
}

LLMC_INLINE f32x16 tanh(f32x16 x) {
  f32x16 s = x * x, a = abs(x);
  f32x16 p = splat(2.097718185e-3f);
  p = fma(p, s, splat(-8.128996938e-3f));
  p = fma(p, s, splat(2.168164216e-2f));
  p = fma(p, s, splat(-5.394339934e-2f));
  p = fma(p, s, splat(1.333318055e-1f));
  p = fma(p, s, splat(-3.333333135e-1f));
  f32x16 small = fma(p * s, x, x);
  f32x16 large = copysign(1.0f - 2.0f / (exp(a + a) + 1.0f), x);
  return a < 0.625f ? small : large;
}

LLMC_INLINE f32x16 erf(f32x16 x) {
  f32x16 s = x * x, a = abs(x);
  f32x16 p = splat(7.889119297e-5f);
  p = fma(p, s, splat(-8.020841051e-4f));
  p = fma(p, s, splat(5.189535208e-3f));
  p = fma(p, s, splat(-2.685444430e-2f));
  p = fma(p, s, splat(1.128360033e-1f));
  p = fma(p, s, splat(-3.761262596e-1f));
  p = fma(p, s, splat(1.283791661e-1f));
  f32x16 small = fma(p, x, x);
  a = min(a, splat(4.0f));  // erf(4) rounds to 1
  f32x16 q = splat(-2.168681385e-5f);  // log(1 - erf(a))
  q = fma(q, a, splat(4.413358984e-4f));
  q = fma(q, a, splat(-4.204559140e-3f));
  q = fma(q, a, splat(2.520824783e-2f));
  q = fma(q, a, splat(-1.084185615e-1f));
  q = fma(q, a, splat(-6.332198977e-1f));
  q = fma(q, a, splat(-1.129578471f));
  q = fma(q, a, splat(1.880381751e-4f));
  f32x16 large = copysign(1.0f - exp(q), x);
  return a < 1.0f ? small : large;
}

LLMC_INLINE f32x16 sigmoid(f32x16 x) { return 1.0f / (1.0f + exp(-x)); }

// Sine and cosine of angles up to about 1e6 in magnitude, right to float rounding: all in double, the reduction by
// multiples of pi/2 with a leading part of 33 bits, so that n * lead is exact.
LLMC_INLINE void sincos(f64x8 x, f64x8& sine, f64x8& cosine) {
  typedef int64_t i64x8 __attribute__((vector_size(64)));
  const double shift = 0x1.8p52;
  f64x8 shifted = x * 0x1.45f306dc9c883p-1 + shift;
  f64x8 n = shifted - shift;
  i64x8 quadrant = (i64x8)shifted;
  f64x8 r = (x - n * 0x1.921fb544p0) - n * 0x1.0b4611a626331p-34;
  f64x8 s = r * r;
  f64x8 a = r * (1 + s * (-1.0 / 6 + s * (1.0 / 120 + s * (-1.0 / 5040 + s * (1.0 / 362880 + s * (-1.0 / 39916800))))));
  f64x8 b = 1 + s * (-0.5 + s * (1.0 / 24 + s * (-1.0 / 720 + s * (1.0 / 40320 + s * (-1.0 / 3628800 +
            s * (1.0 / 479001600))))));
  i64x8 swap = (quadrant & 1) != 0;
  f64x8 si = swap ? b : a, co = swap ? a : b;
  sine = (quadrant & 2) != 0 ? -si : si;
  cosine = ((quadrant + 1) & 2) != 0 ? -co : co;
}

// Natural logarithm of a positive finite double, within 1e-15 relative of max(1, |log x|).
inline double log(double x) {
  int64_t bits;
  __builtin_memcpy(&bits, &x, 8);
  int64_t k = (bits >> 52) - 1023;
  bits = (bits & 0xfffffffffffff) | 0x3ff0000000000000;
  double m;
  __builtin_memcpy(&m, &bits, 8);
  if (m > 1.4142135623730951) m *= 0.5, k += 1;
  double s = (m - 1) / (m + 1), z = s * s, sum = 0;
  for (int i = 23; i >= 1; i -= 2) sum = sum * z + 1.0 / i;
  return (double)k * 0.6931471805599453 + 2 * s * sum;
}

enum class Act { none, silu, gelu, gelu_tanh, quick_gelu, relu, relu2, tanh, sigmoid };

template <Act A>
LLMC_INLINE f32x16 activate(f32x16 x) {
  if constexpr (A == Act::silu) return x * sigmoid(x);
  if constexpr (A == Act::gelu) return 0.5f * x * (1.0f + erf(x * 0.70710678f));
  if constexpr (A == Act::gelu_tanh) {
    f32x16 inner = 0.79788456f * fma(x * x * x, splat(0.044715f), x);
    return 0.5f * x * (1.0f + tanh(inner));
  }
  if constexpr (A == Act::quick_gelu) return x * sigmoid(1.702f * x);
  if constexpr (A == Act::relu) return max(x, splat(0.0f));
  if constexpr (A == Act::relu2) {
    f32x16 r = max(x, splat(0.0f));
    return r * r;
  }
  if constexpr (A == Act::tanh) return tanh(x);
  if constexpr (A == Act::sigmoid) return sigmoid(x);
  return x;
}

}  // namespace llmc
