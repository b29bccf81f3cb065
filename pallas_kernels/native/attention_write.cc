// K and V of the step's tokens into the cache: see attention.h for the layout.
#include "attention.h"

namespace pagedjax {
namespace {

struct Float32 {
  using Bits = float;
  static float get(float x) { return x; }
  static float put(float x) { return x; }
  static constexpr int kPack = 1;
};

struct BFloat16 {
  using Bits = uint16_t;
  static float get(uint16_t x) { return from_bfloat16(x); }
  static uint16_t put(float x) { return to_bfloat16(x); }
  static constexpr int kPack = 2;
};

struct Float16 {
  using Bits = uint16_t;
  static float get(uint16_t x) { return from_float16(x); }
  static uint16_t put(float x) { return to_float16(x); }
  static constexpr int kPack = 1;
};

constexpr int32_t kMaxHeadDim = 256;

// Where dimensions of one token lie: groups of `pack` of them `stride` apart (K), or each `stride` apart (V). `from` has
// zeros up to the padded dimension, which are written too: what lies there is multiplied by zero, and may not be NaN.
template <class Stored, int pack>
void write_head(const float* from, int32_t padded_dim, int64_t stride, typename Stored::Bits* to) {
  for (int32_t d = 0; d < padded_dim; d += pack, to += stride)
    for (int32_t i = 0; i < pack; ++i) to[i] = Stored::put(from[d + i]);
}

template <class Given>
void take_head(const AttentionCall& call, int64_t token, int32_t head, float* to) {
  const auto* from = static_cast<const typename Given::Bits*>(call.qkv) + given_at(call, token, head);
  for (int32_t d = 0; d < call.cache.head_dim; ++d) to[d] = Given::get(from[d]);
}

template <class Given, class Stored>
void write_tokens(const AttentionCall& call, int64_t begin, int64_t end) {
  const CacheShape& c = call.cache;
  constexpr int pack = Stored::kPack;
  auto* k_cache = reinterpret_cast<typename Stored::Bits*>(call.k_cache);
  auto* v_cache = reinterpret_cast<typename Stored::Bits*>(call.v_cache);
  float k[kMaxHeadDim] = {}, v[kMaxHeadDim] = {};
  for (int64_t token = begin; token < end; ++token) {
    if (call.slots[token] < 0) continue;
    int64_t block = call.slots[token] / c.block_size;
    int32_t offset = call.slots[token] % c.block_size, tile = offset / c.tile_tokens, lane = offset % c.tile_tokens;
    for (int32_t h = 0; h < c.num_kv_heads; ++h) {
      int64_t head = (block * c.num_layers + call.layer) * c.num_kv_heads + h;
      take_head<Given>(call, token, call.num_heads + h, k);
      take_head<Given>(call, token, call.num_heads + c.num_kv_heads + h, v);
      if (call.cos != nullptr) turn(call, token, k);
      auto* k_at = k_cache + (head * c.block_size + tile * c.tile_tokens) * c.k_dim + lane * pack;
      auto* v_at = v_cache + (head * c.block_size + offset / pack * pack) * c.v_dim + offset % pack;
      write_head<Stored, pack>(k, c.k_dim, c.tile_tokens * pack, k_at);
      write_head<Stored, 1>(v, c.v_dim, pack, v_at);
    }
  }
}

template <class Given>
void write_as_stored(const AttentionCall& call, int64_t begin, int64_t end) {
  switch (call.cache.stored) {
    case Number::float32: return write_tokens<Given, Float32>(call, begin, end);
    case Number::bfloat16: return write_tokens<Given, BFloat16>(call, begin, end);
    case Number::float16: return write_tokens<Given, Float16>(call, begin, end);
  }
}

}  // namespace

void write_kv(const AttentionCall& call, int64_t begin, int64_t end) {
  switch (call.given) {
    case Number::float32: return write_as_stored<Float32>(call, begin, end);
    case Number::bfloat16: return write_as_stored<BFloat16>(call, begin, end);
    case Number::float16: return write_as_stored<Float16>(call, begin, end);
  }
}

}  // namespace pagedjax
