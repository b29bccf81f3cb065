// What attention does with a piece of a context, at one level of instructions: scores, weights, output, and joining the
// states of pieces. attention_isa.cc says in which order.
//
// Blocks of up to kMaxRows queries take three passes over data in the first-level cache: scores (queries times K, a lane
// a token), weights (their powers, less the peak), output (weights times V, a lane a dimension). Both products are one
// loop: a broadcast element of the left side times kMaxColumns vectors of the right.
#pragma once

#include "attention.h"
#include "attention_vectors.h"

namespace pagedjax {
namespace PAGEDJAX_LEVEL {
namespace {

// Far below any score, yet finite: the difference of two of them is 0, not NaN.
constexpr float kMasked = -1e30f;
// Tiles between the one in use and the one being fetched.
constexpr int kAhead = 4;
constexpr int kMaxPieceTiles = 16;
// Rows of the left sides lie at constant distances, so that all of them are reached from one register.
constexpr int kQueryStride = 256 + 16, kScoreStride = 128 + 16;

// --- how numbers are stored, and multiplied ---------------------------------------------------------------------------

// `Stored` lies in the cache, `kPack` numbers of a dot product side by side; `Operand` is the other side of a product.
// Where `kScaled`, each token has scales of its own; where `kNear`, pieces lie in the nearest cache already.
struct Float32 {
  using Stored = float;
  using Operand = float;
  static constexpr int kPack = 1;
  static constexpr bool kScaled = false, kNear = false;
  using Row = F;
  using Column = F;
  static Row row(const float* p) { return every(*p); }
  static Column column(const float* p) { return load(p); }
  static F add(F sum, Row a, Column b) { return multiply_add(a, b, sum); }
  static float operand(float x) { return x; }
};

struct Float16 {
  using Stored = uint16_t;
  using Operand = float;
  static constexpr int kPack = 1;
  static constexpr bool kScaled = false, kNear = false;
  using Row = F;
  using Column = F;
  static Row row(const float* p) { return every(*p); }
  static Column column(const uint16_t* p) { return load_half(p); }
  static F add(F sum, Row a, Column b) { return multiply_add(a, b, sum); }
  static float operand(float x) { return x; }
};

#if defined(__AVX512BF16__)

struct BFloat16 {
  using Stored = uint16_t;
  using Operand = uint16_t;
  static constexpr int kPack = 2;
  static constexpr bool kScaled = false, kNear = false;
  using Row = __m512bh;
  using Column = __m512bh;
  static Row row(const uint16_t* p) {
    int32_t pair;
    memcpy(&pair, p, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static Column column(const uint16_t* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static F add(F sum, Row a, Column b) { return _mm512_dpbf16_ps(sum, a, b); }
  static uint16_t operand(float x) { return to_bfloat16(x); }
};

// Multiplied as bfloat16, which holds whole numbers of 8 bits exactly.
struct Int8 : BFloat16 {
  using Stored = int8_t;
  static constexpr bool kScaled = true;
  static Column column(const int8_t* p) {
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(p + kLanes))));
    return _mm512_cvtne2ps_pbh(high, low);
  }
};

#else

struct BFloat16 {
  using Stored = uint16_t;
  using Operand = float;
  static constexpr int kPack = 2;
  static constexpr bool kScaled = false, kNear = false;
  struct Row {
    F first, second;
  };
  using Column = Row;
  static Row row(const float* p) { return {every(p[0]), every(p[1])}; }
  static Column column(const uint16_t* p) { return {firsts(p), seconds(p)}; }
  static F add(F sum, Row a, Column b) {
    return multiply_add(a.second, b.second, multiply_add(a.first, b.first, sum));
  }
  static float operand(float x) { return x; }
};

struct Int8 : BFloat16 {
  using Stored = int8_t;
  static constexpr bool kScaled = true;
  static Column column(const int8_t* p) { return {firsts(p), seconds(p)}; }
};

#endif

// Bytes that were widened to bfloat16 before.
struct WideInt8 : BFloat16 {
  static constexpr bool kScaled = true, kNear = true;
};

inline void put(float* p, F x) { store(p, x); }

inline void put(uint16_t* p, F x) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
#else
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) p[i] = to_bfloat16(lanes[i]);
#endif
}

// --- the two products -------------------------------------------------------------------------------------------------

inline void fetch(const void* p) { __builtin_prefetch(p); }

// A piece of a context, for one KV head.
template <class T>
struct Piece {
  int num_tiles, tile_tokens, k_dim, v_dim;
  // Tiles in the order of use: K's, V's, and what comes after, to be fetched.
  const typename T::Stored* tiles[2 * kMaxPieceTiles + kAhead];
  const float *k_scales[kMaxPieceTiles], *v_scales[kMaxPieceTiles];  // where scaled
};

// `count` bytes as bfloat16, while those of `later` are fetched.
inline void widen(const int8_t* from, const int8_t* later, int count, uint16_t* to) {
  constexpr int kLine = 64;
  for (int first = 0; first < count; first += kLine) {
    const int end = first + kLine < count ? first + kLine : count;
    fetch(later + first);
#if defined(__AVX512BF16__)
    for (int i = first; i < end; i += 2 * kLanes) _mm512_storeu_si512(to + i, (__m512i)Int8::column(from + i));
#else
    for (int i = first; i < end; ++i) to[i] = static_cast<uint16_t>(bits_of(from[i]) >> 16);
#endif
  }
}

// The piece with its tiles widened into `to`, which has room for them, while what comes after it is fetched.
inline Piece<WideInt8> widen(const Piece<Int8>& piece, uint16_t* to) {
  Piece<WideInt8> wide{piece.num_tiles, piece.tile_tokens, piece.k_dim, piece.v_dim, {}, {}, {}};
  for (int t = 0; t < 2 * piece.num_tiles; ++t) {
    const int count = piece.tile_tokens * (t < piece.num_tiles ? piece.k_dim : piece.v_dim);
    widen(piece.tiles[t], piece.tiles[t + kAhead], count, to);
    wide.tiles[t] = to;
    to += count;
  }
  for (int t = 0; t < kAhead; ++t) wide.tiles[2 * piece.num_tiles + t] = wide.tiles[0];
  for (int t = 0; t < piece.num_tiles; ++t)
    wide.k_scales[t] = piece.k_scales[t], wide.v_scales[t] = piece.v_scales[t];
  return wide;
}

// Scores of M queries against N vectors of tokens from `first_column` on.
template <class T, int M, int N>
void score(const Piece<T>& piece, const typename T::Operand* queries, int first_column, float factor,
           float* scores) {
  const int per_tile = piece.tile_tokens / kLanes, depth = piece.k_dim / T::kPack;
  const int step = piece.tile_tokens * T::kPack;
  const typename T::Stored *columns[N], *later[N];
  for (int n = 0; n < N; ++n) {
    const int tile = (first_column + n) / per_tile, lane = (first_column + n) % per_tile * kLanes * T::kPack;
    columns[n] = piece.tiles[tile] + lane;
    later[n] = piece.tiles[tile + kAhead] + lane;
  }
  F sums[M][N];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) sums[m][n] = every(0.0f);
  for (int i = 0; i < depth; ++i) {
    typename T::Column b[N];
    for (int n = 0; n < N; ++n) {
      b[n] = T::column(columns[n] + i * step);
      if (!T::kNear) fetch(later[n] + i * step);
    }
    for (int m = 0; m < M; ++m) {
      const typename T::Row a = T::row(queries + m * kQueryStride + i * T::kPack);
      for (int n = 0; n < N; ++n) sums[m][n] = T::add(sums[m][n], a, b[n]);
    }
  }
  for (int n = 0; n < N; ++n) {
    F factors = every(factor);
    if constexpr (T::kScaled)
      factors = factors * load(piece.k_scales[(first_column + n) / per_tile] + (first_column + n) % per_tile * kLanes);
    for (int m = 0; m < M; ++m) store(scores + m * kScoreStride + (first_column + n) * kLanes, sums[m][n] * factors);
  }
}

