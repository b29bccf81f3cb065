// Sixteen lanes, whatever the level's registers: what the kernels in `*_isa.cc` are written in.
//
// Floats16 and Ints16 are one AVX-512 register, two AVX2 registers, or an array that the compiler vectorises as it can.
// Everything is internal to the file that includes this (see levels.h), so each level has its own copy.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "numbers.h"

#if defined(__AVX512F__)
#define PAGEDJAX_SIMD_AVX512 1
#elif defined(__AVX2__)
#define PAGEDJAX_SIMD_AVX2 1
#endif
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace pagedjax {
namespace PAGEDJAX_LEVEL {
namespace {

#define PAGEDJAX_INLINE inline __attribute__((always_inline))

constexpr int kLanes = 16;

#if defined(PAGEDJAX_SIMD_AVX512)

struct Floats16 { __m512 v; };
struct Ints16 { __m512i v; };
struct Bytes64 { __m512i v; };

PAGEDJAX_INLINE Floats16 set1(float x) { return {_mm512_set1_ps(x)}; }
PAGEDJAX_INLINE Floats16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
PAGEDJAX_INLINE void store(float* p, Floats16 a) { _mm512_storeu_ps(p, a.v); }
PAGEDJAX_INLINE Floats16 operator+(Floats16 a, Floats16 b) { return {_mm512_add_ps(a.v, b.v)}; }
PAGEDJAX_INLINE Floats16 operator-(Floats16 a, Floats16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
PAGEDJAX_INLINE Floats16 operator*(Floats16 a, Floats16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
PAGEDJAX_INLINE Floats16 operator/(Floats16 a, Floats16 b) { return {_mm512_div_ps(a.v, b.v)}; }
PAGEDJAX_INLINE Floats16 fma(Floats16 a, Floats16 b, Floats16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
PAGEDJAX_INLINE Floats16 max(Floats16 a, Floats16 b) { return {_mm512_max_ps(a.v, b.v)}; }
PAGEDJAX_INLINE Floats16 min(Floats16 a, Floats16 b) { return {_mm512_min_ps(a.v, b.v)}; }
PAGEDJAX_INLINE Floats16 abs(Floats16 a) { return {_mm512_abs_ps(a.v)}; }
PAGEDJAX_INLINE float sum(Floats16 a) { return _mm512_reduce_add_ps(a.v); }
PAGEDJAX_INLINE float largest(Floats16 a) { return _mm512_reduce_max_ps(a.v); }
PAGEDJAX_INLINE bool any_nan(Floats16 a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q) != 0; }

PAGEDJAX_INLINE Ints16 set1_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
PAGEDJAX_INLINE Ints16 operator+(Ints16 a, Ints16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
PAGEDJAX_INLINE Ints16 operator-(Ints16 a, Ints16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
template <int bits> PAGEDJAX_INLINE Ints16 shift_left(Ints16 a) { return {_mm512_slli_epi32(a.v, bits)}; }
template <int bits> PAGEDJAX_INLINE Ints16 shift_right(Ints16 a) { return {_mm512_srai_epi32(a.v, bits)}; }
PAGEDJAX_INLINE int32_t sum(Ints16 a) { return _mm512_reduce_add_epi32(a.v); }
PAGEDJAX_INLINE Ints16 round_to_int(Floats16 a) { return {_mm512_cvtps_epi32(a.v)}; }
PAGEDJAX_INLINE Floats16 to_float(Ints16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
PAGEDJAX_INLINE Floats16 bits_as_float(Ints16 a) { return {_mm512_castsi512_ps(a.v)}; }
PAGEDJAX_INLINE void store_int8(int8_t* p, Ints16 a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }

PAGEDJAX_INLINE Floats16 load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
PAGEDJAX_INLINE Floats16 load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
PAGEDJAX_INLINE void store_bf16(uint16_t* p, Floats16 a) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a.v));
#else
  __m512i bits = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#endif
}

PAGEDJAX_INLINE Bytes64 load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
PAGEDJAX_INLINE Bytes64 low_nibbles(Bytes64 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
PAGEDJAX_INLINE Bytes64 high_nibbles(Bytes64 a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}
// Lane i plus the sum of w[4 i + j] * x[j] over j < 4, with w of 0..15 and x of -127..127.
PAGEDJAX_INLINE Ints16 dot_nibbles(Ints16 sums, Bytes64 w, const int8_t* x) {
  int32_t four;
  memcpy(&four, x, 4);
  return {_mm512_dpbusd_epi32(sums.v, w.v, _mm512_set1_epi32(four))};
}
// The same with w of -128..127 stored as w + 128. `dot_bytes_start(sum of all x)` must have been added to the sums.
PAGEDJAX_INLINE Ints16 dot_bytes(Ints16 sums, Bytes64 w, const int8_t* x) { return dot_nibbles(sums, w, x); }
PAGEDJAX_INLINE int32_t dot_bytes_start(int32_t sum_x) { return -128 * sum_x; }

#elif defined(PAGEDJAX_SIMD_AVX2)

struct Floats16 { __m256 lo, hi; };
struct Ints16 { __m256i lo, hi; };
struct Bytes64 { __m256i lo, hi; };

PAGEDJAX_INLINE Floats16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PAGEDJAX_INLINE Floats16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PAGEDJAX_INLINE void store(float* p, Floats16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
PAGEDJAX_INLINE Floats16 operator+(Floats16 a, Floats16 b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
PAGEDJAX_INLINE Floats16 operator-(Floats16 a, Floats16 b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
PAGEDJAX_INLINE Floats16 operator*(Floats16 a, Floats16 b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
PAGEDJAX_INLINE Floats16 operator/(Floats16 a, Floats16 b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
PAGEDJAX_INLINE Floats16 fma(Floats16 a, Floats16 b, Floats16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
PAGEDJAX_INLINE Floats16 max(Floats16 a, Floats16 b) {
  return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
}
PAGEDJAX_INLINE Floats16 min(Floats16 a, Floats16 b) {
  return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
}
PAGEDJAX_INLINE Floats16 abs(Floats16 a) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
PAGEDJAX_INLINE float sum(Floats16 a) {
  __m256 x = _mm256_add_ps(a.lo, a.hi);
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
PAGEDJAX_INLINE float largest(Floats16 a) {
  __m256 x = _mm256_max_ps(a.lo, a.hi);
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
PAGEDJAX_INLINE bool any_nan(Floats16 a) { return _mm256_movemask_ps(_mm256_cmp_ps(a.lo, a.hi, _CMP_UNORD_Q)) != 0; }

PAGEDJAX_INLINE Ints16 set1_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
PAGEDJAX_INLINE Ints16 operator+(Ints16 a, Ints16 b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
PAGEDJAX_INLINE Ints16 operator-(Ints16 a, Ints16 b) {
  return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}
template <int bits> PAGEDJAX_INLINE Ints16 shift_left(Ints16 a) {
  return {_mm256_slli_epi32(a.lo, bits), _mm256_slli_epi32(a.hi, bits)};
}
template <int bits> PAGEDJAX_INLINE Ints16 shift_right(Ints16 a) {
  return {_mm256_srai_epi32(a.lo, bits), _mm256_srai_epi32(a.hi, bits)};
}
PAGEDJAX_INLINE int32_t sum(Ints16 a) {
  __m256i x = _mm256_add_epi32(a.lo, a.hi);
  __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}
PAGEDJAX_INLINE Ints16 round_to_int(Floats16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
PAGEDJAX_INLINE Floats16 to_float(Ints16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
PAGEDJAX_INLINE Floats16 bits_as_float(Ints16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
PAGEDJAX_INLINE void store_int8(int8_t* p, Ints16 a) {
  // Packing works within halves of 128 bits: undo the interleaving of quarters.
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
  __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128((__m128i*)p, bytes);
}

PAGEDJAX_INLINE Floats16 load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
PAGEDJAX_INLINE Floats16 load_bf16(const uint16_t* p) {
  __m256i lo = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  __m256i hi = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8)));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(hi, 16))};
}
PAGEDJAX_INLINE __m256i bf16_bits(__m256 a) {
  __m256i bits = _mm256_castps_si256(a);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  rounded = _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
  return _mm256_srli_epi32(rounded, 16);
}
PAGEDJAX_INLINE void store_bf16(uint16_t* p, Floats16 a) {
  __m256i words = _mm256_packus_epi32(bf16_bits(a.lo), bf16_bits(a.hi));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(words, 0xd8));
}

PAGEDJAX_INLINE Bytes64 load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
PAGEDJAX_INLINE Bytes64 low_nibbles(Bytes64 a) {
  __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
PAGEDJAX_INLINE Bytes64 high_nibbles(Bytes64 a) {
  return low_nibbles({_mm256_srli_epi16(a.lo, 4), _mm256_srli_epi16(a.hi, 4)});
}
PAGEDJAX_INLINE __m256i dot4(__m256i sums, __m256i w, __m256i x) {
  // Two products of at most 15 * 127, or 128 * 127, each: no pair overflows 16 bits.
  __m256i pairs = _mm256_maddubs_epi16(w, x);
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
PAGEDJAX_INLINE Ints16 dot_nibbles(Ints16 sums, Bytes64 w, const int8_t* x) {
  int32_t four;
  memcpy(&four, x, 4);
  __m256i xs = _mm256_set1_epi32(four);
  return {dot4(sums.lo, w.lo, xs), dot4(sums.hi, w.hi, xs)};
}
PAGEDJAX_INLINE __m256i dot4_signed(__m256i sums, __m256i w, __m256i x) {
  w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
  return dot4(sums, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
}
PAGEDJAX_INLINE Ints16 dot_bytes(Ints16 sums, Bytes64 w, const int8_t* x) {
  int32_t four;
  memcpy(&four, x, 4);
  __m256i xs = _mm256_set1_epi32(four);
  return {dot4_signed(sums.lo, w.lo, xs), dot4_signed(sums.hi, w.hi, xs)};
}
PAGEDJAX_INLINE int32_t dot_bytes_start(int32_t) { return 0; }

#else  // plain C++

struct Floats16 { float v[kLanes]; };
struct Ints16 { int32_t v[kLanes]; };
struct Bytes64 { uint8_t v[4 * kLanes]; };

#define PAGEDJAX_EACH(Type, expression)                  \
  Type out;                                              \
  for (int i = 0; i < kLanes; ++i) out.v[i] = expression; \
  return out

PAGEDJAX_INLINE Floats16 set1(float x) { PAGEDJAX_EACH(Floats16, x); }
PAGEDJAX_INLINE Floats16 load(const float* p) { PAGEDJAX_EACH(Floats16, p[i]); }
PAGEDJAX_INLINE void store(float* p, Floats16 a) { memcpy(p, a.v, sizeof a.v); }
PAGEDJAX_INLINE Floats16 operator+(Floats16 a, Floats16 b) { PAGEDJAX_EACH(Floats16, a.v[i] + b.v[i]); }
PAGEDJAX_INLINE Floats16 operator-(Floats16 a, Floats16 b) { PAGEDJAX_EACH(Floats16, a.v[i] - b.v[i]); }
PAGEDJAX_INLINE Floats16 operator*(Floats16 a, Floats16 b) { PAGEDJAX_EACH(Floats16, a.v[i] * b.v[i]); }
PAGEDJAX_INLINE Floats16 operator/(Floats16 a, Floats16 b) { PAGEDJAX_EACH(Floats16, a.v[i] / b.v[i]); }
PAGEDJAX_INLINE Floats16 fma(Floats16 a, Floats16 b, Floats16 c) { PAGEDJAX_EACH(Floats16, a.v[i] * b.v[i] + c.v[i]); }
PAGEDJAX_INLINE Floats16 max(Floats16 a, Floats16 b) { PAGEDJAX_EACH(Floats16, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
PAGEDJAX_INLINE Floats16 min(Floats16 a, Floats16 b) { PAGEDJAX_EACH(Floats16, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
PAGEDJAX_INLINE Floats16 abs(Floats16 a) { PAGEDJAX_EACH(Floats16, __builtin_fabsf(a.v[i])); }
PAGEDJAX_INLINE float sum(Floats16 a) {
  float total = 0;
  for (float x : a.v) total += x;
  return total;
}
PAGEDJAX_INLINE float largest(Floats16 a) {
  float most = a.v[0];
  for (float x : a.v) most = x > most ? x : most;
  return most;
}

PAGEDJAX_INLINE bool any_nan(Floats16 a) {
  bool found = false;
  for (float x : a.v) found |= x != x;
  return found;
}

PAGEDJAX_INLINE Ints16 set1_int(int32_t x) { PAGEDJAX_EACH(Ints16, x); }
PAGEDJAX_INLINE Ints16 operator+(Ints16 a, Ints16 b) { PAGEDJAX_EACH(Ints16, a.v[i] + b.v[i]); }
PAGEDJAX_INLINE Ints16 operator-(Ints16 a, Ints16 b) { PAGEDJAX_EACH(Ints16, a.v[i] - b.v[i]); }
template <int bits> PAGEDJAX_INLINE Ints16 shift_left(Ints16 a) {
  PAGEDJAX_EACH(Ints16, (int32_t)((uint32_t)a.v[i] << bits));
}
template <int bits> PAGEDJAX_INLINE Ints16 shift_right(Ints16 a) { PAGEDJAX_EACH(Ints16, a.v[i] >> bits); }
PAGEDJAX_INLINE int32_t sum(Ints16 a) {
  int32_t total = 0;
  for (int32_t x : a.v) total += x;
  return total;
}
// To the nearest, ties to even, for magnitudes below 2^22; what is not finite becomes something harmless.
PAGEDJAX_INLINE int32_t round_one(float x) {
  constexpr float kShift = 12582912.0f;  // 1.5 * 2^23: the sum's last bit is worth 1
  float shifted = x + kShift;
  int32_t bits;
  memcpy(&bits, &shifted, 4);
  return (int32_t)((uint32_t)bits - 0x4b400000u);
}
PAGEDJAX_INLINE Ints16 round_to_int(Floats16 a) { PAGEDJAX_EACH(Ints16, round_one(a.v[i])); }
PAGEDJAX_INLINE Floats16 to_float(Ints16 a) { PAGEDJAX_EACH(Floats16, (float)a.v[i]); }
PAGEDJAX_INLINE Floats16 bits_as_float(Ints16 a) {
  Floats16 out;
  memcpy(out.v, a.v, sizeof out.v);
  return out;
}
PAGEDJAX_INLINE void store_int8(int8_t* p, Ints16 a) {
  for (int i = 0; i < kLanes; ++i) p[i] = (int8_t)a.v[i];
}

PAGEDJAX_INLINE Floats16 load_half(const uint16_t* p) { PAGEDJAX_EACH(Floats16, from_float16(p[i])); }
PAGEDJAX_INLINE Floats16 load_bf16(const uint16_t* p) { PAGEDJAX_EACH(Floats16, from_bfloat16(p[i])); }
PAGEDJAX_INLINE void store_bf16(uint16_t* p, Floats16 a) {
  for (int i = 0; i < kLanes; ++i) p[i] = to_bfloat16(a.v[i]);
}

PAGEDJAX_INLINE Bytes64 load_bytes(const uint8_t* p) {
  Bytes64 out;
  memcpy(out.v, p, sizeof out.v);
  return out;
}
PAGEDJAX_INLINE Bytes64 low_nibbles(Bytes64 a) {
  for (uint8_t& x : a.v) x &= 15;
  return a;
}
PAGEDJAX_INLINE Bytes64 high_nibbles(Bytes64 a) {
  for (uint8_t& x : a.v) x >>= 4;
  return a;
}
PAGEDJAX_INLINE Ints16 dot_nibbles(Ints16 sums, Bytes64 w, const int8_t* x) {
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < 4; ++j) sums.v[i] += w.v[4 * i + j] * x[j];
  return sums;
}
PAGEDJAX_INLINE Ints16 dot_bytes(Ints16 sums, Bytes64 w, const int8_t* x) { return dot_nibbles(sums, w, x); }
PAGEDJAX_INLINE int32_t dot_bytes_start(int32_t sum_x) { return -128 * sum_x; }
#undef PAGEDJAX_EACH

#endif

// ---- bfloat16 in pairs: sixteen lanes of (even, odd) elements -------------------------------------------------------

#if defined(__AVX512BF16__)

// Two consecutive elements of a row, as the multiplier takes them: rounded to bfloat16.
typedef uint32_t Pair;

PAGEDJAX_INLINE void store_pairs(Pair* p, Floats16 first, Floats16 second) {  // 32 elements
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(second.v, first.v));
}
// Lane i plus w[2 i] * x.even + w[2 i + 1] * x.odd, for MR rows at once.
template <int MR>
PAGEDJAX_INLINE void dot_pairs(Floats16 (&sums)[MR], const uint16_t* w, const Pair* const (&x)[MR], int64_t k) {
  __m512bh ws = (__m512bh)_mm512_loadu_si512(w);
  for (int r = 0; r < MR; ++r)
    sums[r].v = _mm512_dpbf16_ps(sums[r].v, ws, (__m512bh)_mm512_set1_epi32((int32_t)x[r][k]));
}

#else

struct Pair { float even, odd; };

PAGEDJAX_INLINE void store_pairs(Pair* p, Floats16 first, Floats16 second) {
  store(&p[0].even, first);
  store(&p[kLanes / 2].even, second);
}

#if defined(PAGEDJAX_SIMD_AVX512)
PAGEDJAX_INLINE Floats16 even_lanes(const uint16_t* w) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(w), 16))};
}
PAGEDJAX_INLINE Floats16 odd_lanes(const uint16_t* w) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(w), _mm512_set1_epi32((int)0xffff0000)))};
}
#elif defined(PAGEDJAX_SIMD_AVX2)
PAGEDJAX_INLINE Floats16 even_lanes(const uint16_t* w) {
  Bytes64 a = load_bytes((const uint8_t*)w);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(a.lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(a.hi, 16))};
}
PAGEDJAX_INLINE Floats16 odd_lanes(const uint16_t* w) {
  Bytes64 a = load_bytes((const uint8_t*)w);
  __m256i mask = _mm256_set1_epi32((int)0xffff0000);
  return {_mm256_castsi256_ps(_mm256_and_si256(a.lo, mask)), _mm256_castsi256_ps(_mm256_and_si256(a.hi, mask))};
}
#else
PAGEDJAX_INLINE Floats16 even_lanes(const uint16_t* w) {
  Floats16 out;
  for (int i = 0; i < kLanes; ++i) out.v[i] = from_bfloat16(w[2 * i]);
  return out;
}
PAGEDJAX_INLINE Floats16 odd_lanes(const uint16_t* w) { return even_lanes(w + 1); }
#endif

template <int MR>
PAGEDJAX_INLINE void dot_pairs(Floats16 (&sums)[MR], const uint16_t* w, const Pair* const (&x)[MR], int64_t k) {
  Floats16 even = even_lanes(w), odd = odd_lanes(w);
  for (int r = 0; r < MR; ++r) {
    sums[r] = fma(even, set1(x[r][k].even), sums[r]);
    sums[r] = fma(odd, set1(x[r][k].odd), sums[r]);
  }
}

#endif

// ---- functions ------------------------------------------------------------------------------------------------------

// e^x to 2 units in the last place, for x clamped to [-87, 88]; the polynomial is Cephes'.
PAGEDJAX_INLINE Floats16 exp(Floats16 x) {
  x = max(min(x, set1(88.0f)), set1(-87.0f));
  Ints16 power = round_to_int(x * set1(1.44269504f));
  Floats16 n = to_float(power);
  Floats16 r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  Floats16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.0f));
  return p * bits_as_float(shift_left<23>(power + set1_int(127)));
}

PAGEDJAX_INLINE Floats16 silu(Floats16 x) { return x / (set1(1.0f) + exp(set1(0.0f) - x)); }

}  // namespace
}  // namespace PAGEDJAX_LEVEL
}  // namespace pagedjax
