// The AVX-512 intrinsics of kernels/cpu/dot.h in plain vector code, so that its VNNI branch runs on any x86 machine.
// Included before the unit, with __AVX512VNNI__ defined.
#pragma once
#include <immintrin.h>
#include <string.h>

typedef int emulated_i32 __attribute__((vector_size(64)));
typedef unsigned char emulated_u8 __attribute__((vector_size(64)));
typedef unsigned short emulated_u16 __attribute__((vector_size(64)));

static inline __m512i emulated_dpbusd(__m512i acc, __m512i a, __m512i b) {
  unsigned char u[64];
  signed char s[64];
  int sum[16];
  memcpy(u, &a, 64);
  memcpy(s, &b, 64);
  memcpy(sum, &acc, 64);
  for (int i = 0; i < 64; ++i) sum[i / 4] += (int)u[i] * (int)s[i];
  memcpy(&acc, sum, 64);
  return acc;
}
static inline __m512i emulated_load(const void* p) {
  __m512i v;
  memcpy(&v, p, 64);
  return v;
}
static inline __m512i emulated_set1(int x) { return (__m512i)(emulated_i32{} + x); }
static inline __m512i emulated_set1_8(char x) { return (__m512i)(emulated_u8{} + (unsigned char)x); }

#define _mm512_dpbusd_epi32(acc, a, b) emulated_dpbusd(acc, a, b)
#define _mm512_loadu_si512(p) emulated_load(p)
#define _mm512_set1_epi32(x) emulated_set1(x)
#define _mm512_set1_epi8(x) emulated_set1_8(x)
#define _mm512_and_si512(a, b) ((__m512i)((emulated_i32)(a) & (emulated_i32)(b)))
#define _mm512_srli_epi16(a, n) ((__m512i)((emulated_u16)(a) >> (n)))
