#include "gemm_call.h"

#include <algorithm>

#include "pool.h"

namespace pagedjax {
namespace {

// Preparing fewer rows takes less time than waking anybody.
constexpr int64_t kLeastRowsToShare = 8;
// Rows of prepared x that stay in the second cache while the blocks of weights pass by.
constexpr int64_t kRowsAtOnce = 48;
// Bytes of the next weight that may be fetched early, which a core's second cache has room for.
constexpr int64_t kFetchedAhead = 512 << 10;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

int64_t packed_block_bytes(const Gemm& g) {
  switch (g.format) {
    case Format::bf16: return (g.num_inputs + 1) / 2 * 64;
    case Format::nibbles: return g.num_inputs / kGroup * 320;
    case Format::bytes: return g.num_inputs / kGroup * 544;
  }
  return 0;
}

bool use_weight(const xla::ffi::AnyBuffer& weight, int64_t offset, Gemm* g) {
  const auto* whole = static_cast<const uint8_t*>(weight.untyped_data());
  const auto size = static_cast<int64_t>(weight.size_bytes());
  g->block_bytes = packed_block_bytes(*g);
  const int64_t num_bytes = ceil_div(g->num_outputs, kBlockOutputs) * g->block_bytes;
  if (offset < 0 || num_bytes > size - offset) return false;
  g->weight = whole + offset;
  const bool is_joined = num_bytes < size;
  const int64_t end = offset + num_bytes, next = end < size ? end : 0;  // the next step's first follows the last
  if (is_joined) fetch_when_idle(whole + next, whole + std::min(next + kFetchedAhead, size));
  return true;
}

bool read_floats(const xla::ffi::AnyBuffer& buffer, int64_t count, FloatArray* array) {
  const auto type = buffer.element_type();
  *array = {buffer.untyped_data(), type == xla::ffi::DataType::BF16};
  return (type == xla::ffi::DataType::F32 || type == xla::ffi::DataType::BF16) &&
         static_cast<int64_t>(buffer.element_count()) == count;
}

const char* refusal(const Gemm& g) {
  const auto format = static_cast<int32_t>(g.format);
  if (format < 0 || format > 2 || g.num_inputs < 1 || g.num_outputs < 1) return "no such format or size";
  if (g.format != Format::bf16 && g.num_inputs % kGroup != 0)
    return "quantised weights need a multiple of 32 inputs";
  if (g.gated && g.num_outputs % (2 * kBlockOutputs) != 0)
    return "a gated product needs a multiple of 32 outputs";
  return nullptr;
}

Cut prepare_and_cut(Gemm* gemm, const GemmKernels& kernels) {
  Gemm& g = *gemm;
  g.prepared = static_cast<uint8_t*>(scratch(g.num_rows * kernels.prepared_bytes(g)));
  if (g.num_rows < kLeastRowsToShare) {
    kernels.prepare(g, 0, g.num_rows);
  } else {
    parallel_ranges(g.num_rows, 2, 4, [&](int64_t begin, int64_t end) { kernels.prepare(g, begin, end); });
  }
  // Whole tiles, some eight parts a thread: few enough that each reads a long run of memory.
  int64_t tile = kernels.tile_columns(g);
  int64_t columns = tile * (1 + g.num_results / tile / (8 * num_threads()));
  int64_t num_row_parts = ceil_div(g.num_rows, kRowsAtOnce);
  return {ceil_div(g.num_rows, num_row_parts), columns, num_row_parts, ceil_div(g.num_results, columns)};
}

void multiply_part(const Gemm& g, const GemmKernels& kernels, const Cut& cut, int64_t index, int64_t next) {
  auto column_of = [&](int64_t part) { return part % cut.num_column_parts * cut.columns; };
  int64_t row = index / cut.num_column_parts * cut.rows, column = column_of(index);
  kernels.multiply(g, row, std::min(row + cut.rows, g.num_rows), column, std::min(column + cut.columns, g.num_results),
                   next < 0 ? g.num_results : column_of(next));
}

}  // namespace pagedjax
