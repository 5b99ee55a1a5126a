// Causal attention over the paged pool, with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022).
//
// A (token, query head) pair is a row. A row visits the pages from that of its first visible position to its own in
// ascending order, always whole pages at multiples of 16, so its operations depend on its position alone: not on how
// the prompt was cut into chunks or on which rows share a visit. A block of consecutive tokens of one sequence and all
// query heads of one key/value head pass over the pages together and share the loads.
#pragma once
#include "kv.h"
#include "vmath.h"

namespace llmc {

struct AttentionParams {
  float scale;         // of q . k
  int window;          // key j is visible to i if i - window < j <= i; 0: all j <= i
  float softcap;       // s = softcap * tanh(s / softcap) after scaling; 0: off
  const float* sinks;  // [HQ] an extra logit per head in the softmax's denominator, or null
};

// The rows of one block. All share the key/value head.
template <int ROWS, int D>
struct AttentionRows {
  static constexpr int kPadded = round_up(D, kLanes);
  const float* q[ROWS];
  float max[ROWS], sum[ROWS];
  alignas(64) float weights[ROWS][kPageSize];
  alignas(64) float acc[ROWS][kPadded];
};

LLMC_INLINE int first_visible(int position, int window) {
  return window > 0 && position - window + 1 > 0 ? position - window + 1 : 0;
}

// Logits of one page become weights; returns what the row's accumulated sums must be multiplied by.
LLMC_INLINE float softmax_step(f32x16 s, int begin, int end, const AttentionParams& p, float& max, float& sum,
                               float* weights) {
  s *= p.scale;
  if (p.softcap > 0.0f) s = p.softcap * tanh(s / p.softcap);
  i32x16 lane = lane_ids();
  s = ((lane >= begin) & (lane < end)) ? s : splat(-kInf);
  float page_max = hmax(s), new_max = page_max > max ? page_max : max;
  float correction = exp(splat(max - new_max))[0];
  f32x16 w = exp(s - new_max);
  store(weights, w);
  sum = fma(splat(sum), splat(correction), splat(hsum(w)))[0];
  max = new_max;
  return correction;
}

// RB rows from `first` visit one page, of which they see the slots begin .. end - 1.
template <int RB, int ROWS, int D, class E>
inline void visit_page(AttentionRows<ROWS, D>& rows, int first, const E* keys, int begin, int end,
                       const AttentionParams& p) {
  f32x16 s[RB];
  float correction[RB];
  for (int r = 0; r < RB; ++r) s[r] = f32x16{};
  for (int d = 0; d < D; ++d) {
    f32x16 k = kv_load_n(keys + d * kPageSize, kLanes);
    for (int r = 0; r < RB; ++r) s[r] = fma(splat(rows.q[first + r][d]), k, s[r]);
  }
  for (int r = 0; r < RB; ++r)
    correction[r] = softmax_step(s[r], begin, end, p, rows.max[first + r], rows.sum[first + r],
                                 rows.weights[first + r]);
  const E* values = keys + kPageSize * D;
  for (int d = 0; d < D; d += kLanes) {
    int n = D - d < kLanes ? D - d : kLanes;
    f32x16 acc[RB];
    for (int r = 0; r < RB; ++r) acc[r] = load<f32x16>(&rows.acc[first + r][d]) * correction[r];
    for (int j = begin; j < end; ++j) {
      f32x16 v = kv_load_n(values + j * D + d, n);
      for (int r = 0; r < RB; ++r) acc[r] = fma(splat(rows.weights[first + r][j]), v, acc[r]);
    }
    for (int r = 0; r < RB; ++r) store(&rows.acc[first + r][d], acc[r]);
  }
}

template <int RB, int ROWS, int D, class E>
LLMC_INLINE void visit_page_by(int count, AttentionRows<ROWS, D>& rows, int first, const E* keys, int begin, int end,
                               const AttentionParams& p) {
  if constexpr (RB > 0) {
    if (count == RB) return visit_page<RB>(rows, first, keys, begin, end, p);
    visit_page_by<RB - 1>(count, rows, first, keys, begin, end, p);
  }
}

constexpr int kAttentionRows = 4;  // rows that share the loads of a page

template <int HQ, int HKV>
constexpr int attention_block() {  // tokens in a block
  return HQ / HKV >= 16 ? 1 : 16 / (HQ / HKV);
}

// Tokens begin .. end - 1 (at most attention_block of them) of one sequence, one key/value head.
template <int HQ, int HKV, int D, Kv KV>
inline void attend_block(const int32_t* pages, const int32_t* positions, int begin, int end, int head, Mat q,
                         const uint8_t* layer_base, const AttentionParams& p, Mat out) {
  constexpr int G = HQ / HKV, kRows = attention_block<HQ, HKV>() * G;
  AttentionRows<kRows, D> rows;
  int num_rows = (end - begin) * G;
  for (int r = 0; r < num_rows; ++r) {
    int h = head * G + r % G;
    rows.q[r] = q.row(begin + r / G) + h * D;
    rows.max[r] = p.sinks != nullptr ? p.sinks[h] : -kInf;
    rows.sum[r] = p.sinks != nullptr ? 1.0f : 0.0f;
    __builtin_memset(rows.acc[r], 0, sizeof(rows.acc[r]));
  }
  int last_page = positions[end - 1] / kPageSize;
  for (int page = first_visible(positions[begin], p.window) / kPageSize; page <= last_page; ++page) {
    const KvElement<KV>* keys = kv_head<HKV, D, KV>(layer_base, pages[page], head);
    auto visible = [&](int r) -> Range {
      int position = positions[begin + r / G], base = page * kPageSize;
      int from = first_visible(position, p.window) - base, to = position + 1 - base;
      return {from < 0 ? 0 : from, to > kPageSize ? kPageSize : to};
    };
    for (int r = 0; r < num_rows;) {
      Range slots = visible(r);
      int count = 1;
      while (count < kAttentionRows && r + count < num_rows) {
        Range next = visible(r + count);
        if (next.begin != slots.begin || next.end != slots.end) break;
        ++count;
      }
      if (slots.begin < slots.end)
        visit_page_by<kAttentionRows>(count, rows, r, keys, slots.begin, slots.end, p);
      r += count;
    }
  }
  for (int r = 0; r < num_rows; ++r) {
    float* to = out.row(begin + r / G) + (head * G + r % G) * D;
    for (int d = 0; d < D; d += kLanes)
      store_n(to + d, load<f32x16>(&rows.acc[r][d]) / rows.sum[r], D - d < kLanes ? D - d : kLanes);
  }
}

// q, out [T][HQ * D]; out is not q. Work items (block of tokens, key/value head) go to threads by their estimated cost;
// an item is whole in one thread. Reads rows of other threads: a barrier stands before and after it.
template <int HQ, int HKV, int D, Kv KV>
inline void attention(Par par, const Batch& batch, Mat q, const uint8_t* layer_base, AttentionParams p, Mat out) {
  constexpr int kBlock = attention_block<HQ, HKV>();
  auto each_block = [&](auto visit) {
    for (int s = 0; s < batch.num_seqs; ++s)
      for (int t = batch.query_start[s]; t < batch.query_start[s + 1]; t += kBlock) {
        int end = t + kBlock < batch.query_start[s + 1] ? t + kBlock : batch.query_start[s + 1];
        int first = first_visible(batch.positions[t], p.window);
        int64_t pages = batch.positions[end - 1] / kPageSize - first / kPageSize + 1;
        visit(s, t, end, (pages + 1) * (end - t));
      }
  };
  int64_t total = 0, done = 0;
  each_block([&](int, int, int, int64_t cost) { total += cost * HKV; });
  each_block([&](int s, int t, int end, int64_t cost) {
    for (int head = 0; head < HKV; ++head, done += cost)
      if (done * par.nt / total == par.tid)
        attend_block<HQ, HKV, D, KV>(batch.block_tables + (int64_t)s * batch.block_table_stride, batch.positions, t,
                                     end, head, q, layer_base, p, out);
  });
}

}  // namespace llmc
