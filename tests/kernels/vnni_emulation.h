// The intrinsics of kernels/cpu/dot_avx512.h that AVX2 lacks, in plain vector code, so that it runs on any machine with
// AVX2. Included before the unit, with __AVX512VNNI__ defined.
#pragma once
#include <immintrin.h>
#include <string.h>

typedef int emulated_i32 __attribute__((vector_size(64)));
typedef unsigned char emulated_u8 __attribute__((vector_size(64)));
typedef unsigned short emulated_u16 __attribute__((vector_size(64)));

template <class V>
static inline V emulated_dpbusd(V acc, V a, V b) {
  unsigned char u[sizeof(V)];
  signed char s[sizeof(V)];
  int sum[sizeof(V) / 4];
  memcpy(u, &a, sizeof(V));
  memcpy(s, &b, sizeof(V));
  memcpy(sum, &acc, sizeof(V));
  for (unsigned i = 0; i < sizeof(V); ++i) sum[i / 4] += (int)u[i] * (int)s[i];
  memcpy(&acc, sum, sizeof(V));
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
