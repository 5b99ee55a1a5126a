// What kernels pass to each other, and how they divide work.
//
// Two partitions exist. "By token": thread tid does rows tokens_of(par, T), by the same formula in every such kernel,
// so kernels of this kind that follow each other on the same rows need no barrier between them. "By column": a thread
// does whole tiles of 16 output columns for all rows, those of its share and then what others have not begun. After a
// kernel by column, and before one, stands a barrier.
//
// Determinism: an element of an output is computed by one thread, by one sequence of floating-point operations that
// depends on its own row alone, never on T, on the thread count or on the tile it fell into.
#pragma once
#include "pool.h"
#include "simd.h"

namespace llmc {

// A row-major float32 matrix; row t starts at p + t * ld.
struct Mat {
  float* p;
  int ld;
  LLMC_INLINE float* row(int t) const { return p + (int64_t)t * ld; }
};

struct Range {
  int begin, end;
};

LLMC_INLINE Range share_of(Par par, int n) {
  return {(int)((int64_t)n * par.tid / par.nt), (int)((int64_t)n * (par.tid + 1) / par.nt)};
}
LLMC_INLINE Range tokens_of(Par par, int num_tokens) { return share_of(par, num_tokens); }

constexpr int kHelped = 8;  // so many threads at most are helped by one: asking for work takes time, too

// Calls work(range) for pieces of 0 .. n - 1 of at most `size`: those of the thread's own share, in order, and then what
// the threads after it have not claimed. Once between two barriers.
template <class Work>
LLMC_INLINE void share_pieces(Par par, int n, int size, Work work) {
  if (par.nt == 1) {
    for (int i = 0; i < n; i += size) work(Range{i, i + size < n ? i + size : n});
    return;
  }
  for (int i = 0; i < par.nt && i <= kHelped; ++i) {
    int owner = (par.tid + i) % par.nt;
    Range share = share_of({owner, par.nt, par.pool}, n);
    while (true) {
      int begin = share.begin + par.claim(owner, size), end = begin + size;
      if (begin >= share.end) break;
      work(Range{begin, end < share.end ? end : share.end});
    }
  }
}

}  // namespace llmc
