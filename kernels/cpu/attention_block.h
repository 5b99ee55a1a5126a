// Attention of one block of rows: consecutive tokens of one sequence with all query heads of one key/value head.
//
// The rows pass over the pages together, range by range: scores, softmax, weighted values. What many rows read is
// converted to float32 once per group of pages.
#pragma once
#include "attention_tile.h"
#include "softmax.h"

namespace llmc {

struct AttentionParams {
  float scale;         // of q . k
  int window;          // key j is visible to i if i - window < j <= i; 0: all j <= i
  float softcap;       // s = softcap * tanh(s / softcap) after scaling; 0: off
  const float* sinks;  // [HQ] an extra logit per head in the softmax's denominator, or null
};

constexpr int kRangePages = 16;
constexpr int kRange = kRangePages * kPageSize;  // positions; a part of the arithmetic

LLMC_INLINE int first_visible(int position, int window) {
  return window > 0 && position - window + 1 > 0 ? position - window + 1 : 0;
}
LLMC_INLINE Range overlap(Range a, Range b) {
  return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

// Tokens in a block: about 60 rows, fewer of large heads so that they stay in the second-level cache.
template <int HQ, int HKV, int D>
constexpr int attention_block() {
  constexpr int kRows = D <= 128 ? 60 : 60 * 128 / D;
  return HQ / HKV >= kRows ? 1 : kRows / (HQ / HKV);
}

// The pages of one sequence and key/value head.
template <int HKV, int D, Kv KV>
struct KvSequence {
  const uint8_t* layer_base;
  const int32_t* pages;
  int head;
  LLMC_INLINE KvHead<D, KV> page(int i) const { return kv_head<HKV, D, KV>(layer_base, pages[i], head); }
};

// The scales of an int8 range, by page.
template <class Sequence>
struct RangeScales {
  static constexpr bool kExist = true;
  const Sequence& kv;
  int first;
  LLMC_INLINE f32x16 keys(int page) const { return load<f32x16>(kv.page(first + page).key_scales()); }
  LLMC_INLINE f32x16 values(int page) const { return load<f32x16>(kv.page(first + page).value_scales()); }
};
struct NoScales {
  static constexpr bool kExist = false;
};

// Tokens begin .. end - 1 of a batch, of one sequence, with the query heads of one key/value head.
template <int HQ, int HKV, int D, Kv KV>
struct AttentionBlock {
  static constexpr int kGroup = HQ / HKV, kRows = attention_block<HQ, HKV, D>() * kGroup;
  static constexpr int kPadded = round_up(D, kLanes);
  static constexpr int kLd = kRange + kLanes;  // rows do not fall on the same lines of the cache
  static constexpr int kDirectRows = 2 * kTileRows;  // up to so many rows read the pages as they are
  using Sums = RunningSoftmax<kRows, D>;
  using E = KvElement<KV>;

  KvSequence<HKV, D, KV> kv;
  int first_token, num_rows;
  Range visible[kRows];  // positions
  Sums range, total;
  alignas(64) float q[kRows][kPadded];  // scaled
  alignas(64) float weights[kRows][kLd];
  alignas(64) float converted[kGroupPages * kPageSize * kPadded];

  void start(const KvSequence<HKV, D, KV>& pages, const Batch& batch, int begin, int end, Mat queries,
             const AttentionParams& p) {
    kv = pages, first_token = begin, num_rows = (end - begin) * kGroup;
    for (int r = 0; r < num_rows; ++r) {
      int t = begin + r / kGroup, h = kv.head * kGroup + r % kGroup;
      visible[r] = {first_visible(batch.positions[t], p.window), batch.positions[t] + 1};
      const float* from = queries.row(t) + h * D;
      for (int d = 0; d < D; d += kLanes) store(q[r] + d, load_n(from + d, D - d < kLanes ? D - d : kLanes) * p.scale);
      total.max[r] = p.sinks != nullptr ? p.sinks[h] : -kInf;
      total.sum[r] = p.sinks != nullptr ? 1.0f : 0.0f;
      __builtin_memset(total.acc[r], 0, sizeof(total.acc[r]));
    }
  }

  // Positions of range i that row r sees, from the range's start; begin >= end: none.
  LLMC_INLINE Range seen(int r, int i) const {
    return overlap({visible[r].begin - i * kRange, visible[r].end - i * kRange}, {0, kRange});
  }

  // A group of pages as they are: keys or values of `pages`, with those of `ahead` behind them.
  template <bool KEYS>
  void locate(Range pages, const E** to) const {
    for (int i = 0; i < kGroupPages; ++i) {
      KvHead<D, KV> page = kv.page(pages.begin + i < pages.end ? pages.begin + i : pages.end - 1);
      to[i] = KEYS ? page.keys() : page.values();
    }
  }

  // The same converted to float32.
  template <bool KEYS>
  void convert(Range pages, PageGroup<float>& group) {
    for (int i = 0; i < pages.end - pages.begin; ++i) {
      const E* from = KEYS ? kv.page(pages.begin + i).keys() : kv.page(pages.begin + i).values();
      float* page = converted + i * kPageSize * kPadded;
      group.pages[i] = group.ahead[i] = page;
      if constexpr (KEYS) {
        for (int d = 0; d < D; ++d) store(page + d * kPageSize, kv_load_n(from + d * kPageSize, kPageSize));
      } else {
        for (int j = 0; j < kPageSize; ++j)
          for (int d = 0; d < D; d += kLanes)
            store(page + j * kPadded + d, kv_load_n(from + j * D + d, D - d < kLanes ? D - d : kLanes));
      }
    }
  }

  // Scores of all rows with a group of `count` pages, `at` pages from the start of range i.
  template <bool DIRECT, class P>
  void score_group(int i, int at, int count, const PageGroup<P>& keys) {
    for (int r = 0, rows; r < num_rows; r += rows) {
      rows = tile_rows(num_rows - r);
      Range pages{seen(r, i).begin / kPageSize - at, (seen(r + rows - 1, i).end + kPageSize - 1) / kPageSize - at};
      pages = overlap(pages, {0, count});
      by_rows<kTileRows>(rows, [&](auto tile) {
        score_pages<DIRECT, tile.rows, D, kPadded, kLd>(q[r], keys, pages, weights[r] + at * kPageSize);
      });
    }
  }

  // Weighted values of all rows over a group. Each row takes exactly the positions that it sees: there may be anything
  // in the others.
  template <bool DIRECT, class P>
  void weigh_group(int i, int at, int count, const PageGroup<P>& values) {
    constexpr int LD = DIRECT ? D : kPadded;
    auto seen_here = [&](int r) {
      Range s = seen(r, i);
      return overlap({s.begin - at * kPageSize, s.end - at * kPageSize}, {0, count * kPageSize});
    };
    auto alone = [&](int r, int begin, int end) {
      if (begin < end)
        weigh_values<DIRECT, 1, D, LD, kLd, kPadded>(weights[r] + at * kPageSize, values, {begin, end}, range.acc[r]);
    };
    for (int r = 0, rows; r < num_rows; r += rows) {
      rows = tile_rows(num_rows - r);
      Range common{0, count * kPageSize};
      for (int k = r; k < r + rows; ++k) common = overlap(common, seen_here(k));
      bool shared = common.begin < common.end;
      for (int k = r; k < r + rows; ++k) alone(k, seen_here(k).begin, shared ? common.begin : seen_here(k).end);
      if (!shared) continue;
      by_rows<kTileRows>(rows, [&](auto tile) {
        weigh_values<DIRECT, tile.rows, D, LD, kLd, kPadded>(weights[r] + at * kPageSize, values, common,
                                                             range.acc[r]);
      });
      for (int k = r; k < r + rows; ++k) alone(k, common.end, seen_here(k).end);
    }
  }

  // Pages that some row sees.
  LLMC_INLINE Range all_pages() const {
    return {visible[0].begin / kPageSize, (visible[num_rows - 1].end + kPageSize - 1) / kPageSize};
  }

  // What is read after the values of a range's last group: the keys of the next range, or of the next head.
  void locate_next(int page, const E** to) const {
    Range pages = all_pages();
    if (page < pages.end) return locate<true>({page, pages.end}, to);
    KvSequence<HKV, D, KV> next{kv.layer_base, kv.pages, kv.head + 1 < HKV ? kv.head + 1 : kv.head};
    for (int i = 0; i < kGroupPages; ++i)
      to[i] = next.page(pages.begin + i < pages.end ? pages.begin + i : pages.end - 1).keys();
  }

  // Many rows, one visit: pages are converted first. Few: they are read as they are.
  LLMC_INLINE bool direct() const { return KV == Kv::f32 || num_rows <= kDirectRows; }

  void score_pages_of(int i, Range pages) {
    for (int at = pages.begin; at < pages.end; at += kGroupPages) {
      Range group = overlap({at, at + kGroupPages}, pages);
      int from = at - i * kRangePages, count = group.end - at;
      if (direct()) {
        PageGroup<E> keys;
        locate<true>(group, keys.pages);
        if (group.end < pages.end)
          locate<true>({group.end, pages.end}, keys.ahead);
        else
          locate<false>(pages, keys.ahead);
        score_group<true>(i, from, count, keys);
      } else if constexpr (KV != Kv::f32) {
        PageGroup<float> keys;
        convert<true>(group, keys);
        score_group<false>(i, from, count, keys);
      }
    }
  }

  void weigh_pages_of(int i, Range pages) {
    for (int at = pages.begin; at < pages.end; at += kGroupPages) {
      Range group = overlap({at, at + kGroupPages}, pages);
      int from = at - i * kRangePages, count = group.end - at;
      if (direct()) {
        PageGroup<E> values;
        locate<false>(group, values.pages);
        if (group.end < pages.end)
          locate<false>({group.end, pages.end}, values.ahead);
        else
          locate_next(pages.end, values.ahead);
        weigh_group<true>(i, from, count, values);
      } else if constexpr (KV != Kv::f32) {
        PageGroup<float> values;
        convert<false>(group, values);
        weigh_group<false>(i, from, count, values);
      }
    }
  }

  // The softmax of range i by itself, into `range`.
  void attend_range(int i, const AttentionParams& p) {
    Range pages = overlap(all_pages(), {i * kRangePages, (i + 1) * kRangePages});
    score_pages_of(i, pages);
    for (int r = 0; r < num_rows; ++r) {
      Range s = seen(r, i);
      range.max[r] = -kInf, range.sum[r] = 0.0f;
      __builtin_memset(range.acc[r], 0, sizeof(range.acc[r]));
      if (s.begin >= s.end) continue;
      if constexpr (KV == Kv::int8) {
        RangeScales<KvSequence<HKV, D, KV>> scales{kv, i * kRangePages};
        softmax_range(weights[r], s.begin, s.end, p.softcap, scales, &range.max[r], &range.sum[r]);
      } else {
        softmax_range(weights[r], s.begin, s.end, p.softcap, NoScales{}, &range.max[r], &range.sum[r]);
      }
    }
    weigh_pages_of(i, pages);
  }

  template <int ROWS>
  void merge(int i, const RunningSoftmax<ROWS, D>& of_range) {
    merge_softmax(total, of_range, num_rows, [&](int r) { return seen(r, i).begin < seen(r, i).end; });
  }

  LLMC_INLINE Range ranges() const {
    return {visible[0].begin / kRange, (visible[num_rows - 1].end + kRange - 1) / kRange};
  }

  void finish(Mat out) const {
    for (int r = 0; r < num_rows; ++r) {
      float* to = out.row(first_token + r / kGroup) + (kv.head * kGroup + r % kGroup) * D;
      for (int d = 0; d < D; d += kLanes)
        store_n(to + d, load<f32x16>(&total.acc[r][d]) / total.sum[r], D - d < kLanes ? D - d : kLanes);
    }
  }

  template <int ROWS>
  struct Tile {
    static constexpr int rows = ROWS;
  };
  template <int ROWS, class Visit>
  LLMC_INLINE static void by_rows(int rows, Visit visit) {
    if constexpr (ROWS > 0) {
      if (rows == ROWS) return visit(Tile<ROWS>{});
      by_rows<ROWS - 1>(rows, visit);
    }
  }
};

}  // namespace llmc
