// Runs attention of every level here over many batches, on buffers that end where their last byte is used and in caches
// whose unwritten blocks hold NaN, and checks that each level agrees with the plain one. For sanitizers.
#include "attention.h"
#include "attention_plan.h"
#include "levels.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

PAGEDJAX_DECLARE_LEVELS(AttentionKernels, attention_kernels)
PAGEDJAX_DECLARE_LEVELS(WriteKV, write_kv)

using namespace pagedjax;

namespace {

Level level;
constexpr int32_t kLayers = 2, kLayer = 1;

struct Case {
  Stored stored;
  Number given;
  int32_t num_kv_heads, group, head_dim, block_size, num_threads;
  bool turns, shares;
  std::vector<std::pair<int32_t, int32_t>> rows;  // (query tokens, cached tokens)
};

size_t size_of(Number number) { return number == Number::float32 ? 4 : 2; }
Number number_of(Stored stored) { return stored == Stored::int8 ? Number::bfloat16 : static_cast<Number>(stored); }

int32_t round_up(int32_t x, int32_t unit) { return (x + unit - 1) / unit * unit; }

// `count` numbers as bytes of their type, normal ones or NaN.
std::vector<char> numbers(std::mt19937& random, Number type, size_t count, bool nan = false) {
  std::normal_distribution<float> normal;
  std::vector<char> bytes(count * size_of(type));
  for (size_t i = 0; i < count; ++i) {
    const float x = nan ? NAN : normal(random);
    const uint16_t half = type == Number::bfloat16 ? to_bfloat16(x) : to_float16(x);
    std::memcpy(bytes.data() + i * size_of(type), type == Number::float32 ? (const void*)&x : &half, size_of(type));
  }
  return bytes;
}

CacheShape shape_of(const Case& c, int32_t num_blocks) {
  CacheShape shape{};
  shape.stored = c.stored, shape.num_blocks = num_blocks, shape.num_layers = kLayers;
  shape.num_kv_heads = c.num_kv_heads, shape.block_size = c.block_size, shape.head_dim = c.head_dim;
  shape.k_dim = round_up(c.head_dim, 2), shape.v_dim = round_up(c.head_dim, 16);
  shape.tile_tokens = c.block_size % 16 == 0 ? 16 : 8, shape.piece_blocks = 128 / c.block_size;
  return shape;
}

struct Batch {
  std::vector<int32_t> tables, q_starts{0}, kv_lens, slots, seen;
  int32_t width = 0, num_blocks = 0, num_tokens = 0;
};

// Blocks in order; where rows share, those of the first piece are the first row's.
Batch batch_of(const Case& c, bool whole) {
  Batch b;
  for (const auto& row : c.rows) b.width = std::max(b.width, (row.second + c.block_size - 1) / c.block_size);
  for (const auto& [q_len, kv_len] : c.rows) {
    const size_t begin = b.tables.size();
    for (int32_t i = 0; i < b.width; ++i) {
      const bool is_used = i * c.block_size < kv_len;
      const bool is_shared = c.shares && begin > 0 && i < 128 / c.block_size && b.tables[i] >= 0;
      b.tables.push_back(!is_used ? -1 : is_shared ? b.tables[i] : b.num_blocks++);
    }
    const int32_t taken = whole ? kv_len : q_len;
    for (int32_t at = kv_len - taken; at < kv_len; ++at) {
      b.slots.push_back(b.tables[begin + at / c.block_size] * c.block_size + at % c.block_size);
      b.seen.push_back(at + 1);
    }
    b.num_tokens += taken, b.q_starts.push_back(b.num_tokens), b.kv_lens.push_back(kv_len);
  }
  return b;
}

std::vector<float> run(const Case& c, Level at) {
  level = at;
  std::mt19937 random(3);
  const Batch whole = batch_of(c, true), step = batch_of(c, false);
  AttentionCall call{};
  call.cache = shape_of(c, step.num_blocks);
  call.layer = kLayer, call.group = c.group, call.num_heads = c.group * c.num_kv_heads, call.given = c.given;
  call.factor = 1.4427f / std::sqrt((float)c.head_dim);
  const size_t per_block = static_cast<size_t>(kLayers) * c.num_kv_heads * c.block_size;
  const int size = c.stored == Stored::int8 ? 2 : 1;  // of bytes as pairs: NaN's are as good as any
  std::vector<char> k = numbers(random, number_of(c.stored), step.num_blocks * per_block * call.cache.k_dim / size, true);
  std::vector<char> v = numbers(random, number_of(c.stored), step.num_blocks * per_block * call.cache.v_dim / size, true);
  std::vector<float> k_scales(c.stored == Stored::int8 ? step.num_blocks * per_block : 0, NAN), v_scales = k_scales;
  call.k_cache = k.data(), call.v_cache = v.data(), call.k_scales = k_scales.data(), call.v_scales = v_scales.data();
  std::vector<float> outs;
  for (const Batch* b : {&whole, &step}) {  // the first fills the cache; the second writes its tokens and attends
    const size_t row = static_cast<size_t>(call.num_heads + 2 * c.num_kv_heads) * c.head_dim;
    std::vector<char> qkv = numbers(random, c.given, b->num_tokens * row);
    std::vector<float> cos(b->num_tokens * (c.head_dim / 2), 0.6f), sin(cos.size(), 0.8f);
    const size_t num_out = static_cast<size_t>(b->num_tokens) * call.num_heads * c.head_dim;
    std::vector<char> out(num_out * size_of(c.given));
    call.num_tokens = b->num_tokens, call.qkv = qkv.data(), call.out = out.data();
    call.cos = c.turns ? cos.data() : nullptr, call.sin = c.turns ? sin.data() : nullptr;
    call.slots = b->slots.data(), call.seen = b->seen.data();
    PAGEDJAX_AT_LEVEL(write_kv)(call, 0, b->num_tokens);
    if (b == &whole) continue;
    const Rows rows{static_cast<int32_t>(c.rows.size()), b->width, b->tables.data(), b->q_starts.data(), b->kv_lens.data()};
    const AttentionPlan plan = plan_attention(call, rows, c.num_threads);
    std::vector<float> states(plan.num_state_floats);
    call.states = states.data();
    const size_t num_bytes = (attention_scratch_bytes(call.cache, plan.max_queries) + 63) / 64 * 64;
    char* scratch = static_cast<char*>(std::aligned_alloc(64, num_bytes));
    const AttentionKernels& kernels = PAGEDJAX_AT_LEVEL(attention_kernels);
    for (const auto* items : {&plan.first, &plan.second})
      for (size_t i = 0; i < items->size(); ++i)
        kernels.attend[static_cast<int>(c.stored)](call, (*items)[i], i + 1 < items->size() ? &(*items)[i + 1] : nullptr,
                                                   scratch);
    std::free(scratch);
    for (size_t i = 0; i < num_out; ++i) {
      float x;
      uint16_t half;
      std::memcpy(&x, out.data() + i * 4 * (c.given == Number::float32), 4 * (c.given == Number::float32));
      std::memcpy(&half, out.data() + i * 2 * (c.given != Number::float32), 2 * (c.given != Number::float32));
      outs.push_back(c.given == Number::float32 ? x : c.given == Number::bfloat16 ? from_bfloat16(half) : from_float16(half));
    }
  }
  return outs;
}

// Of all results of the plain level: what two machines can be compared by.
double squares = 0;

int check(const Case& c, Level at, int index) {
  const std::vector<float> expected = run(c, Level::plain), got = run(c, at);
  for (float x : expected) squares += double(x) * x;
  double apart = 0;
  for (size_t i = 0; i < got.size(); ++i)
    apart = std::isfinite(got[i]) ? std::fmax(apart, std::fabs(double(expected[i]) - got[i])) : INFINITY;
  if (apart <= (c.stored == Stored::float32 && c.given == Number::float32 ? 1e-4 : 4e-2)) return 0;
  std::printf("case %d at level %d: %g apart\n", index, int(at), apart);
  return 1;
}

}  // namespace

