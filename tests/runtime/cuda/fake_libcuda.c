// A recording libcuda.so.1 for tests: what cuda-bindings asks of it, with host memory as device memory.
//
// Every call appends a line to $FAKE_CUDA_LOG. A stream is a queue that runs when it is waited for, so that host memory
// which is changed too early is seen. Code at byte 64 of a binary is a text `FAKE name arguments bytes`; two kernels do:
// `sample` (meta, tokens, rows, out tokens, out log probabilities) and `repack` (from, to: `bytes` inverted bytes).
// $FAKE_CUDA_TOTAL, _USED: bytes of the device. _VERSION, _DEVICES. _SYNC_MS: how long a synchronize takes.
// $FAKE_CUDA_FAIL: `function:n:code,...`: the n-th call of a function fails; codes of 700 and more break the context.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef uint64_t u64;
enum { kMaxArgs = 30, kMaxOps = 65536, kMaxAllocations = 256 };

typedef struct { char name[64]; int num_args; int bytes; } Function;
typedef struct { Function* function; unsigned grid[3], block[3], shared; u64 args[kMaxArgs]; } Launch;
typedef struct { Launch* launches; int count; } Graph;
typedef struct { int kind; void* to; const void* from; size_t size; Launch launch; } Op;
enum { kCopy, kFill, kLaunch, kEvent };

static Op* queue;
static int queued;
static int capturing;
static Graph* recording;
static int broken;
static __thread void* current;
static struct { u64 address, size; } allocations[kMaxAllocations];
static u64 used;

static long setting(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text ? atol(text) : otherwise;
}

#define LOG(...)                                        \
  do {                                                  \
    FILE* file = fopen(getenv("FAKE_CUDA_LOG"), "a");   \
    fprintf(file, __VA_ARGS__);                         \
    fputc('\n', file);                                  \
    fclose(file);                                       \
  } while (0)

// The error that a call of `name` shall return now, 0 for none.
static int planned(const char* name) {
  static struct { char name[64]; int calls; } seen[128];
  int at = 0;
  while (seen[at].name[0] && strcmp(seen[at].name, name)) at++;
  strcpy(seen[at].name, name);
  int call = ++seen[at].calls;
  const char* plan = getenv("FAKE_CUDA_FAIL");
  char text[256] = "", *rest = text, *entry;
  if (plan) strncpy(text, plan, sizeof text - 1);
  while ((entry = strsep(&rest, ",")) != NULL) {
    char function[64];
    int n, code;
    if (sscanf(entry, "%63[^:]:%d:%d", function, &n, &code) == 3 && !strcmp(function, name) && n == call) {
      if (code >= 700 && code < 800) broken = code;
      return code;
    }
  }
  return 0;
}

#define ENTER_PLAIN                                          \
  do {                                                       \
    int code = planned(__func__);                            \
    if (code) { LOG("%s fails %d", __func__, code); return code; } \
    if (broken) { LOG("%s on a broken device", __func__); return broken; } \
  } while (0)
#define ENTER           \
  do {                  \
    ENTER_PLAIN;        \
    if (!current) return 201; \
  } while (0)

static void execute(const Launch* l) {
  if (!strcmp(l->function->name, "sample")) {
    const int32_t *meta = (void*)l->args[0], *tokens = (void*)l->args[1], *rows = (void*)l->args[2];
    for (int i = 0; i < meta[1]; i++) {
      ((int32_t*)l->args[3])[i] = tokens[rows[i]] + 1;
      ((float*)l->args[4])[i] = -0.5f * tokens[rows[i]];
    }
  } else if (!strcmp(l->function->name, "repack")) {
    for (int i = 0; i < l->function->bytes; i++) ((uint8_t*)l->args[1])[i] = ~((uint8_t*)l->args[0])[i];
  }
}

static Op* push(int kind) {
  if (!queue) queue = calloc(kMaxOps, sizeof *queue);
  if (queued == kMaxOps) abort();
  queue[queued].kind = kind;
  return &queue[queued++];
}

