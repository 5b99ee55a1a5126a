// Rotary position embedding. A pair is two halves' elements d and d + ROT/2 (GPT-NeoX, Llama) or two neighbours, 2d and
// 2d + 1, where it is interleaved (GPT-J, Cohere).
#pragma once
#include "mat.h"
#include "vmath.h"

namespace llmc {

// out[t] = scale * [cos(a_0) … cos(a_{ROT/2-1}), sin(a_0) …] with a_i = positions[t] * inv_freq[i] in float32, as the
// models were trained; sine and cosine of that are right to float rounding for positions up to 1e6. By token.
template <int ROT>
inline void rope_table(Par par, int num_tokens, const int32_t* positions, const float* inv_freq, float scale,
                       Mat out) {
  constexpr int kHalf = ROT / 2;
  Range r = tokens_of(par, num_tokens);
  for (int t = r.begin; t < r.end; ++t) {
    float position = (float)positions[t];
    for (int i = 0; i < kHalf; i += 8) {
      f64x8 angle{}, sine, cosine;
      int n = kHalf - i < 8 ? kHalf - i : 8;
      for (int j = 0; j < n; ++j) angle[j] = (double)(position * inv_freq[i + j]);
      sincos(angle, sine, cosine);
      for (int j = 0; j < n; ++j) {
        out.row(t)[i + j] = (float)cosine[j] * scale;
        out.row(t)[kHalf + i + j] = (float)sine[j] * scale;
      }
    }
  }
}

// The first n of 16 elements, which are 8 pairs of neighbours, rotated: a' = a c - b s, b' = b c + a s. n is even.
LLMC_INLINE void rotate_neighbours(const float* in, const float* cosines, const float* sines, float* to, int n) {
  f32x16 v = load_n(in, n), c = load_n(cosines, n / 2), s = load_n(sines, n / 2);
  c = __builtin_shufflevector(c, c, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  s = __builtin_shufflevector(s, s, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  f32x16 partner = __builtin_shufflevector(v, -v, 17, 0, 19, 2, 21, 4, 23, 6, 25, 8, 27, 10, 29, 12, 31, 14);
  store_n(to, fma(partner, s, v * c), n);
}

// Rotates the first ROT elements of each of H heads of D elements by the rows of `table`; the others are copied.
// out may be x. By token.
template <int H, int D, int ROT, bool INTERLEAVED>
inline void rope(Par par, int num_tokens, Mat x, Mat table, Mat out) {
  constexpr int kHalf = ROT / 2;
  Range r = tokens_of(par, num_tokens);
  for (int t = r.begin; t < r.end; ++t) {
    const float *cosines = table.row(t), *sines = cosines + kHalf;
    for (int h = 0; h < H; ++h) {
      const float* in = x.row(t) + h * D;
      float* to = out.row(t) + h * D;
      for (int i = 0; INTERLEAVED && i < ROT; i += kLanes) {
        rotate_neighbours(in + i, cosines + i / 2, sines + i / 2, to + i, ROT - i < kLanes ? ROT - i : kLanes);
      }
      for (int i = 0; !INTERLEAVED && i < kHalf; i += kLanes) {
        int n = kHalf - i < kLanes ? kHalf - i : kLanes;
        f32x16 a = load_n(in + i, n), b = load_n(in + kHalf + i, n);
        f32x16 c = load_n(cosines + i, n), s = load_n(sines + i, n);
        store_n(to + i, fma(-b, s, a * c), n);
        store_n(to + kHalf + i, fma(a, s, b * c), n);
      }
      if (in != to)
        for (int d = ROT; d < D; ++d) to[d] = in[d];
    }
  }
}

}  // namespace llmc