// Output of M queries in N vectors of dimensions from `first_column` on: the weights of `seen` tokens times V. Where
// tokens are stored in pairs and `seen` is odd, `tail` is the last pair with the unseen token cleared.
template <class T, int M, int N>
void weigh(const Piece<T>& piece, const typename T::Operand* weights, int seen, const typename T::Stored* tail,
           int first_column, float* out) {
  const int tile_rows = piece.tile_tokens / T::kPack, step = piece.v_dim * T::kPack;
  const int column = first_column * kLanes * T::kPack;
  const int whole_rows = seen / T::kPack, num_rows = (seen + T::kPack - 1) / T::kPack;
  const auto* tiles = piece.tiles + piece.num_tiles;
  F sums[M][N];
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) sums[m][n] = every(0.0f);
  for (int row = 0; row < num_rows;) {
    const int tile = row / tile_rows, tile_end = (tile + 1) * tile_rows;
    const bool is_tail = row == whole_rows;
    const typename T::Stored* from = (is_tail ? tail : tiles[tile]) + column;
    const typename T::Stored* later = tiles[tile + kAhead] + column;
    const int end = is_tail ? num_rows : tile_end < whole_rows ? tile_end : whole_rows;
    for (; row < end; ++row, from += step, later += step) {
      typename T::Column b[N];
      for (int n = 0; n < N; ++n) {
        b[n] = T::column(from + n * kLanes * T::kPack);
        if (!T::kNear) fetch(later + n * kLanes * T::kPack);
      }
      for (int m = 0; m < M; ++m) {
        const typename T::Row a = T::row(weights + m * kScoreStride + row * T::kPack);
        for (int n = 0; n < N; ++n) sums[m][n] = T::add(sums[m][n], a, b[n]);
      }
    }
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) store(out + m * piece.v_dim + (first_column + n) * kLanes, sums[m][n]);
}

