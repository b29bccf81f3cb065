// Conversions between float32 and the half precisions, to the nearest, ties to even. Of internal linkage throughout, so
// that a file of any level may include this (see levels.h).
#pragma once

#include <stdint.h>
#include <string.h>

namespace pagedjax {

enum class Number : int32_t { float32, bfloat16, float16 };

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static inline float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static inline float from_bfloat16(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }

static inline uint16_t to_bfloat16(float x) {
  uint32_t bits = bits_of(x);
  uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  // Rounding could turn NaN into infinity.
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
}

static inline float from_float16(uint16_t x) {
  uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16, rest = x & 0x7fff;
  if (rest >= 0x7c00) return float_of(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  // Subnormal: a multiple of 2^-24. (As subnormal float32 it would be flushed: XLA runs its threads so.)
  if (rest < 0x400) return float_of(sign | bits_of(static_cast<float>(rest) * 0x1p-24f));
  return float_of(sign | ((rest << 13) + 0x38000000));
}

static inline uint16_t to_float16(float x) {
  uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (rest >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  // Below the normal numbers: adding 0.5 makes the unit in the last place 2^-24, that of subnormal float16.
  if (rest < 0x38800000) return static_cast<uint16_t>(sign | (bits_of(float_of(rest) + 0.5f) - 0x3f000000));
  return static_cast<uint16_t>(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}

}  // namespace pagedjax
