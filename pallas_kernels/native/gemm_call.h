// What the handlers of products share: the sizes of what they are given, and a product cut up among the threads.
#pragma once

#include "gemm.h"
#include "xla/ffi/api/ffi.h"

namespace pagedjax {

// Bytes that a block of 16 outputs takes, by the format and the number of inputs.
int64_t packed_block_bytes(const Gemm& gemm);

// Whether `weight` has the bytes that the gemm's outputs take from byte `offset` on; sets where they lie, and has idle
// threads fetch what lies behind them: the next product's weight, where weights are joined in their order of use.
bool use_weight(const xla::ffi::AnyBuffer& weight, int64_t offset, Gemm* gemm);

// Whether `buffer` is `count` numbers of float32 or bfloat16; sets `array` to them.
bool read_floats(const xla::ffi::AnyBuffer& buffer, int64_t count, FloatArray* array);

// Why there is no product of that format and size, or null.
const char* refusal(const Gemm& gemm);

// How a product is cut into tasks, each a range of rows by a range of columns of the results.
struct Cut {
  int64_t rows, columns, num_row_parts, num_column_parts;
};

// Prepares the rows of x, in the calling thread's scratch, and cuts the product into tasks.
Cut prepare_and_cut(Gemm* gemm, const GemmKernels& kernels);

// Task `index` of a cut; its column part is `index % num_column_parts`. `next` is that of `parallel_for_in_turn`.
void multiply_part(const Gemm& gemm, const GemmKernels& kernels, const Cut& cut, int64_t index, int64_t next);

}  // namespace pagedjax
