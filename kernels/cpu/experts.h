// A mixture of experts: the router's choices, tokens gathered by expert, the products of the experts, the weighted sum.
//
// A pair is a token and one of its TOP_K experts. Pairs stand in the order of their experts, those of one expert in the
// order of tokens, so that a product of one expert has its rows together; an expert's matrix is a range of tiles of one
// matrix of all. An expert without tokens is not read. A token's result depends on its own row alone: products do not
// depend on their batch (linear.h), and its experts are added in the order of its choices.
#pragma once
#include "linear.h"
#include "norm.h"

namespace llmc {

enum class Scores { softmax, sigmoid };

struct __attribute__((may_alias)) Choice {  // lies in a buffer of float32
  int32_t expert;
  float weight;
  int32_t pair;
};
constexpr int kChoiceFloats = sizeof(Choice) / sizeof(float);

LLMC_INLINE Choice* choices_of(Mat choices, int t) { return (Choice*)choices.row(t); }

// The scores of one token, 0 behind the last, and what the choice goes by, -inf behind the last and instead of a NaN.
template <int E, Scores SCORES>
LLMC_INLINE void score(const float* logits, const float* correction, float* scores, float* ranked) {
  auto lanes_at = [](int e) { return E - e < kLanes ? E - e : kLanes; };
  auto inside = [](int e, f32x16 v, float other) { return lane_ids() + e < E ? v : splat(other); };
  float top = 0, divisor = 1;
  if constexpr (SCORES == Scores::softmax) {
    f32x16 most = splat(-kInf), sum{};
    for (int e = 0; e < E; e += kLanes) most = max(inside(e, load_n(logits + e, lanes_at(e)), -kInf), most);
    top = hmax(most);
    for (int e = 0; e < E; e += kLanes) sum += inside(e, exp(load_n(logits + e, lanes_at(e)) - top), 0.0f);
    divisor = hsum(sum);
  }
  for (int e = 0; e < E; e += kLanes) {
    f32x16 v = load_n(logits + e, lanes_at(e));
    f32x16 s = SCORES == Scores::softmax ? exp(v - top) / divisor : sigmoid(v);
    f32x16 r = correction == nullptr ? s : s + load_n(correction + e, lanes_at(e));
    store(scores + e, inside(e, s, 0.0f));
    store(ranked + e, inside(e, r == r ? r : splat(-kInf), -kInf));
  }
}

// The first of the highest of n values, a multiple of kLanes; it becomes -inf.
template <int N>
LLMC_INLINE int take_highest(float* values) {
  f32x16 most = load<f32x16>(values);
  for (int i = kLanes; i < N; i += kLanes) most = max(load<f32x16>(values + i), most);
  const float top = hmax(most);
  for (int i = 0; i < N; i += kLanes) {
    i32x16 found = load<f32x16>(values + i) == splat(top) ? lane_ids() : splat(kLanes);
    int lane = __builtin_reduce_min(found);
    if (lane == kLanes) continue;
    values[i + lane] = -kInf;
    return i + lane;
  }
  return 0;
}

// Experts outside of the TOP_GROUPS groups whose BEST highest values have the highest sum become -inf.
template <int E, int GROUPS, int TOP_GROUPS, int BEST>
LLMC_INLINE void keep_groups(float* ranked) {
  constexpr int kSize = E / GROUPS, kPaddedSize = round_up(kSize, kLanes), kPaddedGroups = round_up(GROUPS, kLanes);
  alignas(64) float sums[kPaddedGroups], group[kPaddedSize];
  bool kept[GROUPS] = {};
  for (int g = 0; g < kPaddedGroups; ++g) {
    sums[g] = g < GROUPS ? 0.0f : -kInf;
    if (g >= GROUPS) continue;
    for (int i = 0; i < kPaddedSize; ++i) group[i] = i < kSize ? ranked[g * kSize + i] : -kInf;
    for (int i = 0; i < BEST; ++i) sums[g] += ranked[g * kSize + take_highest<kPaddedSize>(group) % kSize];
  }
  for (int i = 0; i < TOP_GROUPS; ++i) kept[take_highest<kPaddedGroups>(sums) % GROUPS] = true;
  for (int e = 0; e < E; ++e) ranked[e] = kept[e / kSize] ? ranked[e] : -kInf;
}

// What kernels/routing.py says of a router; choices [T][TOP_K] get expert and weight. By token.
template <int E, int TOP_K, Scores SCORES, int GROUPS, int TOP_GROUPS, int BEST, bool NORMALISE>
inline void route(Par par, int num_tokens, Mat logits, const float* correction, float floor, float eps, float scale,
                  Mat choices) {
  constexpr int kPadded = round_up(E, kLanes);
  alignas(64) float scores[kPadded], ranked[kPadded];
  Range r = tokens_of(par, num_tokens);
  for (int t = r.begin; t < r.end; ++t) {
    score<E, SCORES>(logits.row(t), correction, scores, ranked);
    if constexpr (TOP_GROUPS < GROUPS) keep_groups<E, GROUPS, TOP_GROUPS, BEST>(ranked);
    Choice* chosen = choices_of(choices, t);
    float sum = 0;
    for (int j = 0; j < TOP_K; ++j) {
      int e = take_highest<kPadded>(ranked) % E;
      chosen[j] = Choice{e, scores[e], 0};
      sum += scores[e];
    }
    const float divisor = NORMALISE ? (floor > sum ? floor : sum) + eps : 1.0f;
    for (int j = 0; j < TOP_K; ++j) chosen[j].weight = chosen[j].weight / divisor * scale;
  }
}

// Where the pairs of each expert begin; the last entry is the number of all.
template <int E, int TOP_K>
struct PairStarts {
  int32_t at[E + 1] = {};

