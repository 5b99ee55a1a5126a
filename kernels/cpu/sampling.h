// From a row of logits to a token, as RowSampling in runtime/batch.py describes it.
//
// For a row l of V logits (a NaN counts as -inf, +inf as the largest float):
//   0. With a mask of allowed ids, l of the others is -inf, and that of the allowed at least -1e30: one is chosen,
//      whatever the logits are.
//   1. l += logit_bias; repetition penalty r: l > 0 ? l / r : l * r for every token seen; tokens that occur c > 0 times
//      in the output: l -= presence, then l -= frequency * c.
//   2. temperature 0: the largest l, the lowest id on a tie. Otherwise z = (l - max) / temperature, w = exp(z).
//   3. min_p drops tokens with w < min_p. top_k keeps the k first by descending z, then ascending id. top_p keeps the
//      shortest prefix in that order whose w sum to at least top_p of the sum of what was left.
//   4. u = philox_uniform(seed, position of the sampled token); the token is the first in the order whose running sum
//      of w exceeds u times the total. The order is that of step 3 if min_p, top_k or top_p is on, else ascending id.
// Sums are in double, over ids as block_sums forms them, in the order of step 3 one by one. The log-probability is
// that of the token under the softmax of the raw row.
#pragma once
#include "abi.h"
#include "mat.h"
#include "philox.h"
#include "vmath.h"

