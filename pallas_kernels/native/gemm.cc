// The product of gemm.h as an XLA FFI handler: checks what it is given and shares the work out.
#include "gemm.h"

#include "handler.h"
#include "numbers.h"
#include "pool.h"

namespace pagedjax {
namespace {

namespace ffi = xla::ffi;

// Preparing fewer rows takes less time than waking anybody.
constexpr int64_t kLeastRowsToShare = 8;
// Rows of prepared x that stay in the second cache while the blocks of weights pass by.
constexpr int64_t kRowsAtOnce = 48;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool read_floats(const ffi::AnyBuffer& buffer, int64_t count, FloatArray* array) {
  ffi::DataType type = buffer.element_type();
  *array = {buffer.untyped_data(), type == ffi::DataType::BF16};
  return (type == ffi::DataType::F32 || type == ffi::DataType::BF16) && (int64_t)buffer.element_count() == count;
}

// An array of no elements says that there is none.
bool read_optional(const ffi::AnyBuffer& buffer, int64_t count, FloatArray* array) {
  if (buffer.element_count() != 0) return read_floats(buffer, count, array);
  *array = {nullptr, false};
  return true;
}

int64_t packed_block_bytes(const Gemm& g) {
  switch (g.format) {
    case Format::bf16: return (g.num_inputs + 1) / 2 * 64;
    case Format::nibbles: return g.num_inputs / kGroup * 320;
    case Format::bytes: return g.num_inputs / kGroup * 544;
  }
  return 0;
}

void run(Gemm& g, const GemmKernels& kernels) {
  size_t row_bytes = kernels.prepared_bytes(g);
  g.prepared = static_cast<uint8_t*>(scratch(g.num_rows * row_bytes));
  if (g.num_rows < kLeastRowsToShare) {
    kernels.prepare(g, 0, g.num_rows);
  } else {
    parallel_ranges(g.num_rows, 2, 4, [&](int64_t begin, int64_t end) { kernels.prepare(g, begin, end); });
  }
  // Whole tiles, some eight parts a thread: few enough that each reads a long run of memory.
  int64_t tile = kernels.tile_columns(g);
  int64_t columns = tile * (1 + g.num_results / tile / (8 * num_threads()));
  int64_t num_column_parts = ceil_div(g.num_results, columns), num_row_parts = ceil_div(g.num_rows, kRowsAtOnce);
  int64_t rows = ceil_div(g.num_rows, num_row_parts);
  parallel_for(num_row_parts * num_column_parts, [&](int64_t i) {
    int64_t row = i / num_column_parts * rows, column = i % num_column_parts * columns;
    int64_t row_end = row + rows < g.num_rows ? row + rows : g.num_rows;
    kernels.multiply(g, row, row_end, column, column + columns < g.num_results ? column + columns : g.num_results);
  });
}

ffi::Error linear(ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer norm, ffi::AnyBuffer bias,
                  ffi::AnyBuffer residual, ffi::Result<ffi::AnyBuffer> out, int32_t format, int64_t num_inputs,
                  int64_t num_outputs, bool gated, bool fine, float eps) {
  Gemm g{};
  g.format = static_cast<Format>(format), g.fine = fine, g.gated = gated, g.eps = eps;
  g.num_inputs = num_inputs, g.num_outputs = num_outputs, g.num_results = gated ? num_outputs / 2 : num_outputs;
  if (format < 0 || format > 2 || num_inputs < 1 || num_outputs < 1)
    return ffi::Error::InvalidArgument("no such format or size");
  if (g.format != Format::bf16 && num_inputs % kGroup != 0)
    return ffi::Error::InvalidArgument("quantised weights need a multiple of 32 inputs");
  if (gated && num_outputs % (2 * kBlockOutputs) != 0)
    return ffi::Error::InvalidArgument("a gated product needs a multiple of 32 outputs");
  g.num_rows = x.element_count() / num_inputs;
  g.block_bytes = packed_block_bytes(g);
  g.weight = static_cast<const uint8_t*>(weight.untyped_data());
  FloatArray scales{};
  bool fits = read_floats(x, g.num_rows * num_inputs, &g.x) && read_optional(norm, num_inputs, &scales) &&
              read_optional(bias, num_outputs, &g.bias) &&
              read_optional(residual, g.num_rows * g.num_results, &g.residual) &&
              read_floats(*out, g.num_rows * g.num_results, &g.out) && !scales.is_bf16 &&
              (int64_t)weight.size_bytes() == ceil_div(num_outputs, kBlockOutputs) * g.block_bytes;
  if (!fits) return ffi::Error::InvalidArgument("an array of the product has another size or type than the others say");
  g.norm = static_cast<const float*>(scales.data);
  if (g.num_rows > 0) run(g, PAGEDJAX_AT_LEVEL(gemm_kernels));
  return ffi::Error::Success();
}

// ---- rows of a packed weight ----------------------------------------------------------------------------------------

// One output's weights, [num_inputs].
void unpack(Format format, const uint8_t* block, int64_t lane, int64_t num_inputs, float* out) {
  if (format == Format::bf16) {
    const uint16_t* pairs = reinterpret_cast<const uint16_t*>(block) + 2 * lane;
    for (int64_t k = 0; k < num_inputs; ++k) out[k] = from_bfloat16(pairs[k / 2 * 32 + k % 2]);
    return;
  }
  bool nibbles = format == Format::nibbles;
  for (int64_t group = 0; group < num_inputs / kGroup; ++group, block += nibbles ? 320 : 544, out += kGroup) {
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(block + (nibbles ? 256 : 512));
    float scale = from_float16(scales[lane]), minimum = nibbles ? from_float16(scales[kBlockOutputs + lane]) : 0.0f;
    for (int64_t k = 0; k < kGroup; ++k) {
      if (nibbles) {
        int both = block[k / 8 * 64 + lane * 4 + k % 4];
        out[k] = scale * static_cast<float>(k % 8 < 4 ? both & 15 : both >> 4) + minimum;
      } else {
        out[k] = scale * static_cast<float>(block[k / 4 * 64 + lane * 4 + k % 4] - 128);
      }
    }
  }
}

ffi::Error take_rows(ffi::AnyBuffer weight, ffi::Buffer<ffi::S32> ids, ffi::Result<ffi::Buffer<ffi::F32>> out,
                     int32_t format, int64_t num_inputs, int64_t num_outputs) {
  Gemm g{};
  g.format = static_cast<Format>(format), g.num_inputs = num_inputs;
  int64_t num_ids = ids.element_count(), block_bytes = packed_block_bytes(g);
  if ((int64_t)weight.size_bytes() != ceil_div(num_outputs, kBlockOutputs) * block_bytes ||
      (int64_t)out->element_count() != num_ids * num_inputs)
    return ffi::Error::InvalidArgument("an array has another size than the others say");
  const uint8_t* packed = static_cast<const uint8_t*>(weight.untyped_data());
  parallel_ranges(num_ids, 4, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t id = ids.typed_data()[i];
      id = id < 0 ? 0 : id < num_outputs ? id : num_outputs - 1;
      const uint8_t* block = packed + id / kBlockOutputs * block_bytes;
      unpack(g.format, block, id % kBlockOutputs, num_inputs, out->typed_data() + i * num_inputs);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace pagedjax

PAGEDJAX_HANDLER(pagedjax_linear, pagedjax::linear,
                xla::ffi::Ffi::Bind()
                    .Arg<xla::ffi::AnyBuffer>()  // x [rows, in]
                    .Arg<xla::ffi::AnyBuffer>()  // weight, packed
                    .Arg<xla::ffi::AnyBuffer>()  // norm's weight [in] float32, or of no elements
                    .Arg<xla::ffi::AnyBuffer>()  // bias [out], or of no elements
                    .Arg<xla::ffi::AnyBuffer>()  // residual like the result, or of no elements
                    .Ret<xla::ffi::AnyBuffer>()  // [rows, results]
                    .Attr<int32_t>("format")
                    .Attr<int64_t>("num_inputs")
                    .Attr<int64_t>("num_outputs")
                    .Attr<bool>("gated")
                    .Attr<bool>("fine")
                    .Attr<float>("eps"));

PAGEDJAX_HANDLER(pagedjax_take_rows, pagedjax::take_rows,
                 xla::ffi::Ffi::Bind()
                     .Arg<xla::ffi::AnyBuffer>()                   // weight, packed
                     .Arg<xla::ffi::Buffer<xla::ffi::S32>>()       // [n], clamped to what there is
                     .Ret<xla::ffi::Buffer<xla::ffi::F32>>()       // [n, in]
                     .Attr<int32_t>("format")
                     .Attr<int64_t>("num_inputs")
                     .Attr<int64_t>("num_outputs"));
