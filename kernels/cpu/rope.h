// Rotary position embedding of the "half" kind (GPT-NeoX, Llama): element d pairs with d + ROT/2.
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

// Rotates the first ROT elements of each of H heads of D elements by the rows of `table`; the others are copied.
// out may be x. By token.
template <int H, int D, int ROT>
inline void rope(Par par, int num_tokens, Mat x, Mat table, Mat out) {
  constexpr int kHalf = ROT / 2;
  Range r = tokens_of(par, num_tokens);
  for (int t = r.begin; t < r.end; ++t) {
    const float *cosines = table.row(t), *sines = cosines + kHalf;
    for (int h = 0; h < H; ++h) {
      const float* in = x.row(t) + h * D;
      float* to = out.row(t) + h * D;
      for (int i = 0; i < kHalf; i += kLanes) {
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
