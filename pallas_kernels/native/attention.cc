// The XLA FFI handler of ragged attention: see attention.h.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "attention_plan.h"
#include "levels.h"
#include "pool.h"
#include "xla/ffi/api/ffi.h"

PAGEDJAX_DECLARE_LEVELS(AttentionKernels, attention_kernels)
PAGEDJAX_DECLARE_LEVELS(WriteKV, write_kv)

namespace pagedjax {

size_t attention_scratch_bytes(const CacheShape& cache, int32_t num_queries) {
  // The most that any level takes: see `attend` in attention_isa.cc.
  constexpr size_t kMostRows = 6, kLine = 64, kNumBuffers = 7, kQueryStride = 256 + 16, kScoreStride = 128 + 16;
  const size_t floats = static_cast<size_t>(num_queries) * (kQueryStride + cache.v_dim + kStateExtra) +
                        kMostRows * (2 * kScoreStride + cache.v_dim) + 2 * cache.v_dim;
  const size_t piece = kPieceTokens * (cache.k_dim + cache.v_dim);
  const size_t widened = cache.stored == Stored::int8 ? piece + 2 * cache.v_dim : 0;
  return floats * sizeof(float) + widened * sizeof(uint16_t) + kNumBuffers * kLine;
}

namespace ffi = xla::ffi;
using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;

namespace {

ffi::Error refuse(const std::string& why) { return ffi::Error::InvalidArgument("ragged attention: " + why); }

bool number_of(ffi::DataType type, Number* number) {
  switch (type) {
    case ffi::F32: *number = Number::float32; return true;
    case ffi::BF16: *number = Number::bfloat16; return true;
    case ffi::F16: *number = Number::float16; return true;
    default: return false;
  }
}

bool stored_as(ffi::DataType type, Stored* stored) {
  switch (type) {
    case ffi::F32: *stored = Stored::float32; return true;
    // The cache holds half precision as bits: unsigned ones of bfloat16, signed ones of float16.
    case ffi::U16: *stored = Stored::bfloat16; return true;
    case ffi::S16: *stored = Stored::float16; return true;
    case ffi::S8: *stored = Stored::int8; return true;
    default: return false;
  }
}

int32_t round_up(int32_t x, int32_t unit) { return (x + unit - 1) / unit * unit; }

CacheShape cache_shape(Stored stored, ffi::AnyBuffer::Dimensions cache, int32_t block_size, int32_t head_dim) {
  CacheShape shape{};
  shape.stored = stored;
  shape.num_blocks = static_cast<int32_t>(cache[0]);
  shape.num_layers = static_cast<int32_t>(cache[1]);
  shape.num_kv_heads = static_cast<int32_t>(cache[2]);
  shape.block_size = block_size;
  shape.head_dim = head_dim;
  shape.k_dim = round_up(head_dim, 2);
  shape.v_dim = round_up(head_dim, 16);
  shape.tile_tokens = block_size % 16 == 0 ? 16 : 8;
  shape.piece_blocks = kPieceTokens / block_size;
  return shape;
}

// Counts and ids as `Ragged` promises them: a wrong one would read or write outside the cache.
ffi::Error check(const CacheShape& cache, const Rows& rows, const int32_t* slots, int32_t num_tokens) {
  if (rows.q_starts[0] != 0) return refuse("q_starts must begin with 0");
  for (int32_t row = 0; row < rows.num_rows; ++row) {
    const int32_t q_len = rows.q_starts[row + 1] - rows.q_starts[row], kv_len = rows.kv_lens[row];
    if (q_len < 0 || rows.q_starts[row + 1] > num_tokens) return refuse("q_starts must ascend to at most the tokens");
    if (q_len == 0) continue;
    const int64_t num_blocks = (static_cast<int64_t>(kv_len) + cache.block_size - 1) / cache.block_size;
    if (kv_len < q_len || num_blocks > rows.table_width)
      return refuse("row " + std::to_string(row) + " has kv_len " + std::to_string(kv_len) + ", which is below its " +
                    std::to_string(q_len) + " query tokens or beyond its table");
    const int32_t* table = rows.block_tables + static_cast<int64_t>(row) * rows.table_width;
    for (int64_t i = 0; i < num_blocks; ++i)
      if (table[i] < 0 || table[i] >= cache.num_blocks)
        return refuse("row " + std::to_string(row) + " has block " + std::to_string(table[i]) + " of " +
                      std::to_string(cache.num_blocks));
  }
  const int64_t num_slots = static_cast<int64_t>(cache.num_blocks) * cache.block_size;
  for (int32_t token = 0; token < num_tokens; ++token)
    if (slots[token] >= num_slots) return refuse("slot " + std::to_string(slots[token]) + " is outside the cache");
  return ffi::Error::Success();
}

std::vector<int32_t> seen_by(const Rows& rows, int32_t num_tokens) {
  std::vector<int32_t> seen(num_tokens, 0);
  for (int32_t row = 0; row < rows.num_rows; ++row)
    for (int32_t token = rows.q_starts[row], end = rows.q_starts[row + 1]; token < end; ++token)
      seen[token] = rows.kv_lens[row] - end + token + 1;
  return seen;
}

const AttentionKernels& kernels_for(const CacheShape& cache) {
  // Tiles of 8 tokens are narrower than the vectors of AVX-512.
#if defined(PAGEDJAX_HAS_AVX2)
  if (cache.tile_tokens == 8 && current_level() >= Level::avx2) return avx2::attention_kernels;
#endif
  (void)cache;
  return PAGEDJAX_AT_LEVEL(attention_kernels);
}

void run(const AttentionCall& call, const std::vector<AttentionItem>& items, size_t scratch_bytes) {
  const auto attend = kernels_for(call.cache).attend[static_cast<int>(call.cache.stored)];
  const int64_t num_items = items.size();
  // The heads of a row lie side by side, in the cache and in the list: one thread takes several of them.
  parallel_ranges(num_items, 8, 1, [&](int64_t begin, int64_t end) {
    char* own = static_cast<char*>(scratch(scratch_bytes));
    for (int64_t i = begin; i < end; ++i) attend(call, items[i], i + 1 < end ? &items[i + 1] : nullptr, own);
  });
}

void write(const AttentionCall& call) {
  const WriteKV write_kv = PAGEDJAX_AT_LEVEL(write_kv);
  parallel_ranges(call.num_tokens, 2, 8, [&](int64_t begin, int64_t end) { write_kv(call, begin, end); });
}

// The scales of an int8 cache, which are the last arguments and results, updated in place.
bool read_scales(const CacheShape& cache, const ffi::RemainingArgs& given, const ffi::RemainingRets& updated,
                 AttentionCall* call) {
  if (cache.stored != Stored::int8) return given.size() == 0 && updated.size() == 0;
  const size_t count = static_cast<size_t>(cache.num_blocks) * cache.num_layers * cache.num_kv_heads * cache.block_size;
  float** const scales[2] = {&call->k_scales, &call->v_scales};
  if (given.size() != 2 || updated.size() != 2) return false;
  for (int i = 0; i < 2; ++i) {
    const auto from = given.get<Floats>(i);
    auto to = updated.get<Floats>(i);  // not const: the results of JAX 0.10 give their data to owners only
    if (!from.has_value() || !to.has_value() || from->typed_data() != (*to)->typed_data()) return false;
    if ((*to)->element_count() != count) return false;
    *scales[i] = (*to)->typed_data();
  }
  return true;
}

ffi::Error ragged_attention(ffi::AnyBuffer qkv, Floats cos, Floats sin, Ints block_tables, Ints q_starts, Ints kv_lens,
                            Ints slots, Ints layer, ffi::AnyBuffer k_cache, ffi::AnyBuffer v_cache,
                            ffi::RemainingArgs scales, ffi::Result<ffi::AnyBuffer> out,
                            ffi::Result<ffi::AnyBuffer> new_k, ffi::Result<ffi::AnyBuffer> new_v,
                            ffi::RemainingRets new_scales, int32_t block_size, float scale) {
  if (k_cache.untyped_data() != new_k->untyped_data() || v_cache.untyped_data() != new_v->untyped_data())
    return refuse("the cache must be updated in place, but XLA gave the new one memory of its own");
  Number given;
  Stored stored;
  if (!number_of(qkv.element_type(), &given)) return refuse("numbers must be float32, bfloat16 or float16");
  if (!stored_as(k_cache.element_type(), &stored)) return refuse("the cache has a type that it cannot have");
  const auto shape = qkv.dimensions();
  AttentionCall call{};
  call.cache = cache_shape(stored, k_cache.dimensions(), block_size, static_cast<int32_t>(shape[2]));
  if (!read_scales(call.cache, scales, new_scales, &call))
    return refuse("an int8 cache, and no other, has scales of its tokens, updated in place");
  call.layer = *layer.typed_data();
  call.num_tokens = static_cast<int32_t>(shape[0]);
  call.num_heads = static_cast<int32_t>(shape[1]) - 2 * call.cache.num_kv_heads;
  call.group = call.num_heads / call.cache.num_kv_heads;
  call.given = given;
  call.factor = scale * static_cast<float>(M_LOG2E);
  call.qkv = qkv.untyped_data();
  if (cos.element_count() != 0) {
    const size_t num_turns = static_cast<size_t>(shape[0]) * (shape[2] / 2);
    if (shape[2] % 2 || cos.element_count() != num_turns || sin.element_count() != num_turns)
      return refuse("cosines and sines must be [tokens, head_dim / 2]");
    call.cos = cos.typed_data(), call.sin = sin.typed_data();
  }
  call.out = out->untyped_data();
  call.k_cache = static_cast<char*>(new_k->untyped_data()), call.v_cache = static_cast<char*>(new_v->untyped_data());
  call.slots = slots.typed_data();
  if (call.layer < 0 || call.layer >= call.cache.num_layers)
    return refuse("layer " + std::to_string(call.layer) + " of " + std::to_string(call.cache.num_layers));

  const auto tables = block_tables.dimensions();
  const Rows rows{static_cast<int32_t>(tables[0]), static_cast<int32_t>(tables[1]), block_tables.typed_data(),
                  q_starts.typed_data(), kv_lens.typed_data()};
  if (ffi::Error error = check(call.cache, rows, call.slots, call.num_tokens); error.failure()) return error;
  const std::vector<int32_t> seen = seen_by(rows, call.num_tokens);
  call.seen = seen.data();

  write(call);
  const AttentionPlan plan = plan_attention(call, rows, num_threads());
  std::vector<float> states(plan.num_state_floats);
  call.states = states.data();
  const size_t scratch_bytes = attention_scratch_bytes(call.cache, plan.max_queries);
  run(call, plan.first, scratch_bytes);
  run(call, plan.second, scratch_bytes);
  const size_t row_bytes = out->size_bytes() / std::max<int64_t>(call.num_tokens, 1);
  const int32_t num_real = rows.q_starts[rows.num_rows];
  std::memset(static_cast<char*>(call.out) + num_real * row_bytes, 0, (call.num_tokens - num_real) * row_bytes);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace pagedjax

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* pagedjax_ragged_attention(XLA_FFI_CallFrame* frame);

using Any = xla::ffi::AnyBuffer;
XLA_FFI_DEFINE_HANDLER_SYMBOL(pagedjax_ragged_attention, pagedjax::ragged_attention,
                              xla::ffi::Ffi::Bind()
                                  .Arg<Any>()               // q, k and v
                                  .Arg<pagedjax::Floats>()  // cosines
                                  .Arg<pagedjax::Floats>()  // sines
                                  .Arg<pagedjax::Ints>()    // block_tables
                                  .Arg<pagedjax::Ints>()    // q_starts
                                  .Arg<pagedjax::Ints>()    // kv_lens
                                  .Arg<pagedjax::Ints>()    // slots
                                  .Arg<pagedjax::Ints>()    // layer
                                  .Arg<Any>()               // K of the cache
                                  .Arg<Any>()               // V of the cache
                                  .RemainingArgs()          // scales of K and V, where int8
                                  .Ret<Any>()               // out
                                  .Ret<Any>()               // K of the cache
                                  .Ret<Any>()               // V of the cache
                                  .RemainingRets()          // scales of K and V
                                  .Attr<int32_t>("block_size")
                                  .Attr<float>("scale"));
