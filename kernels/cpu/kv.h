// The paged key/value pool of one layer, and writing into it.
//
// A page holds 16 consecutive positions of one sequence, for each key/value head one after the other
//   keys transposed [D][16], then values [16][D], in float32, bfloat16 or int8,
//   with int8 then the scales of the keys [16] and of the values [16] in float32.
// An int8 element q stands for q * scale: symmetric, one scale per position and head of keys and of values, amax / 127.
// Position p of sequence s lives in page block_tables[s][p / 16], slot p % 16. What lies in slots not yet written may
// be anything, NaN included: attention never lets it reach a result.
#pragma once
#include "abi.h"
#include "mat.h"

namespace llmc {

enum class Kv { f32, bf16, int8 };  // by the names of passes/kv_layout.py

template <Kv KV>
struct KvType {
  using Element = float;
};
template <>
struct KvType<Kv::bf16> {
  using Element = uint16_t;
};
template <>
struct KvType<Kv::int8> {
  using Element = int8_t;
};
template <Kv KV>
using KvElement = typename KvType<KV>::Element;

template <int D, Kv KV>
constexpr int64_t kv_head_bytes() {
  int64_t scales = KV == Kv::int8 ? sizeof(float) : 0;
  return 2 * kPageSize * (D * (int64_t)sizeof(KvElement<KV>) + scales);
}

// Bytes of a page in one layer.
template <int HKV, int D, Kv KV>
constexpr int64_t kv_page_bytes() {
  return HKV * kv_head_bytes<D, KV>();
}

// One head of one page.
template <int D, Kv KV>
struct KvHead {
  using E = KvElement<KV>;
  uint8_t* p;
  LLMC_INLINE E* keys() const { return (E*)p; }
  LLMC_INLINE E* values() const { return keys() + kPageSize * D; }
  // [16] each, with int8 alone.
  LLMC_INLINE float* key_scales() const { return (float*)(values() + kPageSize * D); }
  LLMC_INLINE float* value_scales() const { return key_scales() + kPageSize; }
};

template <int HKV, int D, Kv KV>
LLMC_INLINE KvHead<D, KV> kv_head(const uint8_t* layer_base, int page, int head) {
  return {(uint8_t*)layer_base + page * kv_page_bytes<HKV, D, KV>() + head * kv_head_bytes<D, KV>()};
}

// The first n elements as float32, zeros behind them, with the lanes in the order that costs least: of bfloat16 on AVX2
// first the even elements, then the odd ones, by a shift and a mask instead of widening. in_order() puts them in order.
LLMC_INLINE f32x16 kv_lanes(const float* p, int n) { return load_n(p, n); }
LLMC_INLINE f32x16 kv_lanes(const int8_t* p, int n) {
  i8x16 v{};
  __builtin_memcpy(&v, p, n);
  return to_float(__builtin_convertvector(v, i32x16));
}
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool kEvenOdd = true;
#else
constexpr bool kEvenOdd = false;
#endif
LLMC_INLINE f32x16 kv_lanes(const uint16_t* p, int n) {
  u16x16 v{};
  __builtin_memcpy(&v, p, sizeof(uint16_t) * n);
  if constexpr (!kEvenOdd) return bf16_to_f32(v);
  u32x8 even = (u32x8)v << 16, odd = (u32x8)v & 0xffff0000;
  return (f32x16)__builtin_shufflevector(even, odd, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
template <class E>
LLMC_INLINE f32x16 in_order(f32x16 v) {
  if constexpr (!kEvenOdd || sizeof(E) != sizeof(uint16_t)) return v;
  return __builtin_shufflevector(v, v, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
}

// The step of D values as int8. Not finite if one of them is not: then all elements are 0, and the products NaN
// instead of a plausible number.
template <int D>
LLMC_INLINE float kv_scale(const float* x) {
  f32x16 amax{}, not_finite{};  // the second is 0 or NaN
  for (int d = 0; d < D; d += kLanes) {
    f32x16 v = load_n(x + d, D - d < kLanes ? D - d : kLanes);
    amax = max(amax, abs(v));
    not_finite += v - v;
  }
  return hmax(amax) / 127.0f + hsum(not_finite);
}

LLMC_INLINE f32x16 kv_steps(f32x16 v, float scale) {
  const float shift = 0x1.8p23f;  // adding it rounds to the nearest integer, ties to even
  v = scale > 0.0f ? min(max(v / scale, splat(-127.0f)), splat(127.0f)) : splat(0.0f);
  return (v + shift) - shift;
}

LLMC_INLINE void kv_store_n(float* p, f32x16 v, int n) { store_n(p, v, n); }
LLMC_INLINE void kv_store_n(uint16_t* p, f32x16 v, int n) {
  u16x16 h = f32_to_bf16(v);
  __builtin_memcpy(p, &h, sizeof(uint16_t) * n);
}
LLMC_INLINE void kv_store_n(int8_t* p, f32x16 v, int n) {  // of integers in -127 .. 127
  i8x16 q = __builtin_convertvector(__builtin_convertvector(v, i32x16), i8x16);
  __builtin_memcpy(p, &q, n);
}

// Writes k and v [D] into one slot of a head.
template <int D, Kv KV>
inline void kv_write_head(KvHead<D, KV> head, int slot, const float* k, const float* v) {
  KvElement<KV> *keys = head.keys() + slot, *values = head.values() + slot * D, column[kLanes];
  float k_scale = 1.0f, v_scale = 1.0f;
  if constexpr (KV == Kv::int8) {
    head.key_scales()[slot] = k_scale = kv_scale<D>(k);
    head.value_scales()[slot] = v_scale = kv_scale<D>(v);
  }
  for (int d = 0; d < D; d += kLanes) {
    int n = D - d < kLanes ? D - d : kLanes;
    f32x16 from_k = load_n(k + d, n), from_v = load_n(v + d, n);
    if constexpr (KV == Kv::int8) from_k = kv_steps(from_k, k_scale), from_v = kv_steps(from_v, v_scale);
    kv_store_n(values + d, from_v, n);
    kv_store_n(column, from_k, n);
    for (int i = 0; i < n; ++i) keys[(d + i) * kPageSize] = column[i];
  }
}

// The sequence that token t belongs to.
LLMC_INLINE int sequence_of(const Batch& batch, int t, int guess) {
  while (batch.query_start[guess + 1] <= t) ++guess;
  return guess;
}

// Writes k and v [T][HKV * D] at their tokens' positions. By token; a barrier stands between this and attention.
template <int HKV, int D, Kv KV>
inline void kv_write(Par par, const Batch& batch, Mat k, Mat v, uint8_t* layer_base) {
  Range r = tokens_of(par, batch.num_tokens);
  for (int t = r.begin, s = 0; t < r.end; ++t) {
    s = sequence_of(batch, t, s);
    int position = batch.positions[t];
    int page = batch.block_tables[(int64_t)s * batch.block_table_stride + position / kPageSize];
    for (int h = 0; h < HKV; ++h)
      kv_write_head<D, KV>(kv_head<HKV, D, KV>(layer_base, page, h), position % kPageSize, k.row(t) + h * D,
                           v.row(t) + h * D);
  }
}

}  // namespace llmc
