// Ragged paged attention: what its parts share.
//
// Algorithm: FlashAttention's online softmax (arXiv:2205.14135) over block tables, cut along the context as in
// flash-decoding (arXiv:2311.01282), with the context that rows share read once for all of them (cascade attention,
// arXiv:2402.05099). A *query* is one head of one token. An *item* is the work of one thread at a time: some tokens with
// the heads of one KV group, against one table. A *piece* is the next `piece_blocks` blocks of a context, about 128
// tokens. Each piece gives a *state* (peak, total, output), and states are folded in the order of pieces, whoever
// computed them. So a query's bits depend on its own context alone: not on the batch, the chunks or the threads.
//
//   attention.cc       the FFI handler: checks a call, writes K and V, runs the plan
//   attention_plan.cc  from rows to items
//   attention_write_isa.cc and attention_isa.cc, once a level of instructions: K and V into the cache, and an item
//
// Layout: a block is [layers, kv_heads, its tokens], in tiles of `tile_tokens` tokens. K of a tile is
// [k_dim / pack][tile_tokens][pack], so that a vector holds one or two dimensions of 16 tokens and scores need no sum
// across lanes; V of a tile is [tile_tokens / pack][v_dim][pack]. `pack` is 2 for bfloat16 (vdpbf16ps multiplies pairs),
// else 1. The layout does not depend on the level. int8 is laid out as bfloat16 is, with a scale a token and KV head for
// K and one for V, float32, [layers, kv_heads, its tokens] in arrays of their own: K's multiply scores, V's weights.
// Bytes that meet many queries are widened to bfloat16 first, which holds them exactly, once an item.
//
// Bytes: a decode row reads its context once, a prefill tile of about 96 queries the context below it once.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "numbers.h"

namespace pagedjax {

enum class Stored : int32_t { float32, bfloat16, float16, int8 };

struct CacheShape {
  Stored stored;
  int32_t num_blocks, num_layers, num_kv_heads, block_size, head_dim;
  int32_t k_dim, v_dim;  // head_dim rounded up to whole pairs, and to whole vectors
  int32_t tile_tokens;   // 16, or 8 where blocks do not divide into 16
  int32_t piece_blocks;
};

struct AttentionCall {
  CacheShape cache;
  int32_t layer, num_tokens, num_heads, group;
  Number given;             // how q, k, v and out are given
  float factor;             // of scores: the scale times log2(e), since weights are powers of two
  const void* qkv;          // [tokens, heads + 2 kv_heads, head_dim]: q, then k, then v
  const float *cos, *sin;   // [tokens, head_dim / 2] by which q and k are turned, or null
  void* out;                // [tokens, heads, head_dim]
  char *k_cache, *v_cache;  // [num_blocks, num_layers, kv_heads, bytes]
  float *k_scales, *v_scales;  // [num_blocks, num_layers, kv_heads, block_size] where the cache is int8, else null
  const int32_t* slots;     // [tokens]
  const int32_t* seen;      // [tokens] cached tokens that each attends to, itself included; 0 for padding
  float* states;            // where items leave states for others
};

// Where `head` of q, k and v taken together begins in `qkv`.
static inline int64_t given_at(const AttentionCall& call, int64_t token, int32_t head) {
  return (token * (call.num_heads + 2 * call.cache.num_kv_heads) + head) * call.cache.head_dim;
}

// Rotary position embedding (arXiv:2104.09864) in the form that pairs dimension i with i + head_dim / 2.
static inline void turn(const AttentionCall& call, int64_t token, float* x) {
  const int32_t half = call.cache.head_dim / 2;
  const float *cos = call.cos + token * half, *sin = call.sin + token * half;
  for (int32_t i = 0; i < half; ++i) {
    const float first = x[i], second = x[i + half];
    x[i] = first * cos[i] - second * sin[i];
    x[i + half] = second * cos[i] + first * sin[i];
  }
}

// A state is v_dim floats of output, then the peak and the total of the weights; padded to a cache line.
constexpr int32_t kStateExtra = 16;

constexpr int32_t kNoStates = -1;

// Of a piece at most.
constexpr int32_t kPieceTokens = 128;

struct AttentionItem {
  const int32_t* tokens;  // packed tokens, in the order of their positions
  int32_t num_tokens, kv_head;
  const int32_t* table;             // the block ids of their context
  int32_t first_piece, end_piece;   // what to attend to
  // States to start from, in `AttentionCall::states`: of the pieces before, one each or folded already.
  int64_t before;
  int32_t num_before;
  int64_t before_stride;
  // Where the states go, one a piece at `after_stride` or all folded into one; kNoStates: the output is written.
  int64_t after;
  bool each_piece;
  int64_t after_stride;
};

// What attention_isa.cc offers, by `CacheShape::stored`. `next` is what this thread will likely do next, or null: its
// first blocks are fetched early. `scratch` has attention_scratch_bytes and lies on a cache line.
struct AttentionKernels {
  void (*attend[4])(const AttentionCall&, const AttentionItem&, const AttentionItem* next, char* scratch);
};

size_t attention_scratch_bytes(const CacheShape& cache, int32_t num_queries);

// What attention_write_isa.cc offers as `write_kv`: K and V of packed tokens [begin, end) into the cache.
using WriteKV = void (*)(const AttentionCall& call, int64_t begin, int64_t end);

}  // namespace pagedjax