// Runs the queue, up to the last record of an event if one is named.
static void drain(const void* event) {
  int count = queued;
  if (event) {
    count = 0;
    for (int i = 0; i < queued; i++) if (queue[i].kind == kEvent && queue[i].from == event) count = i + 1;
  }
  for (int i = 0; i < count; i++) {
    Op* op = &queue[i];
    if (op->kind == kCopy) memcpy(op->to, op->from, op->size);
    if (op->kind == kFill) memset(op->to, 0, op->size);
    if (op->kind == kLaunch) execute(&op->launch);
  }
  memmove(queue, queue + count, (queued - count) * sizeof *queue);
  queued -= count;
}

int cuInit(unsigned flags) { ENTER_PLAIN; return 0; }
int cuDriverGetVersion(int* v) { ENTER_PLAIN; *v = setting("FAKE_CUDA_VERSION", 12040); return 0; }
int cuDeviceGetCount(int* n) { ENTER_PLAIN; *n = setting("FAKE_CUDA_DEVICES", 1); return 0; }
int cuDeviceGet(int* d, int i) { ENTER_PLAIN; *d = i; return 0; }
int cuDeviceGetName(char* name, int n, int d) { ENTER_PLAIN; snprintf(name, n, "Fake GPU"); return 0; }
int cuDeviceGetAttribute(int* v, int attribute, int d) {
  ENTER_PLAIN;
  *v = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 3 : -1;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** c, int d) { ENTER_PLAIN; LOG("retain"); *c = &current; return 0; }
int cuDevicePrimaryCtxRelease(int d) { ENTER_PLAIN; LOG("release"); return 0; }
int cuCtxSetCurrent(void* c) { ENTER_PLAIN; current = c; return 0; }

int cuMemGetInfo(size_t* free_bytes, size_t* total) {
  ENTER;
  *total = setting("FAKE_CUDA_TOTAL", 64 << 20);
  *free_bytes = *total - setting("FAKE_CUDA_USED", 0) - used;
  return 0;
}
int cuMemAlloc(u64* address, size_t size) {
  size_t free_bytes, total;
  ENTER;
  cuMemGetInfo(&free_bytes, &total);
  if (size > free_bytes) { LOG("alloc %zu fails", size); return 2; }
  int at = 0;
  while (allocations[at].address) at++;
  *address = (u64)aligned_alloc(256, (size + 255) / 256 * 256);
  memset((void*)*address, 0xAA, size);
  allocations[at].address = *address;
  allocations[at].size = size;
  used += size;
  LOG("alloc %zu %lu", size, *address);
  return 0;
}
int cuMemFree(u64 address) {
  ENTER;
  for (int at = 0; at < kMaxAllocations; at++) {
    if (allocations[at].address == address) {
      LOG("free %lu", address);
      used -= allocations[at].size;
      allocations[at].address = 0;
      free((void*)address);
      return 0;
    }
  }
  return 1;
}
int cuMemsetD8Async(u64 to, unsigned char value, size_t n, void* s) {
  ENTER;
  LOG("fill %lu %d %zu", to, value, n);
  Op* op = push(kFill);
  op->to = (void*)to; op->size = n;
  return 0;
}
int cuMemHostAlloc(void** p, size_t n, unsigned flags) { ENTER; *p = malloc(n); LOG("host %zu %lu", n, (u64)*p); return 0; }
int cuMemFreeHost(void* p) { ENTER; LOG("free_host %lu", (u64)p); free(p); return 0; }

static int copy(void* to, const void* from, size_t n) {
  if (capturing) return 900;
  Op* op = push(kCopy);
  op->to = to; op->from = from; op->size = n;
  return 0;
}
int cuMemcpyHtoDAsync(u64 to, const void* from, size_t n, void* s) { ENTER; LOG("h2d %lu %zu", to, n); return copy((void*)to, from, n); }
int cuMemcpyDtoHAsync(void* to, u64 from, size_t n, void* s) { ENTER; LOG("d2h %lu %zu", from, n); return copy(to, (void*)from, n); }

