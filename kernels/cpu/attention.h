// Causal attention over the paged pool, with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022).
//
// A (token, query head) pair is a row. Positions are cut into ranges of 256; each range gives a row its own maximum,
// sum and weighted values, and the ranges are merged in ascending order. All that enters a row's result is fixed by
// its own position, so it has the same bits however the prompt was cut into chunks, whichever rows share a visit, and
// whether one thread does all ranges or many share them (FlashDecoding, Dao et al. 2023).
#pragma once
#include "attention_block.h"

namespace llmc {

// Memory for what threads that share a row leave to each other, aligned to 64. None: they share no rows.
struct AttentionScratch {
  void* p;
  int64_t bytes;
};

// Work items of a batch. An item is a block of tokens and a key/value head; of a sequence with one token, when its rows
// are shared, one range of that.
template <int HQ, int HKV, int D, Kv KV>
struct Attention {
  static constexpr int kBlock = attention_block<HQ, HKV, D>();
  using Block = AttentionBlock<HQ, HKV, D, KV>;
  using Partial = RunningSoftmax<HQ / HKV, D>;

  const Batch& batch;
  Mat q;
  const uint8_t* layer_base;
  AttentionParams p;
  Mat out;
  AttentionScratch scratch;

  struct Item {
    int sequence, head, begin, end;  // tokens
    Range ranges;                    // those it attends to
    int64_t partial;                 // index of its result in the scratch memory, -1: it is whole
  };

  LLMC_INLINE Range ranges_of(int begin, int end) const {
    return {first_visible(batch.positions[begin], p.window) / kRange, batch.positions[end - 1] / kRange + 1};
  }
  LLMC_INLINE Range pages_of(int begin, int end) const {
    return {first_visible(batch.positions[begin], p.window) / kPageSize, batch.positions[end - 1] / kPageSize + 1};
  }
  LLMC_INLINE bool one_token(int s) const { return batch.query_start[s + 1] - batch.query_start[s] == 1; }

  // The items in the order in which threads claim them: by sequence, then blocks, of a prompt the longest first, or
  // ranges, then heads.
  struct Items {
    const Attention& work;
    bool share;
    int sequence = 0, first = 0;  // the sequence's first item
    int64_t partial = 0;

    bool shared() const { return share && work.one_token(sequence); }
    Range tokens() const { return {work.batch.query_start[sequence], work.batch.query_start[sequence + 1]}; }

    // Ranges of a shared sequence, blocks of another.
    int parts() const {
      Range t = tokens(), ranges = shared() ? work.ranges_of(t.begin, t.end) : Range{0, 0};
      return shared() ? ranges.end - ranges.begin : (t.end - t.begin + kBlock - 1) / kBlock;
    }

    // Item `index`, which only grows from call to call. False: there is none.
    bool find(int index, Item& item) {
      for (; sequence < work.batch.num_seqs; ++sequence) {
        int count = parts() * HKV;
        if (index < first + count) {
          item = at((index - first) / HKV, (index - first) % HKV);
          return true;
        }
        first += count;
        if (shared()) partial += count;
      }
      return false;
    }

    Item at(int part, int head) const {
      Range t = tokens();
      if (shared()) {
        int range = work.ranges_of(t.begin, t.end).begin + part;
        return {sequence, head, t.begin, t.end, {range, range + 1}, partial + part * HKV + head};
      }
      int begin = t.begin + (parts() - 1 - part) * kBlock, end = begin + kBlock < t.end ? begin + kBlock : t.end;
      return {sequence, head, begin, end, work.ranges_of(begin, end), -1};
    }
  };

  // Whether sequences of one token are divided into ranges: when one of them would keep a thread busy for more than an
  // eighth of its time, and the memory is there. Every thread finds the same.
  bool shares_rows(int threads) const {
    int64_t total = 0, largest = 0, partials = 0;
    for (int s = 0; s < batch.num_seqs; ++s) {
      const int first = batch.query_start[s], last = batch.query_start[s + 1];
      for (int t = first; t < last; t += kBlock) {
        const int end = t + kBlock < last ? t + kBlock : last;
        const Range pages = pages_of(t, end);
        const int64_t cost = int64_t(pages.end - pages.begin + 1) * (end - t + 1);
        total += cost * HKV;
        if (!one_token(s)) continue;
        const Range ranges = ranges_of(t, end);
        partials += (ranges.end - ranges.begin) * HKV;
        if (ranges.end - ranges.begin > 1 && cost > largest) largest = cost;
      }
    }
    return threads > 1 && largest * threads * 8 > total && partials * (int64_t)sizeof(Partial) <= scratch.bytes;
  }

