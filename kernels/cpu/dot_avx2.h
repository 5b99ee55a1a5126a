// Integer dot products of one group in AVX2; dot.h says what each file of this kind defines. A piece is a whole tile.
//
// W8: vpmaddwd on 16-bit numbers, which cannot saturate (vpmaddubsw on bytes would): 32 multiply-adds take two
// multiplications and two additions, as with bytes, and no sign has to be moved. The bytes of the weights are used as
// unsigned numbers, the even and the odd ones of a lane in turn; quantize has widened the inputs, in that order.
// W4: vpmaddubsw, as 15 * 127 * 2 is far from the limit of 16 bits, and so is the sum of a whole group: 16 products
// fall on each half of a lane.
//
// The multiply-adds are written in assembly: the compiler would regroup the additions, and spill what that takes.
#pragma once
#include "quantize.h"

namespace llmc {

typedef i32x16 SumLanes;
typedef f32x16 FloatLanes;
constexpr int kAbreast = 1;
typedef i32x8 Halves[2];  // lanes 0 .. 7 and 8 .. 15

LLMC_INLINE SumLanes join(const Halves& h) {
  return __builtin_shufflevector(h[0], h[1], 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

// A load that stays where it is written, so that what it feeds needs a register for a short time only.
LLMC_INLINE __m256i load_here(const uint8_t* p) {
  __m256i v;
  __asm__ volatile("vmovdqu %1, %0" : "=x"(v) : "m"(*(const __m256i_u*)p));
  return v;
}

// sum += w . x for both halves; x is two 16-bit numbers (W8) or four bytes (W4).
#define LLMC_MULTIPLY_ADD(name, multiply, add)                                      \
  LLMC_INLINE void name(Halves& sum, __m256i w0, __m256i w1, const int8_t* x) {     \
    struct Quad { char bytes[4]; };                                                 \
    __m256i a, b;                                                                   \
    __asm__ volatile("vpbroadcastd %[x], %[a]\n\t" multiply " %[a], %[w0], %[b]\n\t" \
                     multiply " %[a], %[w1], %[a]\n\t" add " %[b], %[s0], %[s0]\n\t" \
                     add " %[a], %[s1], %[s1]"                                      \
                     : [s0] "+x"(sum[0]), [s1] "+x"(sum[1]), [a] "=&x"(a), [b] "=&x"(b) \
                     : [w0] "x"(w0), [w1] "x"(w1), [x] "m"(*(const Quad*)x));       \
  }
LLMC_MULTIPLY_ADD(multiply_add_16, "vpmaddwd", "vpaddd")
LLMC_MULTIPLY_ADD(multiply_add_8, "vpmaddubsw", "vpaddw")
#undef LLMC_MULTIPLY_ADD

template <int TT>
LLMC_INLINE void dot_group_w8(const uint8_t* w, int64_t, int, const int8_t* x, int stride, const int32_t* xsum,
                              int sum_stride, SumLanes (&sums)[1][TT]) {
  const __m256i low = _mm256_set1_epi16(0xff);
  Halves acc[TT];
  for (int t = 0; t < TT; ++t) acc[t][0] = acc[t][1] = i32x8{} + xsum[t * sum_stride];
#pragma clang loop unroll(full)
  for (int j = 0; j < 8; ++j, w += 64, x += 8) {
    __m256i w0 = _mm256_and_si256(load_here(w), low), w1 = _mm256_and_si256(load_here(w + 32), low);
    for (int t = 0; t < TT; ++t) multiply_add_16(acc[t], w0, w1, x + t * stride);
    w0 = _mm256_srli_epi16(load_here(w), 8), w1 = _mm256_srli_epi16(load_here(w + 32), 8);
    for (int t = 0; t < TT; ++t) multiply_add_16(acc[t], w0, w1, x + t * stride + 4);
  }
  for (int t = 0; t < TT; ++t) sums[0][t] = join(acc[t]);
}

template <int TT>
LLMC_INLINE void dot_group_w4(const uint8_t* w, int64_t, int, const int8_t* x, int stride,
                              SumLanes (&sums)[1][TT]) {
  const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  Halves acc[TT] = {};
#pragma clang loop unroll(full)
  for (int j = 0; j < 4; ++j, w += 64, x += 4) {
    __m256i w0 = _mm256_and_si256(load_here(w), nibble), w1 = _mm256_and_si256(load_here(w + 32), nibble);
    for (int t = 0; t < TT; ++t) multiply_add_8(acc[t], w0, w1, x + t * stride);
    w0 = _mm256_and_si256(_mm256_srli_epi16(load_here(w), 4), nibble);
    w1 = _mm256_and_si256(_mm256_srli_epi16(load_here(w + 32), 4), nibble);
    for (int t = 0; t < TT; ++t) multiply_add_8(acc[t], w0, w1, x + t * stride + 16);
  }
  for (int t = 0; t < TT; ++t) {
    for (auto& half : acc[t]) half = (i32x8)_mm256_madd_epi16((__m256i)half, ones);
    sums[0][t] = join(acc[t]);
  }
}

}  // namespace llmc
