// The product of gemm.h as an XLA FFI handler: checks what it is given and shares the work out.
#include "gemm.h"

#include "gemm_call.h"
#include "handler.h"
#include "pool.h"

namespace pagedjax {
namespace {

namespace ffi = xla::ffi;

// An array of no elements says that there is none.
bool read_optional(const ffi::AnyBuffer& buffer, int64_t count, FloatArray* array) {
  if (buffer.element_count() != 0) return read_floats(buffer, count, array);
  *array = {nullptr, false};
  return true;
}

void run(Gemm& g, const GemmKernels& kernels) {
  Cut cut = prepare_and_cut(&g, kernels);
  parallel_for_in_turn(cut.num_row_parts * cut.num_column_parts,
                       [&](int64_t i, int64_t next) { multiply_part(g, kernels, cut, i, next); });
}

ffi::Error linear(ffi::AnyBuffer x, ffi::AnyBuffer weight, ffi::AnyBuffer norm, ffi::AnyBuffer bias,
                  ffi::AnyBuffer residual, ffi::Result<ffi::AnyBuffer> out, int32_t format, int64_t num_inputs,
                  int64_t num_outputs, int64_t offset, bool gated, bool fine, float eps) {
  Gemm g{};
  g.format = static_cast<Format>(format), g.fine = fine, g.gated = gated, g.eps = eps;
  g.num_inputs = num_inputs, g.num_outputs = num_outputs, g.num_results = gated ? num_outputs / 2 : num_outputs;
  if (const char* reason = refusal(g)) return ffi::Error::InvalidArgument(reason);
  g.num_rows = x.element_count() / num_inputs;
  FloatArray scales{};
  bool fits = read_floats(x, g.num_rows * num_inputs, &g.x) && read_optional(norm, num_inputs, &scales) &&
              read_optional(bias, num_outputs, &g.bias) &&
              read_optional(residual, g.num_rows * g.num_results, &g.residual) &&
              read_floats(*out, g.num_rows * g.num_results, &g.out) && !scales.is_bf16 && use_weight(weight, offset, &g);
  if (!fits) return ffi::Error::InvalidArgument("an array of the product has another size or type than the others say");
  g.norm = static_cast<const float*>(scales.data);
  if (g.num_rows > 0) run(g, PAGEDJAX_AT_LEVEL(gemm_kernels));
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
                    .Attr<int64_t>("offset")
                    .Attr<bool>("gated")
                    .Attr<bool>("fine")
                    .Attr<float>("eps"));
