// The products of gemm.h at one level of instructions: x is prepared row by row, then tiles of rows x blocks of outputs
// are summed in registers over all inputs and finished (bias, SwiGLU, residual, rounding) from a small buffer. Weights
// are fetched a tile ahead: a block is too short a run of memory for the hardware to foresee, and without that a thread
// waited for memory half of its time at up to 8 rows, and a tenth at 64.
#include "gemm.h"
#include "gemm_rows.h"
#include "simd.h"

namespace pagedjax {
namespace PAGEDJAX_LEVEL {
namespace {

// Rows x blocks of a tile: as many sums as there are registers, less those for weights and inputs.
#if defined(PAGEDJAX_SIMD_AVX512)
constexpr int kFloatRows = 6, kFloatBlocks = 4, kIntRows = 4, kIntBlocks = 3;
#elif defined(PAGEDJAX_SIMD_AVX2)
constexpr int kFloatRows = 4, kFloatBlocks = 1, kIntRows = 3, kIntBlocks = 1;
#else
constexpr int kFloatRows = 2, kFloatBlocks = 1, kIntRows = 2, kIntBlocks = 1;
#endif
constexpr int kLine = 64;

// ---- tiles: sums[row][block][16] ------------------------------------------------------------------------------------

// While a tile is summed, each step of it fetches as much of the weights that come after it, which begin at `ahead`.
template <int blocks, int num_bytes>
PAGEDJAX_INLINE void fetch_step(const uint8_t* ahead, int64_t step) {
  for (int i = 0; i < blocks * num_bytes; i += kLine) __builtin_prefetch(ahead + step * blocks * num_bytes + i);
}

template <int rows, int blocks>
void tile_bf16(const Gemm& g, int64_t row, int64_t block, const uint8_t* ahead, float* sums) {
  int64_t num_pairs = (g.num_inputs + 1) / 2;
  size_t stride = prepared_bytes(g);
  const Pair* x[rows];
  for (int r = 0; r < rows; ++r) x[r] = (const Pair*)(g.prepared + (row + r) * stride);
  const uint8_t* w[blocks];
  for (int c = 0; c < blocks; ++c) w[c] = g.weight + (block + c) * g.block_bytes;
  Floats16 acc[blocks][rows];
  for (int c = 0; c < blocks; ++c)
    for (int r = 0; r < rows; ++r) acc[c][r] = set1(0.0f);
  for (int64_t k = 0; k < num_pairs; ++k) {
    if (ahead != nullptr) fetch_step<blocks, 64>(ahead, k);
    for (int c = 0; c < blocks; ++c) dot_pairs<rows>(acc[c], (const uint16_t*)(w[c] + k * 4 * kBlockOutputs), x, k);
  }
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < blocks; ++c) store(sums + (r * blocks + c) * kLanes, acc[c][r]);
}

template <Format format>
PAGEDJAX_INLINE Ints16 dot4(Ints16 sums, Bytes64 w, const int8_t* x) {
  if constexpr (format == Format::nibbles) return dot_nibbles(sums, w, x);
  return dot_bytes(sums, w, x);
}

// Integer sums of one group of 32 inputs, from input k on: each weight is loaded and taken apart once for all rows, each
// input broadcast once for all blocks.
template <Format format, int rows, int blocks>
PAGEDJAX_INLINE void dot_group(Ints16 (&sums)[rows][blocks], const uint8_t* w, int64_t block_bytes,
                               const int8_t* const (&x)[rows], int64_t k) {
  for (int j = 0; j < 4; ++j) {
    Bytes64 first[blocks], second[blocks];
    for (int c = 0; c < blocks; ++c) {
      const uint8_t* at = w + c * block_bytes;
      if constexpr (format == Format::nibbles) {
        Bytes64 both = load_bytes(at + 64 * j);
        first[c] = low_nibbles(both), second[c] = high_nibbles(both);
      } else {
        first[c] = load_bytes(at + 128 * j), second[c] = load_bytes(at + 128 * j + 64);
      }
    }
    for (int r = 0; r < rows; ++r) {
      const int8_t* at = x[r] + k + 8 * j;
      for (int c = 0; c < blocks; ++c) sums[r][c] = dot4<format>(sums[r][c], first[c], at);
      for (int c = 0; c < blocks; ++c) sums[r][c] = dot4<format>(sums[r][c], second[c], at + 4);
    }
  }
}

// Sums from the start: what bytes stored as q + 128 have to be relieved of.
template <Format format, int rows, int blocks>
PAGEDJAX_INLINE void start_sums(Ints16 (&sums)[rows][blocks], const int32_t* const (&starts)[rows], int64_t group) {
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < blocks; ++c) sums[r][c] = set1_int(format == Format::bytes ? starts[r][group] : 0);
}

template <Format format, bool fine, int rows, int blocks>
void tile_quantised(const Gemm& g, int64_t row, int64_t block, const uint8_t* ahead, float* sums) {
  constexpr int kGroupBytes = format == Format::nibbles ? 320 : 544;
  constexpr int kScales = format == Format::nibbles ? 256 : 512;
  int64_t num_groups = g.num_inputs / kGroup;
  size_t stride = prepared_bytes(g);
  const int8_t *high[rows], *low[rows];
  const float *scales[rows], *x_sums[rows];
  const int32_t *starts[rows], *low_starts[rows];
  const uint8_t* is_outlier[rows];
  for (int r = 0; r < rows; ++r) {
    QuantisedRow x(g, g.prepared + (row + r) * stride);
    high[r] = x.high, low[r] = x.low, scales[r] = x.scales, x_sums[r] = x.sums;
    starts[r] = x.starts, low_starts[r] = x.low_starts, is_outlier[r] = x.is_outlier;
  }
  const uint8_t* w = g.weight + block * g.block_bytes;
  Floats16 acc[rows][blocks];
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < blocks; ++c) acc[r][c] = set1(0.0f);
  for (int64_t group = 0; group < num_groups; ++group, w += kGroupBytes) {
    if (ahead != nullptr) fetch_step<blocks, kGroupBytes>(ahead, group);
    Ints16 dots[rows][blocks];
    start_sums<format, rows, blocks>(dots, starts, group);
    dot_group<format, rows, blocks>(dots, w, g.block_bytes, high, group * kGroup);
    for (int c = 0; c < blocks; ++c) {
      const uint16_t* at = (const uint16_t*)(w + c * g.block_bytes + kScales);
      Floats16 scale = load_half(at);
      for (int r = 0; r < rows; ++r)
        acc[r][c] = fma(to_float(dots[r][c]), scale * set1(scales[r][group]), acc[r][c]);
      if constexpr (format == Format::nibbles) {
        Floats16 minimum = load_half(at + kLanes);
        for (int r = 0; r < rows; ++r) acc[r][c] = fma(minimum, set1(x_sums[r][group]), acc[r][c]);
      }
    }
    if constexpr (fine) {
      int any = 0;
      for (int r = 0; r < rows; ++r) any |= is_outlier[r][group];
      if (!any) continue;
      start_sums<format, rows, blocks>(dots, low_starts, group);
      dot_group<format, rows, blocks>(dots, w, g.block_bytes, low, group * kGroup);
      for (int c = 0; c < blocks; ++c) {
        Floats16 scale = load_half((const uint16_t*)(w + c * g.block_bytes + kScales)) * set1(1.0f / kLowUnits);
        for (int r = 0; r < rows; ++r)
          acc[r][c] = fma(to_float(dots[r][c]), scale * set1(scales[r][group]), acc[r][c]);
      }
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < blocks; ++c) store(sums + (r * blocks + c) * kLanes, acc[r][c]);
}

template <Format format, bool fine, int rows, int blocks>
PAGEDJAX_INLINE void tile(const Gemm& g, int64_t row, int64_t block, const uint8_t* ahead, float* sums) {
  if constexpr (format == Format::bf16) {
    tile_bf16<rows, blocks>(g, row, block, ahead, sums);
  } else {
    tile_quantised<format, fine, rows, blocks>(g, row, block, ahead, sums);
  }
}

// The tile of `num_rows`, at most `rows`.
template <Format format, bool fine, int rows, int blocks>
PAGEDJAX_INLINE void tile_of(int64_t num_rows, const Gemm& g, int64_t row, int64_t block, const uint8_t* ahead,
                             float* sums) {
  if constexpr (rows > 1) {
    if (num_rows < rows) return tile_of<format, fine, rows - 1, blocks>(num_rows, g, row, block, ahead, sums);
  }
  tile<format, fine, rows, blocks>(g, row, block, ahead, sums);
}

// ---- what follows the sums ------------------------------------------------------------------------------------------

// 16 elements from `index` on, `count` of them there.
PAGEDJAX_INLINE Floats16 load_part(const FloatArray& array, int64_t index, int64_t count) {
  if (count < kLanes) return load_last(array, index, count).a;
  return array.is_bf16 ? load_bf16((const uint16_t*)array.data + index) : load((const float*)array.data + index);
}

PAGEDJAX_INLINE void store_part(const FloatArray& array, int64_t index, int64_t count, Floats16 x) {
  alignas(64) uint8_t buffer[kLanes * sizeof(float)];
  size_t size = array.is_bf16 ? 2 : 4;
  uint8_t* at = (uint8_t*)array.data + index * size;
  uint8_t* to = count < kLanes ? buffer : at;
  if (array.is_bf16) {
    store_bf16((uint16_t*)to, x);
  } else {
    store((float*)to, x);
  }
  if (count < kLanes) memcpy(at, buffer, count * size);
}

PAGEDJAX_INLINE Floats16 biased(const Gemm& g, const float* sums, int64_t output, int64_t count) {
  Floats16 x = load(sums);
  return g.bias.data == nullptr ? x : x + load_part(g.bias, output, count);
}

// Sums of outputs [output, output + count) into the row's largest.
void keep_largest(Largest* kept, const float* sums, int64_t output, int64_t count) {
  float some[kLanes];
  for (int i = 0; i < kLanes; ++i) some[i] = i < count ? sums[i] : sums[0];
  Floats16 x = load(count < kLanes ? some : sums);
  float most = largest(x);
  if (any_nan(x)) {
    kept->value = __builtin_nanf("");
  } else if (most > kept->value) {
    int lane = 0;
    while (sums[lane] != most) ++lane;
    *kept = {most, (int32_t)(output + lane)};
  }
}

// Results [column, column + 16 * blocks) of rows [row, row + num_rows) from their sums, and, where gated, those of `up`.
void finish(const Gemm& g, int64_t row, int64_t num_rows, int64_t column, int blocks, const float* sums, const float* up) {
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int c = 0; c < blocks; ++c, sums += kLanes, up += kLanes) {
      int64_t result = column + c * kBlockOutputs, count = g.num_results - result;
      if (count > kLanes) count = kLanes;
      if (g.largest != nullptr) {
        keep_largest(g.largest + row + r, sums, result, count);
        continue;
      }
      Floats16 x = biased(g, sums, result, count);
      if (g.gated) x = silu(x) * biased(g, up, g.num_results + result, count);
      int64_t index = (row + r) * g.num_results + result;
      if (g.residual.data != nullptr) x = x + load_part(g.residual, index, count);
      store_part(g.out, index, count, x);
    }
  }
}