int cuStreamCreate(void** s, unsigned flags) { ENTER; LOG("stream %u", flags); *s = &queue; return 0; }
int cuStreamDestroy(void* s) { ENTER; return 0; }
int cuStreamSynchronize(void* s) {
  ENTER;
  if (capturing) return 900;
  usleep(1000 * setting("FAKE_CUDA_SYNC_MS", 0));
  drain(NULL);
  LOG("synchronize");
  return 0;
}
int cuEventCreate(void** e, unsigned flags) { ENTER; *e = malloc(1); return 0; }
int cuEventRecord(void* e, void* s) { ENTER; push(kEvent)->from = e; return 0; }
int cuEventSynchronize(void* e) { ENTER; drain(e); return 0; }
int cuEventDestroy(void* e) { ENTER; free(e); return 0; }

int cuModuleLoadData(void** module, const void* image) {
  ENTER;
  Function* f = calloc(1, sizeof *f);
  if (sscanf((const char*)image + 64, "FAKE %63s %d %d", f->name, &f->num_args, &f->bytes) != 3) { free(f); return 200; }
  LOG("load %s", f->name);
  *module = f;
  return 0;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
  ENTER;
  if (strcmp(((Function*)module)->name, name)) return 500;
  *function = module;
  return 0;
}
int cuModuleUnload(void* module) { ENTER; free(module); return 0; }
int cuFuncSetAttribute(Function* f, int attribute, int value) {
  ENTER;
  LOG("attribute %s %d %d", f->name, attribute, value);
  return 0;
}

int cuLaunchKernel(Function* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* stream, void** params, void** extra) {
  ENTER;
  Launch l = {f, {gx, gy, gz}, {bx, by, bz}, shared, {0}};
  char text[1024] = "";
  for (int i = 0; i < f->num_args + 2; i++) {
    l.args[i] = *(u64*)params[i];
    sprintf(text + strlen(text), " %lu", l.args[i]);
  }
  LOG("%s %s %u,%u,%u %u,%u,%u %u%s", capturing ? "record" : "launch", f->name, gx, gy, gz, bx, by, bz, shared, text);
  if (capturing) {
    recording->launches = realloc(recording->launches, (recording->count + 1) * sizeof l);
    recording->launches[recording->count++] = l;
  } else {
    push(kLaunch)->launch = l;
  }
  return 0;
}

int cuStreamBeginCapture(void* s, int mode) {
  ENTER;
  LOG("begin_capture %d", mode);
  capturing = 1;
  recording = calloc(1, sizeof *recording);
  return 0;
}
int cuStreamEndCapture(void* s, void** graph) {
  capturing = 0;
  ENTER;
  LOG("end_capture");
  *graph = recording;
  return 0;
}
int cuGraphInstantiateWithFlags(void** executable, Graph* graph, u64 flags) {
  ENTER;
  Graph* copy = malloc(sizeof *copy);
  *copy = *graph;
  LOG("instantiate %d", copy->count);
  *executable = copy;
  return 0;
}
int cuGraphDestroy(void* graph) { ENTER; LOG("destroy_graph"); return 0; }
int cuGraphLaunch(Graph* graph, void* s) {
  ENTER;
  LOG("replay %d", graph->count);
  for (int i = 0; i < graph->count; i++) push(kLaunch)->launch = graph->launches[i];
  return 0;
}
int cuGraphExecDestroy(void* executable) { ENTER; LOG("discard"); return 0; }

int cuGetErrorName(int code, const char** name) {
  *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 100 ? "CUDA_ERROR_NO_DEVICE" : code == 200 ? "CUDA_ERROR_INVALID_IMAGE"
        : code == 500 ? "CUDA_ERROR_NOT_FOUND" : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : code == 701
        ? "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES" : code == 1 ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_OTHER";
  return 0;
}
int cuGetErrorString(int code, const char** text) { *text = "as planned"; return 0; }

int cuGetProcAddress_v2(const char* name, void** function, int version, u64 flags, int* status) {
  Dl_info self;
  dladdr((void*)cuInit, &self);
  void* library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  int hidden = getenv("FAKE_CUDA_HIDE") && !strcmp(getenv("FAKE_CUDA_HIDE"), name);
  *function = hidden ? NULL : dlsym(library, name);
  if (status) *status = *function ? 0 : 1;
  return *function ? 0 : 500;
}
