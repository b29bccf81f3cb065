// K and V of the step's tokens into the cache: see attention.h for the layout.
#include <math.h>

#include "attention.h"
#include "attention_vectors.h"
#include "levels.h"

namespace pagedjax {
namespace PAGEDJAX_LEVEL {
namespace {

// A form of numbers: `put` makes it of float32 for the cache, `get` float32 of it where q, k and v may have it.
template <class Stored, int pack, bool is_scaled = false>
struct Form {
  using Bits = Stored;
  static constexpr int kPack = pack;
  static constexpr bool kScaled = is_scaled;
};

struct Float32 : Form<float, 1> {
  static float get(float x) { return x; }
  static float put(float x) { return x; }
};

struct BFloat16 : Form<uint16_t, 2> {
  static float get(uint16_t x) { return from_bfloat16(x); }
  static uint16_t put(float x) { return to_bfloat16(x); }
};

struct Float16 : Form<uint16_t, 1> {
  static float get(uint16_t x) { return from_float16(x); }
  static uint16_t put(float x) { return to_float16(x); }
};

struct Int8 : Form<int8_t, 2, true> {
  static int8_t put(float x) { return static_cast<int8_t>(x); }
};

constexpr int32_t kMaxHeadDim = 256;

// Turns `count` numbers, then zeros up to a whole vector, into whole ones of -127 to 127 and gives their unit, as
// kv_blocks.py says; NaN for what is not finite, which so stays no number.
float quantise(float* x, int32_t count) {
  // Sizes are in the order of their bits, infinity and NaN above all others.
  int32_t top = 0;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t size = bits_of(x[i]) & 0x7fffffff;
    top = size > top ? size : top;
  }
  const bool is_finite = top < 0x7f800000;
  // What is below the normal numbers counts as zero, as it does on XLA's threads.
  const float peak = is_finite ? float_of(top) : 0.0f, unit = peak * static_cast<float>(1.0 / 127.0);
  const F inverse = every(unit < 0x1p-126f ? 0.0f : 1.0f / unit);
  for (int32_t i = 0; i < count; i += kLanes) store(x + i, is_finite ? nearest(load(x + i) * inverse) : every(0.0f));
  return is_finite ? unit : NAN;
}

// Where dimensions of one token lie: groups of `pack` of them `stride` apart (K), or each `stride` apart (V). `from` has
// zeros up to the padded dimension, which are written too: what lies there is multiplied by zero, and may not be NaN.
template <class As, int pack>
void write_head(const float* from, int32_t padded_dim, int64_t stride, typename As::Bits* to) {
  for (int32_t d = 0; d < padded_dim; d += pack, to += stride) {
    typename As::Bits group[pack];
    for (int32_t i = 0; i < pack; ++i) group[i] = As::put(from[d + i]);
    memcpy(to, group, sizeof group);
  }
}

template <class Given>
void take_head(const AttentionCall& call, int64_t token, int32_t head, float* to) {
  const auto* from = static_cast<const typename Given::Bits*>(call.qkv) + given_at(call, token, head);
  for (int32_t d = 0; d < call.cache.head_dim; ++d) to[d] = Given::get(from[d]);
}

template <class Given, class As>
void write_tokens(const AttentionCall& call, int64_t begin, int64_t end) {
  const CacheShape& c = call.cache;
  constexpr int pack = As::kPack;
  auto* k_cache = reinterpret_cast<typename As::Bits*>(call.k_cache);
  auto* v_cache = reinterpret_cast<typename As::Bits*>(call.v_cache);
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
      if constexpr (As::kScaled) {
        call.k_scales[head * c.block_size + offset] = quantise(k, c.head_dim);
        call.v_scales[head * c.block_size + offset] = quantise(v, c.head_dim);
      }
      auto* k_at = k_cache + (head * c.block_size + tile * c.tile_tokens) * c.k_dim + lane * pack;
      auto* v_at = v_cache + (head * c.block_size + offset / pack * pack) * c.v_dim + offset % pack;
      write_head<As, pack>(k, c.k_dim, c.tile_tokens * pack, k_at);
      write_head<As, 1>(v, c.v_dim, pack, v_at);
    }
  }
}

template <class Given>
void write_as_stored(const AttentionCall& call, int64_t begin, int64_t end) {
  switch (call.cache.stored) {
    case Stored::float32: return write_tokens<Given, Float32>(call, begin, end);
    case Stored::bfloat16: return write_tokens<Given, BFloat16>(call, begin, end);
    case Stored::float16: return write_tokens<Given, Float16>(call, begin, end);
    case Stored::int8: return write_tokens<Given, Int8>(call, begin, end);
  }
}

void write(const AttentionCall& call, int64_t begin, int64_t end) {
  switch (call.given) {
    case Number::float32: return write_as_stored<Float32>(call, begin, end);
    case Number::bfloat16: return write_as_stored<BFloat16>(call, begin, end);
    case Number::float16: return write_as_stored<Float16>(call, begin, end);
  }
}

}  // namespace

extern const WriteKV write_kv;
const WriteKV write_kv = write;

}  // namespace PAGEDJAX_LEVEL
}  // namespace pagedjax
