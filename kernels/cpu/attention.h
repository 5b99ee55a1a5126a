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
    int sequence, begin, end;  // tokens
    Range ranges;              // those it attends to
    int64_t cost, partial;     // partial: index of its first result in the scratch memory, -1: it is whole
  };

  LLMC_INLINE Range ranges_of(int begin, int end) const {
    return {first_visible(batch.positions[begin], p.window) / kRange, batch.positions[end - 1] / kRange + 1};
  }
  LLMC_INLINE int64_t pages_of(int begin, int end, int range) const {
    Range pages{first_visible(batch.positions[begin], p.window) / kPageSize,
                batch.positions[end - 1] / kPageSize + 1};
    if (range >= 0) pages = overlap(pages, {range * kRangePages, (range + 1) * kRangePages});
    return pages.end - pages.begin;
  }

  // Items by sequence, token and range; each stands for all heads. Threads claim them in this order: of a prompt the
  // longest come first.
  template <class Visit>
  LLMC_INLINE void each_item(bool share, Visit visit) const {
    int64_t partial = 0;
    for (int s = 0; s < batch.num_seqs; ++s) {
      int first = batch.query_start[s], last = batch.query_start[s + 1];
      if (share && last - first == 1) {
        Range ranges = ranges_of(first, last);
        for (int i = ranges.begin; i < ranges.end; ++i, partial += HKV)
          visit(Item{s, first, last, {i, i + 1}, (pages_of(first, last, i) + 1) * 2, partial});
      } else {
        const int blocks = (last - first + kBlock - 1) / kBlock;
        for (int i = blocks - 1; i >= 0; --i) {
          int t = first + i * kBlock;
          int end = t + kBlock < last ? t + kBlock : last;
          visit(Item{s, t, end, ranges_of(t, end), (pages_of(t, end, -1) + 1) * (end - t + 1), -1});
        }
      }
    }
  }

  // Whether sequences of one token are divided into ranges: when one of them would keep a thread busy for more than an
  // eighth of its time, and the memory is there. Every thread finds the same.
  bool shares_rows(int threads) const {
    int64_t total = 0, largest = 0, partials = 0;
    each_item(false, [&](const Item& i) {
      total += i.cost * HKV;
      if (batch.query_start[i.sequence + 1] - batch.query_start[i.sequence] != 1) return;
      partials += (i.ranges.end - i.ranges.begin) * HKV;
      if (i.ranges.end - i.ranges.begin > 1 && i.cost > largest) largest = i.cost;
    });
    return threads > 1 && largest * threads * 8 > total && partials * (int64_t)sizeof(Partial) <= scratch.bytes;
  }

  void start(Block& block, const Item& item, int head) const {
    const int32_t* pages = batch.block_tables + (int64_t)item.sequence * batch.block_table_stride;
    block.start({layer_base, pages, head}, batch, item.begin, item.end, q, p);
  }

  // Items in turn, each claimed by one thread.
  void attend(Par par, bool share) const {
    int next = par.nt > 1 ? par.claim(0, 1) : 0, index = 0;
    each_item(share, [&](const Item& item) {
      for (int head = 0; head < HKV; ++head, ++index) {
        if (index != next) continue;
        Block block;
        start(block, item, head);
        for (int i = item.ranges.begin; i < item.ranges.end; ++i) {
          block.attend_range(i, p);
          if (item.partial < 0) block.merge(i, block.range);
        }
        if (item.partial < 0)
          block.finish(out);
        else
          leave(block.range, item.partial + head);
        next = par.nt > 1 ? par.claim(0, 1) : next + 1;
      }
    });
  }

  void leave(const typename Block::Sums& range, int64_t at) const {
    Partial& partial = ((Partial*)scratch.p)[at];
    for (int r = 0; r < HQ / HKV; ++r) {
      partial.max[r] = range.max[r], partial.sum[r] = range.sum[r];
      __builtin_memcpy(partial.acc[r], range.acc[r], sizeof(partial.acc[r]));
    }
  }

  // Shared rows, after a barrier: their ranges in order, each row in one thread.
  void merge(Par par) const {
    int64_t row = 0;
    each_item(true, [&](const Item& item) {
      if (item.partial < 0 || item.ranges.begin != ranges_of(item.begin, item.end).begin) return;
      for (int head = 0; head < HKV; ++head, ++row) {
        if (row % par.nt != par.tid) continue;
        Block block;
        start(block, item, head);
        const Partial* partials = (const Partial*)scratch.p + item.partial + head;
        Range ranges = block.ranges();
        for (int i = ranges.begin; i < ranges.end; ++i) block.merge(i, partials[(i - ranges.begin) * HKV]);
        block.finish(out);
      }
    });
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
