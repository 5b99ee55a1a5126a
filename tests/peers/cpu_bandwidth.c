// How fast this machine reads memory: `cpu_bandwidth THREADS MIB PASSES` prints bytes/s, the median of the passes.
// Every thread reads a part of its own of one array that no cache holds, in several places at once: one stream of reads
// does not fill a memory channel.

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { STREAMS = 4, AHEAD = 32 };  // AHEAD: vectors asked for before their use

// Vectors are written out: a compiler left to choose may gather words of several iterations, which costs more than the
// memory does.
typedef uint64_t vector __attribute__((vector_size(64)));

struct part {
  const vector* vectors;
  size_t count;  // a multiple of STREAMS
  uint64_t sum;
};

static void* read_part(void* argument) {
  struct part* part = argument;
  vector sums[STREAMS] = {0};
  size_t length = part->count / STREAMS;
  for (size_t i = 0; i < length; i++)
    for (int s = 0; s < STREAMS; s++) {
      const vector* next = part->vectors + s * length + i;
      __builtin_prefetch(next + AHEAD, 0, 2);
      sums[s] += *next;
    }
  for (int s = 0; s < STREAMS; s++)
    for (size_t i = 0; i < sizeof(vector) / sizeof(uint64_t); i++) part->sum += sums[s][i];
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
  size_t count = ((size_t)atoi(argv[2]) << 20) / sizeof(vector) / threads / STREAMS * STREAMS;
  size_t n = count * threads * (sizeof(vector) / sizeof(uint64_t));
  uint64_t* words = aligned_alloc(sizeof(vector), n * sizeof(uint64_t));
  struct part* parts = calloc(threads, sizeof(struct part));
  pthread_t* running = calloc(threads, sizeof(pthread_t));
  double* seconds = calloc(passes, sizeof(double));
  if (!words || !parts || !running || !seconds) return fprintf(stderr, "out of memory\n"), 1;
  for (size_t i = 0; i < n; i++) words[i] = i;  // else all pages are one page of zeros

  for (int pass = 0; pass < passes; pass++) {
    double start = now();
    for (int t = 0; t < threads; t++) {
      parts[t] = (struct part){(const vector*)words + t * count, count, 0};
      if (pthread_create(&running[t], NULL, read_part, &parts[t])) return fprintf(stderr, "no thread\n"), 1;
    }
    for (int t = 0; t < threads; t++) pthread_join(running[t], NULL);
    seconds[pass] = now() - start;
  }
  uint64_t sum = 0;
  for (int t = 0; t < threads; t++) sum += parts[t].sum;
  uint64_t expected = n % 2 ? n * ((n - 1) / 2) : n / 2 * (n - 1);
  if (sum != expected) return fprintf(stderr, "read something else\n"), 1;
  qsort(seconds, passes, sizeof(double), ascending);
  printf("%.0f\n", n * sizeof(uint64_t) / seconds[passes / 2]);
  return 0;
}
