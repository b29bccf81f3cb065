// Vectors of float32 for attention_isa.cc, at the level that the file is compiled for.
//
// NaN must get through: `larger` gives its second operand where one is NaN, and `power_of_two` keeps it.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "numbers.h"

namespace pagedjax {
namespace PAGEDJAX_LEVEL {
namespace {

#if defined(__AVX512F__)

constexpr int kLanes = 16;
// Rows by columns of accumulators that fit the registers beside their operands.
constexpr int kMaxRows = 6, kMaxColumns = 4;
using F = __m512;

inline F every(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F multiply_add(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F larger(F a, F b) { return _mm512_max_ps(a, b); }
inline F first_lanes(F x, int n, F rest) { return _mm512_mask_mov_ps(rest, static_cast<__mmask16>((1u << n) - 1), x); }
inline float sum(F x) { return _mm512_reduce_add_ps(x); }
inline float largest(F x) { return _mm512_reduce_max_ps(x); }
inline F nearest(F x) { return _mm512_roundscale_ps(x, 0); }
inline F scaled(F x, F power) { return _mm512_scalef_ps(x, power); }
inline F load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Of pairs of bfloat16: the first of each, and the second.
inline F firsts(const uint16_t* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
inline F seconds(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(-65536)));
}
// Of pairs of whole numbers in bytes.
inline __m512i words(const int8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline F firsts(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words(p), 16), 16)); }
inline F seconds(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_srai_epi32(words(p), 16)); }

#elif defined(__AVX2__)

constexpr int kLanes = 8;
constexpr int kMaxRows = 4, kMaxColumns = 2;
using F = __m256;

inline F every(float x) { return _mm256_set1_ps(x); }
inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x); }
inline F multiply_add(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F larger(F a, F b) { return _mm256_max_ps(a, b); }
inline F first_lanes(F x, int n, F rest) {
  __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_blendv_ps(rest, x, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes)));
}
inline float sum(F x) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float largest(F x) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
inline F nearest(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F scaled(F x, F power) {
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(power), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline F load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline F firsts(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 16));
}
inline F seconds(const uint16_t* p) {
  __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-65536)));
}
inline __m256i words(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline F firsts(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(words(p), 16), 16)); }
inline F seconds(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(words(p), 16)); }

#else

// Vectors of the compiler: SSE2, NEON, or whatever the machine has.
constexpr int kLanes = 4;
constexpr int kMaxRows = 4, kMaxColumns = 2;
typedef float F __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(16)));

inline F every(float x) { return F{x, x, x, x}; }
inline F load(const float* p) {
  F x;
  memcpy(&x, p, sizeof x);
  return x;
}
inline void store(float* p, F x) { memcpy(p, &x, sizeof x); }
inline F multiply_add(F a, F b, F c) { return a * b + c; }
inline F larger(F a, F b) { return a > b ? a : b; }
inline F first_lanes(F x, int n, F rest) {
  for (int i = n; i < kLanes; ++i) x[i] = rest[i];
  return x;
}
inline float sum(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }
inline float largest(F x) {
  float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
  return a > b ? a : b;
}
// Adding 1.5 * 2^23 leaves no bits behind the point; the sum's last bits are the whole number.
constexpr float kRounder = 12582912.0f;
inline F nearest(F x) { return (x + kRounder) - kRounder; }
inline F scaled(F x, F power) {
  F sum = power + kRounder;
  Bits bits;
  memcpy(&bits, &sum, sizeof bits);
  bits = (bits + 127) << 23;
  F factor;
  memcpy(&factor, &bits, sizeof factor);
  return x * factor;
}
inline F load_half(const uint16_t* p) {
  return F{from_float16(p[0]), from_float16(p[1]), from_float16(p[2]), from_float16(p[3])};
}
inline F from_pairs(const uint16_t* p, uint32_t mask, int shift) {
  Bits bits;
  memcpy(&bits, p, sizeof bits);
  bits = (bits & mask) << shift;
  F x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
inline F firsts(const uint16_t* p) { return from_pairs(p, 0x0000ffff, 16); }
inline F seconds(const uint16_t* p) { return from_pairs(p, 0xffff0000, 0); }
inline F firsts(const int8_t* p) { return F{(float)p[0], (float)p[2], (float)p[4], (float)p[6]}; }
inline F seconds(const int8_t* p) { return firsts(p + 1); }

#endif

// 2^x for x <= 0, at least 2^-126. The relative error is below 2e-7, and 2^0 is 1.
inline F power_of_two(F x) {
  x = larger(every(-126.0f), x);
  F whole = nearest(x), part = x - whole;  // part within half of zero: powers of ln 2 over factorials
  F y = every(1.540353e-4f);
  y = multiply_add(y, part, every(1.3333558e-3f));
  y = multiply_add(y, part, every(9.6181291e-3f));
  y = multiply_add(y, part, every(5.5504109e-2f));
  y = multiply_add(y, part, every(2.4022651e-1f));
  y = multiply_add(y, part, every(6.9314718e-1f));
  y = multiply_add(y, part, every(1.0f));
  return scaled(y, whole);
}

inline float power_of_two(float x) {
  float lanes[kLanes];
  store(lanes, power_of_two(every(x)));
  return lanes[0];
}

}  // namespace
}  // namespace PAGEDJAX_LEVEL
}  // namespace pagedjax
