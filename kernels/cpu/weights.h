// Packed weight formats, and the embedding lookup out of them.
//
// kernels/pack.py writes these layouts; this comment is their definition. A matrix has N rows (output columns) of K
// elements. N is padded to a multiple of 16 with zero rows: tile i holds rows 16*i .. 16*i+15, one per vector lane.
// Quantised formats pad K to Kp, a multiple of 32, with zeros and have one scale per row and group of 32 elements.
//   F32   data f32 [N/16][K][16]
//   BF16  data u16 [N/16][K][16]
//   W8    data u8  [N/16][Kp/4][16][4], element q + 128 with q in [-128, 127]; scale f16 [N/16][Kp/32][16]
//         value = scale * q
//   W4    data u8  [N/16][Kp/32][4][16][4]: byte (j, lane, i) of a group has element 4*j+i in its low four bits and
//         element 16+4*j+i in its high four; scale, min f16 [N/16][Kp/32][16]; value = scale * u + min, u in [0, 15]
// Each region starts on a 64-byte boundary. In a gated matrix, tiles alternate: gate tile 0, up tile 0, gate tile 1, …
#pragma once
#include "mat.h"

namespace llmc {

enum class Fmt { f32, bf16, w8, w4 };

constexpr int kGroup = 32;

struct Weight {
  const void* data;
  const uint16_t* scale = nullptr;  // W8, W4
  const uint16_t* min = nullptr;    // W4
};

constexpr bool is_quantized(Fmt fmt) { return fmt == Fmt::w8 || fmt == Fmt::w4; }

// Bytes of one 16-row tile in the data region.
constexpr int64_t tile_bytes(Fmt fmt, int k) {
  if (fmt == Fmt::f32) return (int64_t)k * 64;
  if (fmt == Fmt::bf16) return (int64_t)k * 32;
  return (int64_t)round_up(k, kGroup) * (fmt == Fmt::w8 ? 16 : 8);
}

LLMC_INLINE float f16_at(const uint16_t* p) {
  u16x16 h{};
  h[0] = *p;
  return f16_to_f32(h)[0];
}

// Row `row` of a packed [*, C] matrix as float32.
template <Fmt FMT, int C>
inline void unpack_row(const Weight& w, int64_t row, float scale, float* out) {
  int64_t tile = row / kLanes;
  int lane = (int)(row % kLanes);
  if constexpr (FMT == Fmt::f32) {
    const float* p = (const float*)w.data + tile * C * kLanes + lane;
    for (int k = 0; k < C; ++k) out[k] = p[k * kLanes] * scale;
  } else if constexpr (FMT == Fmt::bf16) {
    const uint16_t* p = (const uint16_t*)w.data + tile * C * kLanes + lane;
    for (int k = 0; k < C; ++k) {
      uint32_t bits = (uint32_t)p[k * kLanes] << 16;
      float value;
      __builtin_memcpy(&value, &bits, 4);
      out[k] = value * scale;
    }
  } else {
    constexpr int kGroups = round_up(C, kGroup) / kGroup;
    const uint8_t* p = (const uint8_t*)w.data + tile * tile_bytes(FMT, C) + lane * 4;
    for (int g = 0; g < kGroups; ++g) {
      int64_t s = (tile * kGroups + g) * kLanes + lane;
      float ws = f16_at(w.scale + s), wm = FMT == Fmt::w4 ? f16_at(w.min + s) : 0.0f;
      int n = C - g * kGroup < kGroup ? C - g * kGroup : kGroup;
      for (int i = 0; i < n; ++i) {
        float value;
        if constexpr (FMT == Fmt::w8) {
          value = ws * (float)(p[(g * 8 + i / 4) * 64 + i % 4] - 128);
        } else {
          int byte = p[(g * 4 + i % 16 / 4) * 64 + i % 4];
          value = ws * (float)(i < 16 ? byte & 15 : byte >> 4) + wm;
        }
        out[g * kGroup + i] = value * scale;
      }
    }
  }
}

// out[t] = scale * row (ids[t] + offset) of the packed [V, C] matrix w. Ids are valid. By token.
template <Fmt FMT, int C>
inline void embed(Par par, int num_tokens, const int32_t* ids, int offset, Weight w, float scale, Mat out) {
  Range r = tokens_of(par, num_tokens);
  for (int t = r.begin; t < r.end; ++t) unpack_row<FMT, C>(w, (int64_t)ids[t] + offset, scale, out.row(t));
}

}  // namespace llmc
