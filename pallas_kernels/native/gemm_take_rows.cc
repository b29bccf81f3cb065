// Rows of a packed weight in float32, as an XLA FFI handler: what an embedding takes.
#include "gemm_call.h"
#include "handler.h"
#include "numbers.h"
#include "pool.h"

namespace pagedjax {
namespace {

namespace ffi = xla::ffi;

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
                     int32_t format,
                     int64_t num_inputs, int64_t num_outputs, int64_t offset) {
  Gemm g{};
  g.format = static_cast<Format>(format), g.num_inputs = num_inputs, g.num_outputs = num_outputs;
  if (const char* reason = refusal(g)) return ffi::Error::InvalidArgument(reason);
  int64_t num_ids = ids.element_count();
  if (!use_weight(weight, offset, &g) || (int64_t)out->element_count() != num_ids * num_inputs)
    return ffi::Error::InvalidArgument("an array has another size than the others say");
  parallel_ranges(num_ids, 4, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t id = ids.typed_data()[i];
      id = id < 0 ? 0 : id < num_outputs ? id : num_outputs - 1;
      const uint8_t* block = g.weight + id / kBlockOutputs * g.block_bytes;
      unpack(g.format, block, id % kBlockOutputs, num_inputs, out->typed_data() + i * num_inputs);
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace pagedjax

PAGEDJAX_HANDLER(pagedjax_take_rows, pagedjax::take_rows,
                 xla::ffi::Ffi::Bind()
                     .Arg<xla::ffi::AnyBuffer>()                   // weight, packed
                     .Arg<xla::ffi::Buffer<xla::ffi::S32>>()       // [n], clamped to what there is
                     .Ret<xla::ffi::Buffer<xla::ffi::F32>>()       // [n, in]
                     .Attr<int32_t>("format")
                     .Attr<int64_t>("num_inputs")
                     .Attr<int64_t>("num_outputs")
                     .Attr<int64_t>("offset"));
