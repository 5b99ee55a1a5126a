// The softmax of attention over ranges of positions: weights of one range, and the merge of ranges in their order.
#pragma once
#include "vmath.h"

namespace llmc {

// exp(x) of x <= 0; exactly 0 below the normal numbers, and of -inf. A NaN stays a NaN.
LLMC_INLINE f32x16 exp_of_negative(f32x16 x) {
  const float lowest = -87.0f;
  i32x16 exponent;
  i32x16 p = (i32x16)exp_parts(x, exponent);
  return x < lowest ? splat(0.0f) : (f32x16)(p + (exponent << 23));  // a normal number times a power of two
}

// The scores of one row over whole pages become weights exp(s - max), 0 outside the visible slots, which count from the
// first page. Scales by position, where they exist, multiply scores and weights, but not the sum.
template <class Scales>
LLMC_INLINE void softmax_range(float* scores, int first, int last, float softcap, Scales scales, float* max_score,
                                 float* sum) {
  f32x16 top = splat(-kInf);
  for (int at = first / kLanes * kLanes; at < last; at += kLanes) {
    f32x16 s = load<f32x16>(scores + at);
    const bool partial = at < first || at + kLanes > last;
    if constexpr (Scales::kExist) s *= scales.keys(at / kLanes);
    if (softcap > 0.0f) s = softcap * tanh(s / softcap);
    if (partial) {
      i32x16 slot = lane_ids() + at;
      s = ((slot >= first) & (slot < last)) ? s : splat(-kInf);
    }
    if (Scales::kExist || softcap > 0.0f || partial) store(scores + at, s);
    top = max(s, top);
  }
  float m = hmax(top);
  f32x16 total{};
  for (int at = first / kLanes * kLanes; at < last; at += kLanes) {
    f32x16 w = exp_of_negative(load<f32x16>(scores + at) - m);
    total += w;
    if constexpr (Scales::kExist) w *= scales.values(at / kLanes);
    store(scores + at, w);
  }
  *max_score = m;
  *sum = hsum(total);
}

// Running softmax of up to ROWS rows: maximum and sum of weights, and the weighted values.
template <int ROWS, int D>
struct RunningSoftmax {
  static constexpr int kPadded = round_up(D, kLanes);
  alignas(64) float max[round_up(ROWS, kLanes)];
  float sum[round_up(ROWS, kLanes)];
  alignas(64) float acc[ROWS][kPadded];
};

// Adds a range to the total of num_rows rows; rows that saw nothing of it stay as they are. The padding of max and sum
// is read, but reaches no row.
template <int ROWS, int RANGE_ROWS, int D, class Seen>
inline void merge_softmax(RunningSoftmax<ROWS, D>& total, const RunningSoftmax<RANGE_ROWS, D>& range, int num_rows,
                          Seen seen) {
  for (int first = 0; first < num_rows; first += kLanes) {
    f32x16 old_max = load<f32x16>(total.max + first), range_max = load<f32x16>(range.max + first);
    f32x16 new_max = max(old_max, range_max);
    alignas(64) float keep[kLanes], take[kLanes], sum[kLanes], top[kLanes];
    f32x16 kept = exp_of_negative(old_max - new_max), taken = exp_of_negative(range_max - new_max);
    store(keep, kept), store(take, taken), store(top, new_max);
    store(sum, fma(load<f32x16>(total.sum + first), kept, load<f32x16>(range.sum + first) * taken));
    for (int i = 0; i < kLanes && first + i < num_rows; ++i) {
      int r = first + i;
      if (!seen(r)) continue;
      total.max[r] = top[i], total.sum[r] = sum[i];
      for (int d = 0; d < D; d += kLanes)
        store(&total.acc[r][d], fma(load<f32x16>(&total.acc[r][d]), splat(keep[i]),
                                    load<f32x16>(&range.acc[r][d]) * take[i]));
    }
  }
}

}  // namespace llmc