  typename Block::Sequence kv_of(const Item& item) const {
    return {layer_base, batch.block_tables + (int64_t)item.sequence * batch.block_table_stride, item.head};
  }
  typename Block::Keys first_keys(const Item& item) const {
    Range ranges{item.ranges.begin * kRangePages, item.ranges.end * kRangePages};
    return {kv_of(item), overlap(pages_of(item.begin, item.end), ranges)};
  }

  // Items in turn, each claimed by one thread. Short ones are claimed one ahead: what a thread reads next is fetched
  // into its cache meanwhile.
  void attend(Par par, bool share) const {
    Items items{*this, share};
    int index = 0;
    auto claim = [&](Item& item) { return items.find(par.nt > 1 ? par.claim(0, 1) : index++, item); };
    Item item, next;
    for (bool more = claim(item); more; item = next) {
      const bool ahead = item.end - item.begin == 1;
      if (ahead) more = claim(next);
      attend_item(item, ahead && more ? next : item);
      if (!ahead) more = claim(next);
    }
  }

  void attend_item(const Item& item, const Item& next) const {
    Block block;
    block.start(kv_of(item), batch, item.begin, item.end, q, p);
    for (int i = item.ranges.begin; i < item.ranges.end; ++i) {
      const typename Block::Keys after = i + 1 < item.ranges.end ? block.keys_of(i + 1) : first_keys(next);
      block.attend_range(i, p, after, [&](int r, int rows, const typename Block::TileSums& sums) {
        if (item.partial < 0)
          block.merge(i, r, rows, sums);
        else
          leave(sums, r, rows, item.partial);
      });
    }
    if (item.partial < 0) block.finish(out);
  }

  void leave(const typename Block::TileSums& sums, int r, int rows, int64_t at) const {
    Partial& partial = ((Partial*)scratch.p)[at];
    __builtin_memcpy(partial.max + r, sums.max, sizeof(float) * rows);
    __builtin_memcpy(partial.sum + r, sums.sum, sizeof(float) * rows);
    __builtin_memcpy(partial.acc[r], sums.acc, sizeof(sums.acc[0]) * rows);
  }

  // Shared rows, after a barrier: their ranges in order, each row in one thread.
  void merge(Par par) const {
    const Partial* partials = (const Partial*)scratch.p;
    for (int s = 0, row = 0; s < batch.num_seqs; ++s) {
      if (!one_token(s)) continue;
      const int t = batch.query_start[s];
      const Range ranges = ranges_of(t, t + 1);
      for (int head = 0; head < HKV; ++head, ++row) {
        if (row % par.nt != par.tid) continue;
        Block block;
        block.start(kv_of({s, head, t, t + 1, ranges, -1}), batch, t, t + 1, q, p);
        for (int i = ranges.begin; i < ranges.end; ++i)
          block.merge(i, 0, HQ / HKV, partials[(i - ranges.begin) * HKV + head]);
        block.finish(out);
      }
      partials += (ranges.end - ranges.begin) * HKV;
    }
  }
};

// q, out [T][HQ * D]; out is not q. Threads claim items in turn. Reads rows of other threads: a barrier stands before and
// after it. Sequences of one token that are few and long are shared by threads through `scratch`, with a barrier of its
// own.
template <int HQ, int HKV, int D, Kv KV>
inline void attention(Par par, const Batch& batch, Mat q, const uint8_t* layer_base, AttentionParams p, Mat out,
                      AttentionScratch scratch = {nullptr, 0}) {
  Attention<HQ, HKV, D, KV> work{batch, q, layer_base, p, out, scratch};
  bool share = work.shares_rows(par.nt);
  work.attend(par, share);
  if (!share) return;
  par.barrier();
  work.merge(par);
}

}  // namespace llmc
