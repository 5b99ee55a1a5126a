// Vectors of 16 lanes over clang's vector extensions, and the few primitives that differ between instruction sets.
//
// Everything above this file is plain C++ over these types, so a result depends on the instruction set only where a
// target lacks FMA. Compile with -ffp-contract=off: a fused multiply-add happens where fma() is written and nowhere
// else. Vectors wider than the machine's registers are split by the compiler.
#pragma once
#include <stdint.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#pragma clang diagnostic ignored "-Wpsabi"  // every function that takes a vector is inlined

namespace llmc {

#define LLMC_INLINE inline __attribute__((always_inline))

typedef float f32x16 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef double f64x8 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int16_t i16x32 __attribute__((vector_size(64)));
typedef uint16_t u16x32 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));

constexpr int kLanes = 16;
constexpr float kInf = __builtin_inff();

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// Loads and stores of any alignment.
template <class V, class T>
LLMC_INLINE V load(const T* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}
template <class V, class T>
LLMC_INLINE void store(T* p, V v) {
  __builtin_memcpy(p, &v, sizeof(V));
}

LLMC_INLINE f32x16 splat(float x) { return x - f32x16{}; }  // x + 0 would be an addition: it changes -0
LLMC_INLINE i32x16 splat(int32_t x) { return i32x16{} + x; }
LLMC_INLINE i32x16 lane_ids() { return i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// The first n lanes (0 <= n <= 16), the others zero: never touches memory past p[n-1].
LLMC_INLINE f32x16 load_n(const float* p, int n) {
  if (n == kLanes) return load<f32x16>(p);
  f32x16 v{};
  __builtin_memcpy(&v, p, sizeof(float) * n);
  return v;
}
LLMC_INLINE void store_n(float* p, f32x16 v, int n) {
  if (n == kLanes) return store(p, v);
  __builtin_memcpy(p, &v, sizeof(float) * n);
}

// a*b + c; one rounding where the target has FMA, two where it has not.
template <class V>
LLMC_INLINE V fma(V a, V b, V c) {
#if defined(__FMA__) || defined(__AVX512F__) || defined(__aarch64__)
  return __builtin_elementwise_fma(a, b, c);
#else
  return a * b + c;
#endif
}

// A NaN in the first argument is returned.
LLMC_INLINE f32x16 min(f32x16 a, f32x16 b) { return b < a ? b : a; }
LLMC_INLINE f32x16 max(f32x16 a, f32x16 b) { return b > a ? b : a; }
LLMC_INLINE f32x16 abs(f32x16 a) { return (f32x16)((i32x16)a & 0x7fffffff); }
LLMC_INLINE f32x16 copysign(f32x16 magnitude, f32x16 sign) {
  return (f32x16)(((i32x16)magnitude & 0x7fffffff) | ((i32x16)sign & (int32_t)0x80000000));
}
LLMC_INLINE f32x16 sqrt(f32x16 a) { return __builtin_elementwise_sqrt(a); }
LLMC_INLINE float sqrt(float a) { return __builtin_sqrtf(a); }
LLMC_INLINE f32x16 to_float(i32x16 a) { return __builtin_convertvector(a, f32x16); }

// Reductions over the lanes, always as the same tree: 8+8, 4+4, 2+2, 1+1.
LLMC_INLINE float hsum(f32x16 v) {
  f32x8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
            __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  f32x4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  return (b[0] + b[2]) + (b[1] + b[3]);
}
LLMC_INLINE float hmax(f32x16 v) {
  f32x8 l = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
  f32x8 h = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  f32x8 a = h > l ? h : l;
  f32x4 c = __builtin_shufflevector(a, a, 0, 1, 2, 3), d = __builtin_shufflevector(a, a, 4, 5, 6, 7);
  f32x4 b = d > c ? d : c;
  float x = b[2] > b[0] ? b[2] : b[0], y = b[3] > b[1] ? b[3] : b[1];
  return y > x ? y : x;
}
LLMC_INLINE int32_t hsum(i32x16 v) {
  int32_t s = 0;
  for (int i = 0; i < kLanes; ++i) s += v[i];
  return s;
}

LLMC_INLINE f32x16 bf16_to_f32(u16x16 h) { return (f32x16)(__builtin_convertvector(h, u32x16) << 16); }

// Round to nearest even; a NaN stays a NaN.
LLMC_INLINE u16x16 f32_to_bf16(f32x16 x) {
  u32x16 bits = (u32x16)x;
  u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  u32x16 quiet = (bits >> 16) | 0x40;
  return __builtin_convertvector(x != x ? quiet : rounded, u16x16);
}

// Finite halves only (scales of weights). Without F16C: the exponent is moved by a multiplication, which is exact.
LLMC_INLINE f32x16 f16_to_f32(u16x16 h) {
#if defined(__F16C__) || defined(__AVX512F__) || defined(__aarch64__)
  typedef _Float16 f16x16 __attribute__((vector_size(32)));
  return __builtin_convertvector((f16x16)h, f32x16);
#else
  u32x16 bits = __builtin_convertvector(h, u32x16);
  f32x16 magnitude = (f32x16)((bits & 0x7fff) << 13) * 0x1p112f;
  return (f32x16)((u32x16)magnitude | ((bits & 0x8000) << 16));
#endif
}

}  // namespace llmc