// ---- ranges ---------------------------------------------------------------------------------------------------------

// The weights of a tile at `column`, if a whole one is there: a narrower one at the end is not fetched ahead.
PAGEDJAX_INLINE const uint8_t* weights_of(const Gemm& g, int64_t column, int blocks) {
  bool is_whole = column + blocks * kBlockOutputs <= g.num_results;
  return is_whole ? g.weight + column / kBlockOutputs * g.block_bytes : nullptr;
}

// The tile at `column`, of all rows: its weights come from memory for the first rows, while those at `next` are fetched.
template <Format format, bool fine, int rows, int blocks>
void run_column(const Gemm& g, int64_t row_begin, int64_t row_end, int64_t column, int64_t next) {
  alignas(64) float sums[rows * blocks * kLanes], up[rows * blocks * kLanes];
  int64_t block = column / kBlockOutputs, up_block = block + g.num_results / kBlockOutputs;
  const uint8_t* ahead = weights_of(g, next, blocks);
  for (int64_t row = row_begin; row < row_end; row += rows, ahead = nullptr) {
    int64_t num_rows = row_end - row < rows ? row_end - row : rows;
    const uint8_t* after = g.gated && row == row_begin ? g.weight + up_block * g.block_bytes : ahead;
    tile_of<format, fine, rows, blocks>(num_rows, g, row, block, after, sums);
    if (g.gated) tile_of<format, fine, rows, blocks>(num_rows, g, row, up_block, ahead, up);
    finish(g, row, num_rows, column, blocks, sums, up);
  }
}

