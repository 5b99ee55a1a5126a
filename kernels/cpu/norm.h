// RMS and layer normalisation of rows, or of H equal segments of each row (norms per attention head).
#pragma once
#include "mat.h"

namespace llmc {

// Sum over a row's C elements of f(x): one accumulator of 16 lanes, then the tree of hsum.
template <int C, class F>
LLMC_INLINE float lane_sum(const float* x, F f) {
  f32x16 sum{};
  for (int c = 0; c + kLanes <= C; c += kLanes) sum = f(load<f32x16>(x + c), sum);
  if constexpr (C % kLanes != 0) {
    constexpr int kTail = C / kLanes * kLanes;
    f32x16 zero{};
    f32x16 tail = f(load_n(x + kTail, C % kLanes), zero);
    sum += lane_ids() < C % kLanes ? tail : zero;
  }
  return hsum(sum);
}

// out[c] = f(x[c], c, lanes) over a row, by vectors; `lanes` of a vector are valid.
template <int C, class F>
LLMC_INLINE void map_row(const float* x, float* out, F f) {
  for (int c = 0; c + kLanes <= C; c += kLanes) store(out + c, f(load<f32x16>(x + c), c, kLanes));
  if constexpr (C % kLanes != 0) {
    constexpr int kTail = C / kLanes * kLanes, kLeft = C % kLanes;
    store_n(out + kTail, f(load_n(x + kTail, kLeft), kTail, kLeft), kLeft);
  }
}

// out = x / sqrt(mean(x^2) + eps) * w + residual, over each of H segments of C elements; w [C] and residual.p may be
// null. out may be x or the residual. By token.
template <int H, int C>
inline void rms_norm_add(Par par, int num_tokens, Mat x, const float* w, float eps, Mat residual, Mat out) {
  Range r = tokens_of(par, num_tokens);
  for (int t = r.begin; t < r.end; ++t) {
    for (int h = 0; h < H; ++h) {
      const float* in = x.row(t) + h * C;
      float squares = lane_sum<C>(in, [](f32x16 v, f32x16 acc) { return fma(v, v, acc); });
      float inverse = 1.0f / sqrt(squares / (float)C + eps);
      map_row<C>(in, out.row(t) + h * C, [&](f32x16 v, int c, int lanes) {
        f32x16 y = v * inverse;
        if (w != nullptr) y *= load_n(w + c, lanes);
        return residual.p == nullptr ? y : y + load_n(residual.row(t) + h * C + c, lanes);
      });
    }
  }
}

// out = x / sqrt(mean(x^2) + eps) * w. By token.
template <int H, int C>
inline void rms_norm(Par par, int num_tokens, Mat x, const float* w, float eps, Mat out) {
  rms_norm_add<H, C>(par, num_tokens, x, w, eps, Mat{nullptr, 0}, out);
}

// out = (x - mean) / sqrt(var + eps) * w + b, over each of H segments; w, b [C] may be null. out may be x. By token.
template <int H, int C>
inline void layer_norm(Par par, int num_tokens, Mat x, const float* w, const float* b, float eps, Mat out) {
  Range r = tokens_of(par, num_tokens);
  for (int t = r.begin; t < r.end; ++t) {
    for (int h = 0; h < H; ++h) {
      const float* in = x.row(t) + h * C;
      float mean = lane_sum<C>(in, [](f32x16 v, f32x16 acc) { return acc + v; }) / (float)C;
      float squares = lane_sum<C>(in, [=](f32x16 v, f32x16 acc) { return fma(v - mean, v - mean, acc); });
      float inverse = 1.0f / sqrt(squares / (float)C + eps);
      map_row<C>(in, out.row(t) + h * C, [&](f32x16 v, int c, int lanes) {
        f32x16 y = (v - mean) * inverse;
        if (w != nullptr) y *= load_n(w + c, lanes);
        return b == nullptr ? y : y + load_n(b + c, lanes);
      });
    }
  }
}

}  // namespace llmc
