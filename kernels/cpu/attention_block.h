// Attention of one block of rows: consecutive tokens of one sequence with all query heads of one key/value head.
//
// Range by range, each tile of rows takes scores, softmax and weighted values of the pages that it sees. Its weights stay
// in the first-level cache, the pages of the range in the second.
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

// The scales of an int8 range, by page from the first that is seen of it.
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
  using E = KvElement<KV>;
  using Sequence = KvSequence<HKV, D, KV>;
  using TileSums = RunningSoftmax<kTileRows, D>;

  struct Keys {
    Sequence kv;
    Range pages;
  };

  Sequence kv;
  int first_token, num_rows;
  Range visible[kRows];  // positions
  RunningSoftmax<kRows, D> total;
  alignas(64) float q[kRows][kPadded];  // scaled

  void start(const Sequence& pages, const Batch& batch, int begin, int end, Mat queries, const AttentionParams& p) {
    kv = pages, first_token = begin, num_rows = (end - begin) * kGroup;
    const float scale = p.softcap > 0.0f ? p.scale : p.scale * kLog2E;  // as softmax_range() takes scores
    for (int r = 0; r < num_rows; ++r) {
      int t = begin + r / kGroup, h = kv.head * kGroup + r % kGroup;
      visible[r] = {first_visible(batch.positions[t], p.window), batch.positions[t] + 1};
      const float* from = queries.row(t) + h * D;
      for (int d = 0; d < D; d += kLanes) store(q[r] + d, load_n(from + d, D - d < kLanes ? D - d : kLanes) * scale);
      total.max[r] = p.sinks != nullptr ? p.sinks[h] * kLog2E : -kInf;
      total.sum[r] = p.sinks != nullptr ? 1.0f : 0.0f;
      __builtin_memset(total.acc[r], 0, sizeof(total.acc[r]));
    }
  }

  // Pages of range i that some row sees.
  LLMC_INLINE Range pages_of(int i) const {
    Range all{visible[0].begin / kPageSize, (visible[num_rows - 1].end + kPageSize - 1) / kPageSize};
    return overlap(all, {i * kRangePages, (i + 1) * kRangePages});
  }
  LLMC_INLINE Keys keys_of(int i) const { return {kv, pages_of(i)}; }

  // Positions that row r sees of `pages`, from the start of these; begin >= end: none.
  LLMC_INLINE Range seen(int r, Range pages) const {
    int start = pages.begin * kPageSize;
    return overlap({visible[r].begin - start, visible[r].end - start}, {0, pages.end * kPageSize - start});
  }

  // The softmax of range i by itself, tile by tile: visit(r, rows, sums) is given the rows from r on. `after`: what is
  // read next.
  template <class Visit>
  void attend_range(int i, const AttentionParams& p, const Keys& after, Visit visit) const {
    Range pages = pages_of(i);
    int count = pages.end - pages.begin;
    const E* read[2 * kRangePages + kAheadPages];  // keys, values, the next keys
    for (int j = 0; j < count; ++j) {
      KvHead<D, KV> head = kv.page(pages.begin + j);
      read[j] = head.keys(), read[count + j] = head.values();
    }
    for (int j = 0, page = after.pages.begin; j < kAheadPages; ++j, page += page + 1 < after.pages.end)
      read[2 * count + j] = after.kv.page(page).keys();
    for (int r = 0, rows; r < num_rows; r += rows) {
      rows = tile_rows(num_rows - r);
      TileSums sums;
      by_rows<kTileRows>(rows, [&](auto tile) { attend_tile<tile.rows>(r, pages, read, p, sums); });
      visit(r, rows, sums);
    }
  }

  // Rows r .. r + ROWS - 1 over the pages of a range. Each row takes exactly the positions that it sees: there may be
  // anything in the others.
  template <int ROWS>
  LLMC_INLINE void attend_tile(int r, Range pages, PageList<E> read, const AttentionParams& p, TileSums& sums) const {
    alignas(64) float weights[ROWS][kLd];
    Range each[ROWS], common{0, kRange};
    for (int k = 0; k < ROWS; ++k) each[k] = seen(r + k, pages), common = overlap(common, each[k]);
    Range scored{each[0].begin / kPageSize, (each[ROWS - 1].end + kPageSize - 1) / kPageSize};
    score_pages<ROWS, D, kPadded, kLd>(q[r], read, scored, weights[0]);
    for (int k = 0; k < ROWS; ++k) {
      sums.max[k] = -kInf, sums.sum[k] = 0.0f;
      __builtin_memset(sums.acc[k], 0, sizeof(sums.acc[k]));
      if (each[k].begin < each[k].end) weigh_scores(weights[k], each[k], pages.begin, p, &sums.max[k], &sums.sum[k]);
    }
    PageList<E> values = read + (pages.end - pages.begin);
    auto alone = [&](int k, int begin, int end) {
      if (begin < end) weigh_values<1, D, kLd, kPadded>(weights[k], values, {begin, end}, sums.acc[k]);
    };
    bool shared = common.begin < common.end;
    for (int k = 0; k < ROWS; ++k) alone(k, each[k].begin, shared ? common.begin : each[k].end);
    if (!shared) return;
    weigh_values<ROWS, D, kLd, kPadded>(weights[0], values, common, sums.acc[0]);
    for (int k = 0; k < ROWS; ++k) alone(k, common.end, each[k].end);
  }

  LLMC_INLINE void weigh_scores(float* scores, Range seen, int first_page, const AttentionParams& p, float* max,
                                float* sum) const {
    if constexpr (KV == Kv::int8)
      softmax_range(scores, seen.begin, seen.end, p.softcap, RangeScales<Sequence>{kv, first_page}, max, sum);
    else
      softmax_range(scores, seen.begin, seen.end, p.softcap, NoScales{}, max, sum);
  }

  // Adds what the rows from r on took from range i.
  template <int ROWS>
  void merge(int i, int r, int rows, const RunningSoftmax<ROWS, D>& sums) {
    Range pages = pages_of(i);
    merge_softmax(total, r, sums, rows, [&](int k) {
      Range s = seen(r + k, pages);
      return s.begin < s.end;
    });
  }

  void finish(Mat out) const {
    for (int r = 0; r < num_rows; ++r) {
      float* to = out.row(first_token + r / kGroup) + (kv.head * kGroup + r % kGroup) * D;
      for (int d = 0; d < D; d += kLanes)
        store_n(to + d, in_order<E>(load<f32x16>(&total.acc[r][d])) / total.sum[r], D - d < kLanes ? D - d : kLanes);
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
