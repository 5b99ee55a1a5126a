// Time as the engine measures it.
#pragma once
#include <stdint.h>
#include <time.h>

namespace llmc {

// Nanoseconds of a clock that only moves forward.
inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

}  // namespace llmc