  PairStarts(Mat choices, int num_tokens) {
    for (int t = 0; t < num_tokens; ++t)
      for (int j = 0; j < TOP_K; ++j) ++at[choices_of(choices, t)[j].expert + 1];
    for (int e = 0; e < E; ++e) at[e + 1] += at[e];
  }
  int count(int e) const { return at[e + 1] - at[e]; }
};

template <int K, Fmt FMT>
LLMC_INLINE void copy_pair(Mat x, int t, Mat out, int pair) {
  __builtin_memcpy(out.p + (int64_t)pair * K, x.row(t), K * sizeof(float));
}
template <int K, Fmt FMT>
LLMC_INLINE void copy_pair(QuantBuf x, int t, QuantBuf out, int pair) {
  constexpr int kPadded = round_up(K, kGroup), kGroups = kPadded / kGroup, kBytes = q_bytes(FMT, kPadded);
  __builtin_memcpy(out.q + (int64_t)pair * kBytes, x.q + (int64_t)t * kBytes, kBytes);
  __builtin_memcpy(out.scale + (int64_t)pair * kGroups, x.scale + (int64_t)t * kGroups, kGroups * sizeof(float));
  __builtin_memcpy(out.sum + (int64_t)pair * kGroups, x.sum + (int64_t)t * kGroups, kGroups * sizeof(int32_t));
}

// The rows of tokens as rows of pairs, and into the choices which pair each is. By token; reads the choices of all.
template <int E, int TOP_K, int K, Fmt FMT, class X>
inline void gather_pairs(Par par, int num_tokens, X x, Mat choices, X out) {
  Range r = tokens_of(par, num_tokens);
  PairStarts<E, TOP_K> next(choices, num_tokens);
  for (int t = 0; t < r.end; ++t) {
    for (int j = 0; j < TOP_K; ++j) {
      Choice& chosen = choices_of(choices, t)[j];
      int pair = next.at[chosen.expert]++;
      if (t < r.begin) continue;
      chosen.pair = pair;
      copy_pair<K, FMT>(x, t, out, pair);
    }
  }
}

template <int K, Fmt FMT>
LLMC_INLINE Mat rows_from(Mat x, int row) {
  return Mat{x.row(row), x.ld};
}
template <int K, Fmt FMT>
LLMC_INLINE QuantBuf rows_from(QuantBuf x, int64_t row) {
  constexpr int kPadded = round_up(K, kGroup), kGroups = kPadded / kGroup;
  return QuantBuf{x.q + row * q_bytes(FMT, kPadded), x.scale + row * kGroups, x.sum + row * kGroups};
}

// A matrix from tile `first` on.
template <Fmt FMT, int K>
LLMC_INLINE Weight tiles_from(Weight w, int64_t first) {
  constexpr int64_t kScales = round_up(K, kGroup) / kGroup * kLanes;
  Weight part{(const char*)w.data + first * tile_bytes(FMT, K)};
  if (w.scale != nullptr) part.scale = w.scale + first * kScales;
  if (w.min != nullptr) part.min = w.min + first * kScales;
  return part;
}

// The product of each pair's row with the matrix [N, K] of its expert (gated: two of them), and what follows: see
// linear.h. w holds the matrices of all experts, bias their biases, expert by expert. By column: a thread does whole
// tiles of one expert for all of its pairs, those of its share of all tiles and then what others have not begun.
template <Fmt FMT, int N, int K, Act ACT, bool GATED, int E, int TOP_K, class X>
inline void expert_linear(Par par, int num_tokens, Mat choices, X x, Weight w, const float* bias, Mat out) {
  static_assert(N % kLanes == 0, "an expert is whole tiles");
  constexpr int kTiles = N / kLanes, kSides = GATED ? 2 : 1, kBlock = block_tiles(FMT, K, GATED);
  const PairStarts<E, TOP_K> starts(choices, num_tokens);
  int active[E], num_active = 0, most = 0;
  for (int e = 0; e < E; ++e) {
    if (starts.count(e) > 0) active[num_active++] = e;
    if (starts.count(e) > most) most = starts.count(e);
  }
  const int piece = most <= kFewRows ? kFewRowsPiece : kBlock < kTiles ? kBlock : kTiles;
  share_pieces(par, num_active * kTiles, piece, [&](Range items) {
    for (int i = items.begin; i < items.end;) {
      const int e = active[i / kTiles], tile = i % kTiles, left = items.end - i, count = starts.count(e);
      const Range tiles{tile, tile + left < kTiles ? tile + left : kTiles};
      const Epilogue epilogue{bias == nullptr ? nullptr : bias + e * kSides * N, Mat{nullptr, 0},
                              Mat{out.row(starts.at[e]), out.ld}};
      const Product<X> p{rows_from<K, FMT>(x, starts.at[e]), tiles_from<FMT, K>(w, (int64_t)e * kSides * kTiles),
                         epilogue};
      if (count <= kFewRows)
        linear_few_rows<FMT, N, K, ACT, GATED>(p, tiles, count);
      else
        linear_many_rows<FMT, N, K, ACT, GATED>(p, tiles, count);
      i += tiles.end - tiles.begin;
    }
  });
}

// out[t] = the sum over its choices, in their order, of weight * y[pair]. By token.
template <int C, int TOP_K>
inline void combine_pairs(Par par, int num_tokens, Mat choices, Mat y, Mat out) {
  Range r = tokens_of(par, num_tokens);
  for (int t = r.begin; t < r.end; ++t) {
    const Choice* chosen = choices_of(choices, t);
    map_row<C>(y.row(chosen[0].pair), out.row(t), [&](f32x16 v, int c, int lanes) {
      v *= chosen[0].weight;
      for (int j = 1; j < TOP_K; ++j)
        v = fma(splat(chosen[j].weight), load_n(y.row(chosen[j].pair) + c, lanes), v);
      return v;
    });
  }
}

}  // namespace llmc
