// The binary interface between runtime/cpu/executor.py and the code that codegen/cpu emits.
// Every pointer is host memory owned by the caller and valid for the call. Change kAbiVersion with any change here
// or in a weight layout; runtime/plan.py holds the same number.
#pragma once
#include <stdint.h>

namespace llmc {

constexpr int kAbiVersion = 5;
constexpr int kPageSize = 16;  // positions per KV page

// Sampling of one row; see RowSampling in runtime/batch.py. 64 bytes.
struct RowSampling {
  float temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  int32_t top_k;
  int32_t num_penalty, num_bias;       // entries in the arrays below
  int32_t penalty_offset, bias_offset; // first entry of this row in the batch's flat arrays
  int32_t no_logprob;                  // not 0: nobody asks for the token's log-probability
  uint64_t seed;
  int32_t num_allowed, allowed_offset; // words of the row's mask, 0 without one; its first word
};
static_assert(sizeof(RowSampling) == 64, "mirrored in runtime/sampling_rows.py");

struct Batch {
  int32_t num_tokens, num_seqs, num_rows, block_table_stride;
  const int32_t* tokens;        // [T]
  const int32_t* positions;     // [T]
  const int32_t* query_start;   // [S+1]
  const int32_t* block_tables;  // [S][block_table_stride]
  const int32_t* rows;          // [R] indices into T
  const RowSampling* sampling;  // [R]
  const int32_t* penalty_tokens;
  const int32_t* penalty_counts;
  const int32_t* bias_tokens;
  const float* bias_values;
  const uint32_t* allowed;  // masks of ceil(V / 32) words: bit i % 32 of word i / 32 says whether id i may be chosen
  int32_t* out_tokens;    // [R]
  float* out_logprobs;    // [R]; NaN where nobody asks
  float* logits;          // [R][V], or null when not asked for
};

}  // namespace llmc