// f<N>(first column) over `count` columns.
template <int N, class Fn>
void over_columns(int first, int count, const Fn& fn) {
  for (; first + N <= count; first += N) fn.template run<N>(first);
  if constexpr (N > 1) over_columns<N / 2>(first, count, fn);
}

// --- softmax ----------------------------------------------------------------------------------------------------------

// The weights of tokens from `token` on as V is multiplied by them.
template <class T>
F scaled_weights(const Piece<T>& piece, F weights, int token) {
  if constexpr (!T::kScaled) return weights;
  return weights * load(piece.v_scales[token / piece.tile_tokens] + token % piece.tile_tokens);
}

// Weights of the first `seen` scores relative to their peak, zeros after them up to `padded`.
template <class T>
void soften(const Piece<T>& piece, const float* scores, int seen, int padded, typename T::Operand* weights, float* peak,
            float* total) {
  const int whole = seen / kLanes * kLanes, rest = seen - whole;
  F most = every(kMasked);
  for (int i = 0; i < whole; i += kLanes) most = larger(most, load(scores + i));
  if (rest) most = larger(most, first_lanes(load(scores + whole), rest, every(kMasked)));
  *peak = largest(most);
  F sums = every(0.0f);
  for (int i = 0; i < whole; i += kLanes) {
    const F weight = power_of_two(load(scores + i) - every(*peak));
    sums = sums + weight;
    put(weights + i, scaled_weights(piece, weight, i));
  }
  for (int i = whole; i < padded; i += kLanes) {
    const F zero = every(0.0f);
    F weight = zero, scaled = zero;
    if (i < seen) {
      weight = first_lanes(power_of_two(load(scores + i) - every(*peak)), rest, zero);
      scaled = first_lanes(scaled_weights(piece, weight, i), rest, zero);  // the scales of unseen tokens may be NaN
    }
    sums = sums + weight;
    put(weights + i, scaled);
  }
  *total = sum(sums);
}

void clear(float* states, int num_queries, int v_dim) {
  for (int i = 0; i < num_queries; ++i, states += v_dim + kStateExtra) {
    for (int d = 0; d < v_dim; ++d) states[d] = 0.0f;
    states[v_dim] = kMasked, states[v_dim + 1] = 0.0f;
  }
}

// `state` joined by that of later pieces.
void fold(float* state, const float* out, float peak, float total, int v_dim) {
  float* const old = state + v_dim;
  const float top = peak > old[0] ? peak : old[0];
  const float keep = power_of_two(old[0] - top), add = power_of_two(peak - top);
  for (int d = 0; d < v_dim; d += kLanes)
    store(state + d, multiply_add(load(state + d), every(keep), load(out + d) * every(add)));
  old[0] = top, old[1] = old[1] * keep + total * add;
}

}  // namespace
}  // namespace PAGEDJAX_LEVEL
}  // namespace pagedjax
