// How fast this machine reads memory: `cpu_bandwidth THREADS MIB PASSES` prints bytes/s, the median of the passes.
// Every thread reads a part of its own of one array that no cache holds.

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { LANES = 16 };

struct part {
  const uint64_t* words;
  size_t count;
  uint64_t sum;
};

static void* read_part(void* argument) {
  struct part* part = argument;
  uint64_t sums[LANES] = {0};
  for (size_t i = 0; i < part->count; i += LANES)
    for (int lane = 0; lane < LANES; lane++) sums[lane] += part->words[i + lane];
  for (int lane = 0; lane < LANES; lane++) part->sum += sums[lane];
  return NULL;
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

static int ascending(const void* a, const void* b) {
  double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

int main(int argc, char** argv) {
  if (argc != 4 || atoi(argv[3]) < 1) return fprintf(stderr, "usage: %s THREADS MIB PASSES\n", argv[0]), 2;
  int threads = atoi(argv[1]), passes = atoi(argv[3]);
  size_t count = ((size_t)atoi(argv[2]) << 20) / sizeof(uint64_t) / threads / LANES * LANES;
  uint64_t* words = malloc(count * threads * sizeof(uint64_t));
  struct part* parts = calloc(threads, sizeof(struct part));
  pthread_t* running = calloc(threads, sizeof(pthread_t));
  double* seconds = calloc(passes, sizeof(double));
  if (!words || !parts || !running || !seconds) return fprintf(stderr, "out of memory\n"), 1;
  for (size_t i = 0; i < count * threads; i++) words[i] = i;  // else all pages are one page of zeros

  for (int pass = 0; pass < passes; pass++) {
    double start = now();
    for (int t = 0; t < threads; t++) {
      parts[t] = (struct part){words + t * count, count, 0};
      if (pthread_create(&running[t], NULL, read_part, &parts[t])) return fprintf(stderr, "no thread\n"), 1;
    }
    for (int t = 0; t < threads; t++) pthread_join(running[t], NULL);
    seconds[pass] = now() - start;
  }
  uint64_t sum = 0;
  for (int t = 0; t < threads; t++) sum += parts[t].sum;
  uint64_t n = count * threads, expected = n % 2 ? n * ((n - 1) / 2) : n / 2 * (n - 1);
  if (sum != expected) return fprintf(stderr, "read something else\n"), 1;
  qsort(seconds, passes, sizeof(double), ascending);
  printf("%.0f\n", n * sizeof(uint64_t) / seconds[passes / 2]);
  return 0;
}