template <Format format, bool fine, int rows, int blocks>
void run(const Gemm& g, int64_t row_begin, int64_t row_end, int64_t column, int64_t column_end, int64_t next) {
  auto after = [&](int64_t end) { return end < column_end ? end : next; };
  constexpr int64_t width = blocks * kBlockOutputs;
  for (; column + width <= column_end; column += width)
    run_column<format, fine, rows, blocks>(g, row_begin, row_end, column, after(column + width));
  for (; column < column_end; column += kBlockOutputs)
    run_column<format, fine, rows, 1>(g, row_begin, row_end, column, after(column + kBlockOutputs));
}

// Few rows are bound by memory, which is read fastest in one run after the other.
constexpr int64_t kFewRows = 2;

int64_t tile_columns(const Gemm& g) {
  if (g.num_rows <= kFewRows) return kBlockOutputs;
  return (g.format == Format::bf16 ? kFloatBlocks : kIntBlocks) * kBlockOutputs;
}

template <Format format, bool fine>
void multiply_as(const Gemm& g, int64_t row_begin, int64_t row_end, int64_t column, int64_t column_end, int64_t next) {
  constexpr int kRows = format == Format::bf16 ? kFloatRows : kIntRows;
  constexpr int kBlocks = format == Format::bf16 ? kFloatBlocks : kIntBlocks;
  if (g.num_rows <= kFewRows) return run<format, fine, kFewRows, 1>(g, row_begin, row_end, column, column_end, next);
  run<format, fine, kRows, kBlocks>(g, row_begin, row_end, column, column_end, next);
}

void multiply(const Gemm& g, int64_t row_begin, int64_t row_end, int64_t column_begin, int64_t column_end,
              int64_t next_column) {
  auto as = [&](auto function) { function(g, row_begin, row_end, column_begin, column_end, next_column); };
  switch (g.format) {
    case Format::bf16: return as(multiply_as<Format::bf16, false>);
    case Format::nibbles: return as(g.fine ? multiply_as<Format::nibbles, true> : multiply_as<Format::nibbles, false>);
    case Format::bytes: return as(g.fine ? multiply_as<Format::bytes, true> : multiply_as<Format::bytes, false>);
  }
}

}  // namespace

extern const GemmKernels gemm_kernels = {tile_columns, prepared_bytes, prepare, multiply};

}  // namespace PAGEDJAX_LEVEL
}  // namespace pagedjax