Level pagedjax::current_level() { return level; }

int main() {
  std::mt19937 random(5);
  const auto pick = [&](std::initializer_list<int32_t> from) { return *(from.begin() + random() % from.size()); };
  int num_faults = 0, num_checks = 0;
  for (int index = 0; index < 60; ++index) {
    Case c{static_cast<Stored>(pick({0, 1, 2, 3})), static_cast<Number>(pick({0, 1, 2})), pick({1, 2, 3}), pick({1, 3, 5}),
           pick({16, 33, 64, 100}), pick({16, 32, 48, 64}), pick({1, 2, 4}), false, random() % 2 == 0, {}};
    c.turns = c.head_dim % 2 == 0 && random() % 2 == 0;
    for (int32_t row = pick({1, 2, 6}); row > 0; --row) {
      const int32_t kv_len = pick({1, 2, 15, 16, 17, 127, 128, 129, 300, 513});
      c.rows.push_back({c.shares ? 1 : std::min(kv_len, pick({1, 1, 7, 40})), kv_len});
    }
    for (int at = 0; at <= static_cast<int>(best_level()); ++at, ++num_checks)
      num_faults += check(c, static_cast<Level>(at), index);
  }
  std::printf("%d faults in %d batches, squares %.2e\n", num_faults, num_checks, squares);
  return num_faults != 0;
}
