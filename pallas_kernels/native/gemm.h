// A product of activations [rows, in] with packed weights [out, in], and what lies around it:
//
//   out = residual + act(norm(x) @ weight.T + bias)
//
// norm is RMSNorm; act is nothing, or SwiGLU of the first half of the outputs (gate) and the second (up).
//
// Weights are packed in blocks of 16 outputs, so that one vector holds 16 outputs at the same inputs and a row's input
// is broadcast: sums never cross lanes, and a block is one run of memory. In a block, from input 0 up:
//
//   bf16     each pair of inputs: 16 x 2 bfloat16. An odd last input is paired with zero.
//   nibbles  each group of 32 inputs: 4 x 64 bytes, each with inputs 8 j .. 8 j + 3 of its 16 outputs in the low halves and
//            inputs 8 j + 4 .. 8 j + 7 in the high ones; then 16 scales and 16 minima, float16. Value: scale * q + minimum.
//   bytes    each group of 32 inputs: 8 x 64 bytes, four inputs of 16 outputs each, stored as q + 128; then 16 scales.
//            Value: scale * q.
//
// For nibbles and bytes, each row of x is quantised by groups of 32 to 8 bits. Where `fine`, the few groups that stand out
// of their row, in which an outlier takes the bits of its neighbours, keep 8 bits more: a second product over these alone.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "levels.h"

namespace pagedjax {

enum class Format : int32_t { bf16, nibbles, bytes };

constexpr int64_t kBlockOutputs = 16;
constexpr int64_t kGroup = 32;

// A row-major array of float32 or bfloat16; null data: not there.
struct FloatArray {
  void* data;
  bool is_bf16;
};

// The largest result of a row and the first output that has it; the value is NaN where any result is.
struct Largest {
  float value;
  int32_t output;
};

struct Gemm {
  Format format;
  bool fine;   // groups of inputs that stand out are quantised finer
  bool gated;  // SwiGLU: num_results is half of num_outputs
  int64_t num_rows, num_inputs, num_outputs, num_results;
  const uint8_t* weight;
  int64_t block_bytes;
  FloatArray x, bias, residual, out;
  const float* norm;  // [num_inputs], or null
  float eps;
  uint8_t* prepared;  // num_rows * prepared_bytes
  // [num_rows] to which results are reduced, columns in ascending order, in place of being written; or null.
  Largest* largest;
};

// One level's kernels.
struct GemmKernels {
  // Results of one tile: column ranges passed to `multiply` begin at its multiples.
  int64_t (*tile_columns)(const Gemm&);
  // Bytes of a row of x as the products take it, a multiple of 64.
  size_t (*prepared_bytes)(const Gemm&);
  // Norm, then round or quantise, rows [begin, end).
  void (*prepare)(const Gemm&, int64_t begin, int64_t end);
  // Results [column_begin, column_end) of rows [row_begin, row_end). The thread will likely go on at `next_column`, whose
  // weights are fetched meanwhile; num_results: nowhere.
  void (*multiply)(const Gemm&, int64_t row_begin, int64_t row_end, int64_t column_begin, int64_t column_end,
                   int64_t next_column);
};

}  // namespace pagedjax

PAGEDJAX_DECLARE_LEVELS(GemmKernels, gemm_kernels)
