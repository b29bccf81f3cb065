// The largest result of each row of a product with packed weights, and its output, as an XLA FFI handler: greedy decoding
// of a head. The results themselves, 49,152 a row in a small model, are never written.
#include <cmath>
#include <vector>

#include "gemm_call.h"
#include "handler.h"
#include "pool.h"

namespace pagedjax {
namespace {

namespace ffi = xla::ffi;

// `kept` with that of later columns: the first of equals stays, and NaN goes before all.
void join(Largest* kept, const Largest& later) {
  if (std::isnan(later.value) || later.value > kept->value) *kept = later;
}

ffi::Error argmax(ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::Result<ffi::Buffer<ffi::S32>> outputs,
                  ffi::Result<ffi::Buffer<ffi::F32>> values, int32_t format, int64_t num_inputs, int64_t num_outputs,
                  int64_t offset) {
  Gemm g{};
  g.format = static_cast<Format>(format);
  g.num_inputs = num_inputs, g.num_outputs = g.num_results = num_outputs;
  if (const char* reason = refusal(g)) return ffi::Error::InvalidArgument(reason);
  g.num_rows = x.element_count() / num_inputs;
  bool fits = read_floats(x, g.num_rows * num_inputs, &g.x) && use_weight(weight, offset, &g) &&
              (int64_t)outputs->element_count() == g.num_rows && (int64_t)values->element_count() == g.num_rows;
  if (!fits) return ffi::Error::InvalidArgument("an array of the product has another size or type than the others say");
  if (g.num_rows == 0) return ffi::Error::Success();

  const GemmKernels& kernels = PAGEDJAX_AT_LEVEL(gemm_kernels);
  Cut cut = prepare_and_cut(&g, kernels);
  std::vector<Largest> kept(cut.num_column_parts * g.num_rows, Largest{-INFINITY, 0});
  parallel_for_in_turn(cut.num_row_parts * cut.num_column_parts, [&](int64_t i, int64_t next) {
    Gemm part = g;
    part.largest = kept.data() + i % cut.num_column_parts * g.num_rows;
    multiply_part(part, kernels, cut, i, next);
  });
  for (int64_t row = 0; row < g.num_rows; ++row) {
    Largest most = kept[row];
    for (int64_t part = 1; part < cut.num_column_parts; ++part) join(&most, kept[part * g.num_rows + row]);
    outputs->typed_data()[row] = most.output, values->typed_data()[row] = most.value;
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace pagedjax

PAGEDJAX_HANDLER(pagedjax_argmax, pagedjax::argmax,
                 xla::ffi::Ffi::Bind()
                     .Arg<xla::ffi::AnyBuffer>()              // x [rows, in]
                     .Arg<xla::ffi::AnyBuffer>()              // weight, packed
                     .Ret<xla::ffi::Buffer<xla::ffi::S32>>()  // [rows] outputs, the first of equals
                     .Ret<xla::ffi::Buffer<xla::ffi::F32>>()  // [rows] their values, NaN where any result is
                     .Attr<int32_t>("format")
                     .Attr<int64_t>("num_inputs")
                     .Attr<int64_t>("num_outputs")
                     .Attr<int64_t>("offset"));
