// The counter-based generator Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2,
// 3", SC11): a function from (key, counter) to 128 random bits, with no state.
#pragma once
#include <stdint.h>

namespace llmc {

struct Philox {
  uint32_t word[4];
};

inline Philox philox(Philox counter, uint32_t key0, uint32_t key1) {
  uint32_t(&c)[4] = counter.word;
  for (int round = 0; round < 10; ++round) {
    uint64_t a = (uint64_t)0xD2511F53 * c[0], b = (uint64_t)0xCD9E8D57 * c[2];
    uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ key0, (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ key1,
                        (uint32_t)a};
    for (int i = 0; i < 4; ++i) c[i] = next[i];
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

// Uniform in [0, 1) with 53 bits: words 0 (high) and 1 of the block at counter (index, 0, 0, 0).
inline double philox_uniform(uint64_t seed, uint32_t index) {
  Philox r = philox(Philox{{index, 0, 0, 0}}, (uint32_t)seed, (uint32_t)(seed >> 32));
  return (double)(((uint64_t)r.word[0] << 32 | r.word[1]) >> 11) * 0x1p-53;
}

}  // namespace llmc
