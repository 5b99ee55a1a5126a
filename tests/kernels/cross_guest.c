// Calls functions of a shared object on behalf of cross_guest.py, in a process of another architecture (AAPCS64).
//
//   guest OBJECT MEMORY SIZE
//
// MEMORY is a file of SIZE bytes that both sides map; its address here is the first thing written to standard output.
// Then every Call on standard input is made and answered by its result, until the input ends.
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

typedef struct {
  char name[96];
  uint64_t x[8];      // integer registers
  double v[8];        // the low lanes of the vector registers
  uint64_t stack[8];  // arguments beyond the registers
} Call;

typedef uint64_t Function(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, double,
                          double, double, double, double, double, double, double, uint64_t, uint64_t, uint64_t,
                          uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);

static void answer(uint64_t value) {
  fwrite(&value, sizeof(value), 1, stdout);
  fflush(stdout);
}

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  void* object = dlopen(argv[1], RTLD_NOW);
  if (object == NULL) return fprintf(stderr, "%s\n", dlerror()), 3;
  int fd = open(argv[2], O_RDWR);
  void* memory = mmap(NULL, strtoull(argv[3], NULL, 10), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return perror(argv[2]), 4;
  answer((uint64_t)memory);
  Call c;
  while (fread(&c, sizeof(c), 1, stdin) == 1) {
    Function* f = (Function*)dlsym(object, c.name);
    if (f == NULL) return fprintf(stderr, "no function %s\n", c.name), 5;
    const uint64_t *x = c.x, *s = c.stack;
    const double* v = c.v;
    answer(f(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], s[0],
             s[1], s[2], s[3], s[4], s[5], s[6], s[7]));
  }
  return 0;
}
