// The paged key/value pool of one layer, and writing into it.
//
// A page holds 16 consecutive positions of one sequence, for each key/value head one after the other
//   keys transposed [D][16], then values [16][D]
// in float32 or bfloat16. Position p of sequence s lives in page block_tables[s][p / 16], slot p % 16. What lies in
// slots not yet written may be anything, NaN included: attention never lets it reach a result.
#pragma once
#include "abi.h"
#include "mat.h"

namespace llmc {

enum class Kv { f32, bf16 };

template <Kv KV>
struct KvType {
  using Element = float;
};
template <>
struct KvType<Kv::bf16> {
  using Element = uint16_t;
};
template <Kv KV>
using KvElement = typename KvType<KV>::Element;

template <int D, Kv KV>
constexpr int64_t kv_head_bytes() {
  return (int64_t)2 * kPageSize * D * sizeof(KvElement<KV>);
}

// Bytes of a page in one layer.
template <int HKV, int D, Kv KV>
constexpr int64_t kv_page_bytes() {
  return HKV * kv_head_bytes<D, KV>();
}

// First element of the keys of a head in a page; the values follow after D * 16 elements.
template <int HKV, int D, Kv KV>
LLMC_INLINE const KvElement<KV>* kv_head(const uint8_t* layer_base, int page, int head) {
  return (const KvElement<KV>*)(layer_base + page * kv_page_bytes<HKV, D, KV>() + head * kv_head_bytes<D, KV>());
}

LLMC_INLINE f32x16 kv_load_n(const float* p, int n) { return load_n(p, n); }
LLMC_INLINE f32x16 kv_load_n(const uint16_t* p, int n) {
  u16x16 v{};
  __builtin_memcpy(&v, p, sizeof(uint16_t) * n);
  return bf16_to_f32(v);
}
LLMC_INLINE void kv_store_n(float* p, f32x16 v, int n) { store_n(p, v, n); }
LLMC_INLINE void kv_store_n(uint16_t* p, f32x16 v, int n) {
  u16x16 h = f32_to_bf16(v);
  __builtin_memcpy(p, &h, sizeof(uint16_t) * n);
}

// The sequence that token t belongs to.
LLMC_INLINE int sequence_of(const Batch& batch, int t, int guess) {
  while (batch.query_start[guess + 1] <= t) ++guess;
  return guess;
}

// Writes k and v [T][HKV * D] at their tokens' positions. By token; a barrier stands between this and attention.
template <int HKV, int D, Kv KV>
inline void kv_write(Par par, const Batch& batch, Mat k, Mat v, uint8_t* layer_base) {
  using E = KvElement<KV>;
  Range r = tokens_of(par, batch.num_tokens);
  for (int t = r.begin, s = 0; t < r.end; ++t) {
    s = sequence_of(batch, t, s);
    int position = batch.positions[t], slot = position % kPageSize;
    int page = batch.block_tables[(int64_t)s * batch.block_table_stride + position / kPageSize];
    for (int h = 0; h < HKV; ++h) {
      E* keys = (E*)kv_head<HKV, D, KV>(layer_base, page, h);
      E* values = keys + kPageSize * D + slot * D;
      const float *from_k = k.row(t) + h * D, *from_v = v.row(t) + h * D;
      for (int d = 0; d < D; d += kLanes) {
        int n = D - d < kLanes ? D - d : kLanes;
        kv_store_n(values + d, load_n(from_v + d, n), n);
        E column[kLanes];
        kv_store_n(column, load_n(from_k + d, n), n);
        for (int i = 0; i < n; ++i) keys[(d + i) * kPageSize + slot] = column[i];
      }
    }
  }
}

}  // namespace llmc