namespace llmc {

constexpr int kSumBlock = 256;        // ids whose weights are summed by lanes
constexpr int kSampleBuckets = 1024;  // of width 1/8 in z; w is 0 beyond z = -105

// Memory of one thread, carved by sample_scratch from sample_scratch_bytes(V) bytes aligned to 64.
struct SampleScratch {
  float *logits, *weights;          // [V padded to kSumBlock]
  uint64_t *candidates, *swap;      // [V]
};

constexpr int64_t sample_scratch_bytes(int vocab) {
  return (int64_t)round_up(vocab, kSumBlock) * (2 * sizeof(float) + 2 * sizeof(uint64_t));
}

inline SampleScratch sample_scratch(void* memory, int vocab) {
  int64_t n = round_up(vocab, kSumBlock);
  float* f = (float*)memory;
  uint64_t* u = (uint64_t*)(f + 2 * n);
  return {f, f + n, u, u + n};
}

// weights[i] = exp((logits[i] - max) / temperature), logits[i] becomes the argument; padding gets weight 0.
inline void softmax_weights(float* logits, float* weights, int padded, float max, float temperature) {
  for (int i = 0; i < padded; i += kLanes) {
    f32x16 z = load<f32x16>(logits + i) - max;
    if (temperature != 1.0f) z = z / temperature;
    store(logits + i, z);
    store(weights + i, exp(z));
  }
}

// Sum of one block of 256 weights: 16 running sums by lane, added up from lane 0.
inline double block_sum(const float* weights) {
  f64x8 low{}, high{};
  for (int i = 0; i < kSumBlock; i += kLanes) {
    low += __builtin_convertvector(load<f32x8>(weights + i), f64x8);
    high += __builtin_convertvector(load<f32x8>(weights + i + 8), f64x8);
  }
  double sum = 0;
  for (int i = 0; i < 8; ++i) sum += low[i];
  for (int i = 0; i < 8; ++i) sum += high[i];
  return sum;
}

inline double block_sums(const float* weights, int padded) {
  double sum = 0;
  for (int i = 0; i < padded; i += kSumBlock) sum += block_sum(weights + i);
  return sum;
}

// Makes every logit comparable, pads with -inf and returns the largest.
inline float sanitise(float* logits, int vocab, int padded) {
  f32x16 largest = splat(-kInf);
  for (int i = vocab; i < padded; ++i) logits[i] = -kInf;
  for (int i = 0; i < padded; i += kLanes) {
    f32x16 v = load<f32x16>(logits + i);
    v = v == v ? min(v, splat(__FLT_MAX__)) : splat(-kInf);
    store(logits + i, v);
    largest = max(largest, v);
  }
  return hmax(largest);
}

inline int first_at_least(const float* logits, int vocab, float value) {
  int i = 0;
  while (i + kLanes <= vocab && !__builtin_reduce_or(load<f32x16>(logits + i) >= value)) i += kLanes;
  for (; i < vocab; ++i)
    if (logits[i] >= value) return i;
  return 0;
}

// The largest of a row as it is, with the meaning of `sanitise`.
inline float largest_of(const float* logits, int vocab) {
  f32x16 largest = splat(-kInf);
  int i = 0;
  for (; i + kLanes <= vocab; i += kLanes) {
    f32x16 v = load<f32x16>(logits + i);
    largest = v > largest ? v : largest;  // a NaN is not
  }
  float found = hmax(largest);
  for (; i < vocab; ++i) found = logits[i] > found ? logits[i] : found;
  return found < __FLT_MAX__ ? found : __FLT_MAX__;
}

constexpr float kLowestAllowed = -1e30f;  // so far from -inf that bias and penalties do not reach it

// Step 0, up to the next multiple of 16 ids.
inline void mask_logits(const uint32_t* allowed, int vocab, float* logits) {
  i32x16 lanes = splat(1) << lane_ids();
  for (int i = 0; i < vocab; i += kLanes) {
    i32x16 bits = splat((int32_t)(allowed[i >> 5] >> (i & 31))) & lanes;
    f32x16 v = max(load<f32x16>(logits + i), splat(kLowestAllowed));
    store(logits + i, bits != 0 ? v : splat(-kInf));
  }
}

// Bias and penalties; ids outside the vocabulary are ignored. True if there were any.
inline bool adjust_logits(const Batch& batch, const RowSampling& s, int vocab, float* logits) {
  for (int i = 0; i < s.num_bias; ++i) {
    int32_t id = batch.bias_tokens[s.bias_offset + i];
    if (id >= 0 && id < vocab) logits[id] += batch.bias_values[s.bias_offset + i];
  }
  for (int i = 0; i < s.num_penalty; ++i) {
    int32_t id = batch.penalty_tokens[s.penalty_offset + i], count = batch.penalty_counts[s.penalty_offset + i];
    if (id < 0 || id >= vocab) continue;
    float l = logits[id];
    if (s.repetition_penalty != 1.0f) l = l > 0.0f ? l / s.repetition_penalty : l * s.repetition_penalty;
    if (count > 0) l = l - s.presence_penalty - s.frequency_penalty * (float)count;
    logits[id] = l;
  }
  return s.num_bias > 0 || s.num_penalty > 0;
}

// An unsigned number that ascends as (z descending, id ascending).
inline uint64_t sort_key(float z, int id) {
  uint32_t bits;
  z += 0.0f;  // -0 equals +0
  __builtin_memcpy(&bits, &z, 4);
  uint32_t ascending = bits & 0x80000000 ? ~bits : bits | 0x80000000;
  return (uint64_t)~ascending << 32 | (uint32_t)id;
}

// Ascending by the high 32 bits, stable: least significant digit first, 8 bits a pass. Returns the sorted array.
inline uint64_t* radix_sort(uint64_t* from, uint64_t* to, int n) {
  for (int shift = 32; shift < 64; shift += 8) {
    int start[256] = {}, at = 0;
    for (int i = 0; i < n; ++i) ++start[from[i] >> shift & 255];
    for (int d = 0; d < 256; ++d) {
      int count = start[d];
      start[d] = at;
      at += count;
    }
    for (int i = 0; i < n; ++i) to[start[from[i] >> shift & 255]++] = from[i];
    uint64_t* swap = from;
    from = to;
    to = swap;
  }
  return from;
}

inline int bucket_of(float z) {
  float b = z * -8.0f;
  return b < (float)(kSampleBuckets - 1) ? (int)b : kSampleBuckets - 1;
}

struct Candidates {
  const uint64_t* sorted;
  int count;
};

// The tokens of non-zero weight in the order of step 3, at least as many as top_k or top_p can keep. Only they are
// sorted: a histogram over z says where to stop.
inline Candidates best_candidates(const SampleScratch& scratch, int vocab, int top_k, double mass) {
  int count[kSampleBuckets] = {}, last = 0, n = 0;
  double weight[kSampleBuckets] = {};
  for (int i = 0; i < vocab; ++i) {
    if (scratch.weights[i] == 0.0f) continue;
    int b = bucket_of(scratch.logits[i]);
    ++count[b];
    weight[b] += scratch.weights[i];
  }
  double sum = 0;
  for (int seen = 0; last < kSampleBuckets - 1; ++last) {
    seen += count[last];
    sum += weight[last];
    if (top_k > 0 ? seen >= top_k : sum >= mass * (1 + 1e-9)) break;
  }
  for (int i = 0; i < vocab; ++i)
    if (scratch.weights[i] != 0.0f && bucket_of(scratch.logits[i]) <= last)
      scratch.candidates[n++] = sort_key(scratch.logits[i], i);
  return {radix_sort(scratch.candidates, scratch.swap, n), n};
}

inline int32_t sample_filtered(const SampleScratch& scratch, int vocab, int padded, const RowSampling& s, double u) {
  for (int i = 0; i < padded; i += kLanes) {
    f32x16 w = load<f32x16>(scratch.weights + i);
    store(scratch.weights + i, w < s.min_p ? splat(0.0f) : w);
  }
  int top_k = s.top_k > 0 && s.top_k < vocab ? s.top_k : 0;
  double total = top_k > 0 ? 0 : block_sums(scratch.weights, padded);
  Candidates c = best_candidates(scratch, vocab, top_k, s.top_p < 1.0f ? (double)s.top_p * total : 2 * total);
  auto weight = [&](int i) { return (double)scratch.weights[(uint32_t)c.sorted[i]]; };
  int kept = top_k > 0 && top_k < c.count ? top_k : c.count;
  if (top_k > 0)
    for (int i = 0; i < kept; ++i) total += weight(i);
  double sum = 0;
  int end = 0;
  for (; end < kept; ++end) {
    if (s.top_p < 1.0f && end > 0 && sum >= (double)s.top_p * total) break;
    sum += weight(end);
  }
  double running = 0;
  for (int i = 0; i < end; ++i) {
    running += weight(i);
    if (running > u * sum) return (int32_t)(uint32_t)c.sorted[i];
  }
  return (int32_t)(uint32_t)c.sorted[end - 1];
}

inline int32_t sample_by_id(const float* weights, int vocab, int padded, double u) {
  double target = u * block_sums(weights, padded), running = 0;
  int32_t last = 0;
  for (int block = 0; block < padded; block += kSumBlock) {
    double after = running + block_sum(weights + block);
    if (after > target) {
      // Within the block one by one; its last token takes what rounding leaves.
      for (int i = block; i < block + kSumBlock && i < vocab; ++i) {
        if (weights[i] == 0.0f) continue;
        last = i;
        running += weights[i];
        if (running > target) return i;
      }
      return last;
    }
    running = after;
  }
  return last;
}

// One row; returns the token and sets *logprob.
inline int32_t sample_row(const Batch& batch, const RowSampling& s, const float* raw, int vocab, uint32_t position,
                          const SampleScratch& scratch, float* logprob) {
  int padded = round_up(vocab, kSumBlock);
  float *logits = scratch.logits, *weights = scratch.weights;
  bool masked = s.num_allowed > 0, plain = s.num_bias == 0 && s.num_penalty == 0 && !masked;
  bool greedy = s.temperature == 0.0f, wanted = s.no_logprob == 0;
  *logprob = __builtin_nanf("");
  if (plain && greedy && !wanted) {
    float largest = largest_of(raw, vocab);
    return largest == -kInf ? 0 : first_at_least(raw, vocab, largest);
  }
  __builtin_memcpy(logits, raw, sizeof(float) * vocab);
  float raw_max = sanitise(logits, vocab, padded), max = raw_max;
  if (wanted) *logprob = -kInf;
  if (raw_max == -kInf && !masked) return 0;
  double log_total = 0;
  if (wanted && raw_max > -kInf) {
    softmax_weights(logits, weights, padded, raw_max, 1.0f);
    log_total = log(block_sums(weights, padded));
    max = 0.0f;
  }
  if (!plain) {
    __builtin_memcpy(logits, raw, sizeof(float) * vocab);
    sanitise(logits, vocab, padded);
    if (masked) mask_logits(batch.allowed + s.allowed_offset, vocab, logits);
    adjust_logits(batch, s, vocab, logits);
    max = sanitise(logits, vocab, padded);
  }
  int32_t token = 0;
  if (greedy || max == -kInf) {
    token = first_at_least(logits, vocab, max);
  } else {
    if (!plain || !wanted || s.temperature != 1.0f) softmax_weights(logits, weights, padded, max, s.temperature);
    double u = philox_uniform(s.seed, position);
    bool filtered = s.min_p > 0.0f || s.top_p < 1.0f || (s.top_k > 0 && s.top_k < vocab);
    token = filtered ? sample_filtered(scratch, vocab, padded, s, u) : sample_by_id(weights, vocab, padded, u);
  }
  if (wanted && raw_max > -kInf) {
    f32x16 r = splat(raw[token]);
    r = r == r ? min(r, splat(__FLT_MAX__)) : splat(-kInf);
    *logprob = (float)((double)(r[0] - raw_max) - log_total);
  }
  return token;
}

// Samples every row of logits [R][V] into batch.out_tokens and batch.out_logprobs, and copies the raw logits to
// batch.logits if that is not null. scratch: nt pieces of sample_scratch_bytes(V). Rows are divided over threads.
inline void sample(Par par, const Batch& batch, Mat logits, int vocab, void* scratch) {
  SampleScratch mine = sample_scratch((char*)scratch + par.tid * sample_scratch_bytes(vocab), vocab);
  Range r = share_of(par, batch.num_rows);
  for (int i = r.begin; i < r.end; ++i) {
    const float* row = logits.row(i);
    if (batch.logits != nullptr)
      __builtin_memcpy(batch.logits + (int64_t)i * vocab, row, sizeof(float) * vocab);
    uint32_t position = (uint32_t)batch.positions[batch.rows[i]] + 1;
    batch.out_tokens[i] =
        sample_row(batch, batch.sampling[i], row, vocab, position, mine, batch.out_logprobs + i);
  }
}

}  // namespace llmc
