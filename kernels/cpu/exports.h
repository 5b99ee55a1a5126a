// The functions of the shared object that runtime/cpu/executor.py calls, over the step of the unit that includes this
// file. Before, the unit defines in llmc: kVocab, the bytes kTokenBytes (of tokens_arena, per token), kRowBytes (of
// rows_arena, per row) and kPageBytes (of the KV pool, per page, all layers), kPhases, kPhaseLines and step().
#pragma once
#include <errno.h>
#include <stdlib.h>
#include "engine.h"
#include "limits.h"
#include "sampling.h"

extern "C" {

#define LLMC_EXPORT __attribute__((visibility("default")))
using namespace llmc;

LLMC_EXPORT int32_t llmc_abi_version() { return kAbiVersion; }
LLMC_EXPORT int32_t llmc_vocab_size() { return kVocab; }
LLMC_EXPORT int64_t llmc_page_bytes() { return kPageBytes; }

static int64_t up64(int64_t n) { return (n + 63) / 64 * 64; }
static int arena_rows(int rows, int threads) { return rows > kPrivateRows * threads ? rows : kPrivateRows * threads; }

LLMC_EXPORT int64_t llmc_arena_bytes(int32_t max_tokens, int32_t max_rows, int32_t threads) {
  return up64(kTokenBytes * arena_rows(max_tokens, threads)) + up64(kRowBytes * arena_rows(max_rows, threads)) +
         threads * (int64_t)sample_scratch_bytes(kVocab);
}

// The target that this is code for, by its name in plans: read before anything of it runs.
LLMC_EXPORT extern const char llmc_target[] = LLMC_TARGET;
// Of the weights segment.
LLMC_EXPORT int64_t llmc_weight_bytes() { return kWeightBytes; }

// arena: llmc_arena_bytes, 64-byte aligned. kv: num_pages * llmc_page_bytes. Returns null and an errno on failure.
LLMC_EXPORT void* llmc_create(const uint8_t* weights, uint8_t* kv, int64_t num_pages, uint8_t* arena,
                              int32_t max_tokens, int32_t max_rows, int32_t threads, int32_t* error) {
  int code = ENOMEM;
  Engine* e = (Engine*)malloc(sizeof(Engine));
  Pool* pool = e != nullptr ? pool_create(threads, &code) : nullptr;
  *error = code;
  if (pool == nullptr) {
    free(e);
    return nullptr;
  }
  max_tokens = arena_rows(max_tokens, threads), max_rows = arena_rows(max_rows, threads);
  uint8_t* rows_arena = arena + up64(kTokenBytes * max_tokens);
  void* scratch = rows_arena + up64(kRowBytes * max_rows);
  *e = Engine{weights, kv, num_pages, arena, rows_arena, scratch, max_tokens, max_rows, pool, nullptr, nullptr, 0};
  return e;
}

// A step comes soon: threads that wake now are there when it begins.
LLMC_EXPORT void llmc_rouse(void* engine) { ((Engine*)engine)->pool->start.rouse(); }

// One step; the caller has checked the batch. Returns 0, or 1 for a batch larger than the arena.
LLMC_EXPORT int32_t llmc_step(void* engine, const Batch* batch) {
  Engine* e = (Engine*)engine;
  if (batch->num_tokens > e->max_tokens || batch->num_rows > e->max_rows) return 1;
  e->batch = batch;
  if (e->profile != nullptr) e->mark = now_ns();
  e->pool->run(step, e);
  if (e->profile != nullptr) add_time(*e, kPhases - 1);
  return 0;
}

// One line per phase of a step, as JSON; runtime/cpu/phases.py says what is in it.
LLMC_EXPORT const char* llmc_phases() { return kPhaseLines; }

// From now on steps add the nanoseconds of each phase to ns[phase]; null stops that. Not during a step.
LLMC_EXPORT void llmc_profile(void* engine, int64_t* ns) { ((Engine*)engine)->profile = ns; }

// What the machine can do, see limits.h. The engine's threads write the memory once before it is read.
LLMC_EXPORT void llmc_touch_memory(void* engine, uint8_t* data, int64_t bytes) {
  ReadJob job{data, bytes, 0};
  ((Engine*)engine)->pool->run(touch_memory, &job);
}
LLMC_EXPORT double llmc_read_bandwidth(void* engine, uint8_t* data, int64_t bytes) {
  return read_bandwidth(((Engine*)engine)->pool, data, bytes);
}
LLMC_EXPORT double llmc_peak_ops(void* engine, int32_t kind) { return peak_ops(((Engine*)engine)->pool, kind); }

LLMC_EXPORT void llmc_destroy(void* engine) {
  pool_destroy(((Engine*)engine)->pool);
  free(engine);
}
}
