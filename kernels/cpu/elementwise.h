// Elementwise operations and row gathers. All are by token (select_rows: by selected row). out may be an input.
#pragma once
#include "norm.h"
#include "vmath.h"

namespace llmc {

template <int C>
inline void add(Par par, int num_tokens, Mat a, Mat b, Mat out) {
  Range r = tokens_of(par, num_tokens);
  for (int t = r.begin; t < r.end; ++t)
    map_row<C>(a.row(t), out.row(t), [&](f32x16 v, int c, int lanes) { return v + load_n(b.row(t) + c, lanes); });
}

template <int C>
inline void mul(Par par, int num_tokens, Mat a, Mat b, Mat out) {
  Range r = tokens_of(par, num_tokens);
  for (int t = r.begin; t < r.end; ++t)
    map_row<C>(a.row(t), out.row(t), [&](f32x16 v, int c, int lanes) { return v * load_n(b.row(t) + c, lanes); });
}

// out = a + bias[c].
template <int C>
inline void add_bias(Par par, int num_tokens, Mat a, const float* bias, Mat out) {
  Range r = tokens_of(par, num_tokens);
  for (int t = r.begin; t < r.end; ++t)
    map_row<C>(a.row(t), out.row(t), [&](f32x16 v, int c, int lanes) { return v + load_n(bias + c, lanes); });
}

// out = x * s.
template <int C>
inline void scale(Par par, int num_tokens, Mat x, float s, Mat out) {
  Range r = tokens_of(par, num_tokens);
  for (int t = r.begin; t < r.end; ++t)
    map_row<C>(x.row(t), out.row(t), [&](f32x16 v, int, int) { return v * s; });
}

template <Act ACT, int C>
inline void act(Par par, int num_tokens, Mat x, Mat out) {
  Range r = tokens_of(par, num_tokens);
  for (int t = r.begin; t < r.end; ++t)
    map_row<C>(x.row(t), out.row(t), [&](f32x16 v, int, int) { return activate<ACT>(v); });
}

// out = act(gate) * up.
template <Act ACT, int C>
inline void gated_act(Par par, int num_tokens, Mat gate, Mat up, Mat out) {
  Range r = tokens_of(par, num_tokens);
  for (int t = r.begin; t < r.end; ++t)
    map_row<C>(gate.row(t), out.row(t),
               [&](f32x16 v, int c, int lanes) { return activate<ACT>(v) * load_n(up.row(t) + c, lanes); });
}

// out = x * act(gate[t]), one factor for each row.
template <Act ACT, int C>
inline void row_gate(Par par, int num_tokens, Mat x, Mat gate, Mat out) {
  Range r = tokens_of(par, num_tokens);
  for (int t = r.begin; t < r.end; ++t) {
    const f32x16 factor = activate<ACT>(splat(*gate.row(t)));
    map_row<C>(x.row(t), out.row(t), [&](f32x16 v, int, int) { return v * factor; });
  }
}

// out = cap * tanh(x / cap).
template <int C>
inline void softcap(Par par, int num_tokens, Mat x, float cap, Mat out) {
  Range r = tokens_of(par, num_tokens);
  for (int t = r.begin; t < r.end; ++t)
    map_row<C>(x.row(t), out.row(t), [&](f32x16 v, int, int) { return cap * tanh(v / cap); });
}

template <int C>
inline void copy(Par par, int num_tokens, Mat x, Mat out) {
  Range r = tokens_of(par, num_tokens);
  for (int t = r.begin; t < r.end; ++t) map_row<C>(x.row(t), out.row(t), [](f32x16 v, int, int) { return v; });
}

// out[i] = x[rows[i]]; out is not x. Reads rows of other threads: a barrier stands before it.
template <int C>
inline void select_rows(Par par, int num_rows, const int32_t* rows, Mat x, Mat out) {
  Range r = share_of(par, num_rows);
  for (int i = r.begin; i < r.end; ++i)
    map_row<C>(x.row(rows[i]), out.row(i), [](f32x16 v, int, int) { return v; });
}

}  // namespace llmc
