// The softmax of attention over ranges of positions: weights of one range, and the merge of ranges in their order.
#pragma once
#include "vmath.h"

namespace llmc {

// The scores of one row over whole pages, in units of log2(e), become weights 2^(s - max), 0 outside the visible slots,
// which count from the first page. With softcap the scores come as they are. Scales by position, where they exist,
// multiply scores and weights, but not the sum.
template <class Scales>
LLMC_INLINE void softmax_range(float* scores, int first, int last, float softcap, Scales scales, float* max_score,
                                 float* sum) {
  f32x16 top = splat(-kInf);
  for (int at = first / kLanes * kLanes; at < last; at += kLanes) {
    f32x16 s = load<f32x16>(scores + at);
    const bool partial = at < first || at + kLanes > last;
    if constexpr (Scales::kExist) s *= scales.keys(at / kLanes);
    if (softcap > 0.0f) s = softcap * kLog2E * tanh(s / softcap);
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
    f32x16 w = exp2_of_negative(load<f32x16>(scores + at) - m);
    total += w;
    if constexpr (Scales::kExist) w *= scales.values(at / kLanes);
    store(scores + at, w);
  }
  *max_score = m;
  *sum = hsum(total);
}

// Running softmax of up to ROWS rows: maximum, in units of log2(e), and sum of weights, and the weighted values.
template <int ROWS, int D>
struct RunningSoftmax {
  static constexpr int kPadded = round_up(D, kLanes);
  alignas(64) float max[round_up(ROWS, kLanes) + kLanes];  // 16 lanes may be read from each row on
  float sum[round_up(ROWS, kLanes) + kLanes];
  alignas(64) float acc[ROWS][kPadded];
};

// Adds the rows 0 .. num_rows - 1 of a range to those of the total from `at` on; rows that saw nothing of it stay as they
// are. What lies behind the rows is read, but reaches none.
template <int ROWS, int RANGE_ROWS, int D, class Seen>
inline void merge_softmax(RunningSoftmax<ROWS, D>& total, int at, const RunningSoftmax<RANGE_ROWS, D>& range,
                          int num_rows, Seen seen) {
  for (int first = 0; first < num_rows; first += kLanes) {
    const float *old_sum = total.sum + at + first, *old = total.max + at + first;
    f32x16 old_max = load<f32x16>(old), range_max = load<f32x16>(range.max + first);
    f32x16 new_max = max(old_max, range_max);
    alignas(64) float keep[kLanes], take[kLanes], sum[kLanes], top[kLanes];
    f32x16 kept = exp2_of_negative(old_max - new_max), taken = exp2_of_negative(range_max - new_max);
    store(keep, kept), store(take, taken), store(top, new_max);
    store(sum, fma(load<f32x16>(old_sum), kept, load<f32x16>(range.sum + first) * taken));
    for (int i = 0; i < kLanes && first + i < num_rows; ++i) {
      if (!seen(first + i)) continue;
      int r = at + first + i;
      total.max[r] = top[i], total.sum[r] = sum[i];
      for (int d = 0; d < D; d += kLanes)
        store(&total.acc[r][d], fma(load<f32x16>(&total.acc[r][d]), splat(keep[i]),
                                    load<f32x16>(&range.acc[first + i][d]) * take[i]));
    }
  }
}

}  // namespace llmc
