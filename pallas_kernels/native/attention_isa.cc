// One item of attention, at one level of instructions: see attention.h. Its queries are turned and rounded once, then go
// through its context piece by piece; attention_passes.h has what is done with a piece.

#include "attention.h"
#include "attention_passes.h"
#include "levels.h"

namespace pagedjax {
namespace PAGEDJAX_LEVEL {
namespace {

struct Buffers {
  char* next;
  template <class U>
  U* take(size_t count) {
    U* p = reinterpret_cast<U*>(next);
    next += (count * sizeof(U) + 63) / 64 * 64;
    return p;
  }
};

// What the passes over a piece share.
template <class T>
struct Passes {
  const AttentionCall& call;
  Piece<T> piece;
  typename T::Operand* queries;     // [queries, kQueryStride]
  float* scores;                    // [kMaxRows, kScoreStride]
  typename T::Operand* weights;     // [kMaxRows, kScoreStride]
  float* out;                       // [kMaxRows, v_dim]
  typename T::Stored* tail;         // [v_dim, pack]
  uint16_t* wide;                   // room for a piece of widened bytes and a tail of it
};

template <class T, int M>
struct Score {
  const Passes<T>& p;
  const typename T::Operand* queries;
  template <int N>
  void run(int column) const {
    score<T, M, N>(p.piece, queries, column, p.call.factor, p.scores);
  }
};

template <class T, int M>
struct Weigh {
  const Passes<T>& p;
  int seen;
  template <int N>
  void run(int column) const {
    weigh<T, M, N>(p.piece, p.weights, seen, p.tail, column, p.out);
  }
};

// M queries from `first` on against the piece; `seen` counts its tokens that each attends to.
template <class T, int M>
void pass(const Passes<T>& p, int first, const int* seen, float* states) {
  const int v_dim = p.piece.v_dim, state_size = v_dim + kStateExtra;
  int most = 0;
  for (int m = 0; m < M; ++m) most = seen[m] > most ? seen[m] : most;
  if (most == 0) return;
  const int columns = (most + kLanes - 1) / kLanes;
  over_columns<kMaxColumns>(0, columns, Score<T, M>{p, p.queries + first * kQueryStride});
  float peaks[M], totals[M];
  for (int m = 0; m < M; ++m)
    soften<T>(p.piece, p.scores + m * kScoreStride, seen[m], columns * kLanes, p.weights + m * kScoreStride, &peaks[m], &totals[m]);
  if (T::kPack == 2 && most % 2) {
    const int tile = most / p.piece.tile_tokens, row = most % p.piece.tile_tokens / 2;
    const auto* pairs = p.piece.tiles[p.piece.num_tiles + tile] + row * 2 * v_dim;
    for (int d = 0; d < v_dim; ++d) p.tail[2 * d] = pairs[2 * d], p.tail[2 * d + 1] = 0;
  }
  over_columns<kMaxColumns>(0, v_dim / kLanes, Weigh<T, M>{p, most});
  for (int m = 0; m < M; ++m)
    fold(states + (first + m) * state_size, p.out + m * v_dim, peaks[m], totals[m], v_dim);
}

template <class T, int M = kMaxRows>
void pass_rows(const Passes<T>& p, int rows, int first, const int* seen, float* states) {
  if (rows == M) return pass<T, M>(p, first, seen, states);
  if constexpr (M > 1) pass_rows<T, M - 1>(p, rows, first, seen, states);
}

inline float number(float x) { return x; }
struct BFloat16Bits {
  uint16_t bits;
};
struct Float16Bits {
  uint16_t bits;
};
inline float number(BFloat16Bits x) { return from_bfloat16(x.bits); }
inline float number(Float16Bits x) { return from_float16(x.bits); }
inline void set(float* to, float x) { *to = x; }
inline void set(BFloat16Bits* to, float x) { to->bits = to_bfloat16(x); }
inline void set(Float16Bits* to, float x) { to->bits = to_float16(x); }

inline int token_of(const AttentionCall& call, const AttentionItem& item, int i) { return item.tokens[i / call.group]; }
inline int head_of(const AttentionCall& call, const AttentionItem& item, int i) {
  return item.kv_head * call.group + i % call.group;
}

template <class T, class Given>
void take_given_queries(const AttentionCall& call, const AttentionItem& item, typename T::Operand* queries) {
  const CacheShape& c = call.cache;
  float query[kQueryStride] = {};
  for (int i = 0; i < item.num_tokens * call.group; ++i) {
    const int token = token_of(call, item, i);
    const Given* from = static_cast<const Given*>(call.qkv) + given_at(call, token, head_of(call, item, i));
    for (int d = 0; d < c.head_dim; ++d) query[d] = number(from[d]);
    if (call.cos != nullptr) turn(call, token, query);
    for (int d = 0; d < c.k_dim; d += kLanes) put(queries + i * kQueryStride + d, load(query + d));
  }
}

template <class T>
void take_queries(const AttentionCall& call, const AttentionItem& item, typename T::Operand* queries) {
  switch (call.given) {
    case Number::float32: return take_given_queries<T, float>(call, item, queries);
    case Number::bfloat16: return take_given_queries<T, BFloat16Bits>(call, item, queries);
    case Number::float16: return take_given_queries<T, Float16Bits>(call, item, queries);
  }
}

template <class Given>
void write_given_out(const AttentionCall& call, const AttentionItem& item, const float* states) {
  const CacheShape& c = call.cache;
  for (int i = 0; i < item.num_tokens * call.group; ++i) {
    const float* state = states + i * (c.v_dim + kStateExtra);
    const float share = 1.0f / state[c.v_dim + 1];
    const int64_t at = static_cast<int64_t>(token_of(call, item, i)) * call.num_heads + head_of(call, item, i);
    Given* to = static_cast<Given*>(call.out) + at * c.head_dim;
    for (int d = 0; d < c.head_dim; ++d) set(to + d, state[d] * share);
  }
}

void write_out(const AttentionCall& call, const AttentionItem& item, const float* states) {
  switch (call.given) {
    case Number::float32: return write_given_out<float>(call, item, states);
    case Number::bfloat16: return write_given_out<BFloat16Bits>(call, item, states);
    case Number::float16: return write_given_out<Float16Bits>(call, item, states);
  }
}

// The states of the item's queries joined by the ones that were left for it.
void fold_before(const AttentionCall& call, const AttentionItem& item, int index, float* states) {
  const int v_dim = call.cache.v_dim, state_size = v_dim + kStateExtra;
  const float* before = call.states + item.before + index * item.before_stride;
  for (int i = 0; i < item.num_tokens * call.group; ++i, states += state_size, before += state_size)
    fold(states, before, before[v_dim], before[v_dim + 1], v_dim);
}

// The first token of a tile, counted over the whole cache, its heads apart.
int64_t token_at(const AttentionCall& call, const AttentionItem& item, int tile) {
  const CacheShape& c = call.cache;
  const int per_block = c.block_size / c.tile_tokens;
  const int64_t block = item.table[tile / per_block];
  const int64_t head = (block * c.num_layers + call.layer) * c.num_kv_heads + item.kv_head;
  return head * c.block_size + tile % per_block * c.tile_tokens;
}

template <class T>
const typename T::Stored* tile_at(const AttentionCall& call, const AttentionItem& item, const char* cache, int dim,
                                  int tile) {
  return reinterpret_cast<const typename T::Stored*>(cache) + token_at(call, item, tile) * dim;
}

// The tiles of piece `index` up to `seen` of its tokens, and the first ones of what comes next.
template <class T>
void find_tiles(const AttentionCall& call, const AttentionItem& item, const AttentionItem* next, int index, int seen,
                Piece<T>* piece) {
  const CacheShape& c = call.cache;
  const int per_piece = c.piece_blocks * c.block_size / c.tile_tokens;
  const int count = (seen + c.tile_tokens - 1) / c.tile_tokens;
  piece->num_tiles = count;
  for (int t = 0; t < count; ++t) {
    piece->tiles[t] = tile_at<T>(call, item, call.k_cache, c.k_dim, index * per_piece + t);
    piece->tiles[count + t] = tile_at<T>(call, item, call.v_cache, c.v_dim, index * per_piece + t);
    if constexpr (T::kScaled) {
      const int64_t token = token_at(call, item, index * per_piece + t);
      fetch(piece->k_scales[t] = call.k_scales + token);
      fetch(piece->v_scales[t] = call.v_scales + token);
    }
  }
  // Whatever comes next has a first tile; what lies behind it in the block may be unused, but is there.
  const bool goes_on = index + 1 < item.end_piece;
  const AttentionItem& later = goes_on || next == nullptr ? item : *next;
  const int first = goes_on ? index + 1 : later.first_piece;
  const bool known = goes_on || (next != nullptr && next->first_piece < next->end_piece);
  const int num_tokens = known ? call.seen[later.tokens[later.num_tokens - 1]] - first * per_piece * c.tile_tokens : 0;
  const int num_later = (num_tokens + c.tile_tokens - 1) / c.tile_tokens;
  for (int t = 0; t < kAhead; ++t)
    piece->tiles[2 * count + t] =
        t < num_later ? tile_at<T>(call, later, call.k_cache, c.k_dim, first * per_piece + t) : piece->tiles[0];
}

// All queries of the item, several at a time. `seen_of` says how many tokens of the piece a token of the item attends to.
template <class T, class SeenOf>
void attend_rows(const Passes<T>& p, const AttentionItem& item, const SeenOf& seen_of, float* states) {
  const int num_queries = item.num_tokens * p.call.group;
  for (int first = 0; first < num_queries; first += kMaxRows) {
    const int rows = num_queries - first < kMaxRows ? num_queries - first : kMaxRows;
    int seen[kMaxRows];
    for (int m = 0; m < rows; ++m) seen[m] = seen_of((first + m) / p.call.group);
    pass_rows<T>(p, rows, first, seen, states);
  }
}

template <class T>
void attend_piece(Passes<T>* p, const AttentionItem& item, const AttentionItem* next, int index, float* states) {
  const AttentionCall& call = p->call;
  const int piece_tokens = call.cache.piece_blocks * call.cache.block_size;
  const auto seen_of = [&](int token) {
    const int left = call.seen[item.tokens[token]] - index * piece_tokens;
    return left < 0 ? 0 : left < piece_tokens ? left : piece_tokens;
  };
  find_tiles<T>(call, item, next, index, seen_of(item.num_tokens - 1), &p->piece);
  if constexpr (T::kScaled) {
    if (item.num_tokens * call.group > kMaxRows) {  // each byte is multiplied several times
      uint16_t* const tail = p->wide + kPieceTokens * (p->piece.k_dim + p->piece.v_dim);
      const Piece<WideInt8> piece = widen(p->piece, p->wide);
      const Passes<WideInt8> wide{call, piece, p->queries, p->scores, p->weights, p->out, tail, nullptr};
      return attend_rows(wide, item, seen_of, states);
    }
  }
  attend_rows(*p, item, seen_of, states);
}

template <class T>
void attend(const AttentionCall& call, const AttentionItem& item, const AttentionItem* next, char* scratch) {
  const CacheShape& c = call.cache;
  const int num_queries = item.num_tokens * call.group, state_size = c.v_dim + kStateExtra;
  Buffers buffers{scratch};
  Passes<T> p{call, {}, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
  p.piece.tile_tokens = c.tile_tokens, p.piece.k_dim = c.k_dim, p.piece.v_dim = c.v_dim;
  p.queries = buffers.take<typename T::Operand>(num_queries * kQueryStride);
  p.scores = buffers.take<float>(kMaxRows * kScoreStride);
  p.weights = buffers.take<typename T::Operand>(kMaxRows * kScoreStride);
  p.out = buffers.take<float>(kMaxRows * c.v_dim);
  p.tail = buffers.take<typename T::Stored>(2 * c.v_dim);
  if (T::kScaled) p.wide = buffers.take<uint16_t>(kPieceTokens * (c.k_dim + c.v_dim) + 2 * c.v_dim);
  if (item.first_piece < item.end_piece) take_queries<T>(call, item, p.queries);

  float* states = item.after == kNoStates ? buffers.take<float>(num_queries * state_size) : call.states + item.after;
  if (!item.each_piece) {
    clear(states, num_queries, c.v_dim);
    for (int b = 0; b < item.num_before; ++b) fold_before(call, item, b, states);
  }
  for (int index = item.first_piece; index < item.end_piece; ++index) {
    if (item.each_piece) clear(states = call.states + item.after + index * item.after_stride, num_queries, c.v_dim);
    attend_piece<T>(&p, item, next, index, states);
  }
  if (item.after == kNoStates) write_out(call, item, states);
}

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {{attend<Float32>, attend<BFloat16>, attend<Float16>, attend<Int8>}};

}  // namespace PAGEDJAX_LEVEL
}  // namespace pagedjax
