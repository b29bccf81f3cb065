// Rows of x as the products of gemm_isa.cc take them, at one level of instructions: normed, then rounded or quantised.
#pragma once

#include "gemm.h"
#include "simd.h"

namespace pagedjax {
namespace PAGEDJAX_LEVEL {
namespace {

// A group stands out when its peak is above so many times the mean peak of its row: at most one in so many does.
constexpr float kOutlier = 4.0f;
// What is left of a value is within half a step, so these units of a step fill 8 bits.
constexpr float kLowUnits = 254.0f;

// ---- one row of x, 32 inputs at a time ------------------------------------------------------------------------------

struct Floats32 { Floats16 a, b; };

PAGEDJAX_INLINE Floats32 load32(const FloatArray& array, int64_t offset) {
  if (array.is_bf16) {
    const uint16_t* p = (const uint16_t*)array.data + offset;
    return {load_bf16(p), load_bf16(p + kLanes)};
  }
  const float* p = (const float*)array.data + offset;
  return {load(p), load(p + kLanes)};
}

// The last `count` < 32 elements, then zeros.
Floats32 load_last(const FloatArray& array, int64_t offset, int64_t count) {
  alignas(64) uint8_t buffer[32 * sizeof(float)] = {};
  size_t size = array.is_bf16 ? 2 : 4;
  memcpy(buffer, (const uint8_t*)array.data + offset * size, count * size);
  return load32({buffer, array.is_bf16}, 0);
}

PAGEDJAX_INLINE Floats32 load_inputs(const FloatArray& array, int64_t row_offset, int64_t k, int64_t num_inputs) {
  return k + 32 <= num_inputs ? load32(array, row_offset + k) : load_last(array, row_offset + k, num_inputs - k);
}

// One row after the norm.
struct Row {
  const Gemm& gemm;
  int64_t offset;
  Floats16 inverse_rms;

  Row(const Gemm& g, int64_t row) : gemm(g), offset(row * g.num_inputs), inverse_rms(set1(1.0f)) {
    if (g.norm == nullptr) return;
    Floats16 squares = set1(0.0f);
    for (int64_t k = 0; k < g.num_inputs; k += 32) {
      Floats32 x = load_inputs(g.x, offset, k, g.num_inputs);
      squares = fma(x.a, x.a, fma(x.b, x.b, squares));
    }
    inverse_rms = set1(1.0f / __builtin_sqrtf(sum(squares) / (float)g.num_inputs + g.eps));
  }

  PAGEDJAX_INLINE Floats32 at(int64_t k) const {
    Floats32 x = load_inputs(gemm.x, offset, k, gemm.num_inputs);
    if (gemm.norm == nullptr) return x;
    Floats32 w = load_inputs({(void*)gemm.norm, false}, 0, k, gemm.num_inputs);
    return {x.a * inverse_rms * w.a, x.b * inverse_rms * w.b};
  }
};

// ---- prepared rows --------------------------------------------------------------------------------------------------

PAGEDJAX_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// A quantised row. Each group of 32 inputs has a scale, 8-bit digits, and its sum: of x for nibbles, of digits, as the
// start of integer sums, for bytes. Where inputs are `fine`, groups that stand out have a second digit, in units of
// scale / kLowUnits; the digits of the others are 0.
struct QuantisedRow {
  float* scales;  // [num_groups]
  union {
    float* sums;
    int32_t* starts;
  };
  int32_t* low_starts;  // where fine, like the rest
  uint8_t* is_outlier;
  int8_t* high;  // [num_inputs]
  int8_t* low;

  QuantisedRow(const Gemm& g, uint8_t* p) {
    int64_t num_groups = g.num_inputs / kGroup;
    scales = (float*)p;
    sums = scales + num_groups;
    high = (int8_t*)(sums + num_groups);
    low = high + g.num_inputs;
    low_starts = (int32_t*)(low + g.num_inputs);
    is_outlier = (uint8_t*)(low_starts + num_groups);
  }
  static int64_t num_bytes(const Gemm& g) {
    int64_t num_groups = g.num_inputs / kGroup;
    return num_groups * 2 * 4 + g.num_inputs + (g.fine ? g.num_inputs + num_groups * 5 : 0);
  }
};

size_t prepared_bytes(const Gemm& g) {
  bool is_bf16 = g.format == Format::bf16;
  int64_t bytes = is_bf16 ? round_up(g.num_inputs, 32) / 2 * (int64_t)sizeof(Pair) : QuantisedRow::num_bytes(g);
  return (size_t)round_up(bytes, 64);
}

// Digits from half steps below to half steps above each value.
struct Digits { Ints16 a, b; };

PAGEDJAX_INLINE Digits rounded(Floats32 x, float inverse) {
  return {round_to_int(x.a * set1(inverse)), round_to_int(x.b * set1(inverse))};
}

PAGEDJAX_INLINE int32_t store_digits(int8_t* to, Digits digits) {
  store_int8(to, digits.a);
  store_int8(to + kLanes, digits.b);
  return sum(digits.a + digits.b);
}

PAGEDJAX_INLINE float peak_of(Floats32 x) { return largest(max(abs(x.a), abs(x.b))); }

PAGEDJAX_INLINE void quantise_group(const QuantisedRow& to, int64_t group, Floats32 x, float outlier, const Gemm& g) {
  float peak = peak_of(x);
  float inverse = peak > 0.0f ? 127.0f / peak : 0.0f;
  // Comparisons pass over NaN, and a NaN must spoil its row: 0 * x is 0 unless x is not finite.
  float scale = peak / 127.0f + 0.0f * sum(x.a + x.b);
  Digits high = rounded(x, inverse);
  int32_t total = store_digits(to.high + group * kGroup, high), low_total = 0;
  if (g.fine) {
    to.is_outlier[group] = peak > outlier;
    Digits low{set1_int(0), set1_int(0)};
    if (peak > outlier) {
      Floats16 unit = set1(scale);
      low = rounded({x.a - to_float(high.a) * unit, x.b - to_float(high.b) * unit}, inverse * kLowUnits);
    }
    low_total = store_digits(to.low + group * kGroup, low);
    to.low_starts[group] = dot_bytes_start(low_total);
  }
  to.scales[group] = scale;
  if (g.format == Format::nibbles) {
    to.sums[group] = scale * ((float)total + (float)low_total / kLowUnits);
  } else {
    to.starts[group] = dot_bytes_start(total);
  }
}

// The peak above which a group of the row stands out.
float outlier_peak(const Row& row, int64_t num_groups) {
  float total = 0.0f;
  for (int64_t group = 0; group < num_groups; ++group) total += peak_of(row.at(group * kGroup));
  return kOutlier * total / (float)num_groups;
}

void prepare(const Gemm& g, int64_t begin, int64_t end) {
  size_t stride = prepared_bytes(g);
  int64_t num_groups = g.num_inputs / kGroup;
  for (int64_t r = begin; r < end; ++r) {
    Row row(g, r);
    uint8_t* to = g.prepared + r * stride;
    if (g.format == Format::bf16) {
      for (int64_t k = 0; k < g.num_inputs; k += 32) {
        Floats32 x = row.at(k);
        store_pairs((Pair*)to + k / 2, x.a, x.b);
      }
    } else {
      QuantisedRow quantised(g, to);
      float outlier = g.fine ? outlier_peak(row, num_groups) : 0.0f;
      for (int64_t group = 0; group < num_groups; ++group)
        quantise_group(quantised, group, row.at(group * kGroup), outlier, g);
    }
  }
}

}  // namespace
}  // namespace PAGEDJAX_LEVEL
}  // namespace pagedjax
