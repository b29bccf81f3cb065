// The products of gemm.h at one level of instructions: x is prepared row by row, then tiles of rows x blocks of outputs
// are summed in registers over all inputs and finished (bias, SwiGLU, residual, rounding) from a small buffer. There is
// no software prefetch: a block is one run of memory, and the hardware's was as fast at every distance tried.
#include "gemm.h"
#include "simd.h"

namespace pagedjax {
namespace PAGEDJAX_LEVEL {
namespace {

// Rows x blocks of a tile: as many sums as there are registers, less those for weights and inputs.
#if defined(PAGEDJAX_SIMD_AVX512)
constexpr int kFloatRows = 6, kFloatBlocks = 4, kIntRows = 6, kIntBlocks = 2, kFineRows = 4;
#elif defined(PAGEDJAX_SIMD_AVX2)
constexpr int kFloatRows = 4, kFloatBlocks = 1, kIntRows = 3, kIntBlocks = 1, kFineRows = 2;
#else
constexpr int kFloatRows = 2, kFloatBlocks = 1, kIntRows = 2, kIntBlocks = 1, kFineRows = 1;
#endif

// ---- one row of x, 32 inputs at a time ------------------------------------------------------------------------------

struct Floats32 { Floats16 a, b; };

PAGEDJAX_INLINE Floats32 load32(const FloatArray& array, int64_t offset) {
  if (array.is_bf16) {
    const uint16_t* p = (const uint16_t*)array.data + offset;
    return {load_bf16(p), load_bf16(p + kLanes)};
  }
  const float* p = (const float*)array.data + offset;
  return {load(p), load(p + kLanes)};
}

// The last `count` < 32 elements, then zeros.
Floats32 load_last(const FloatArray& array, int64_t offset, int64_t count) {
  alignas(64) uint8_t buffer[32 * sizeof(float)] = {};
  size_t size = array.is_bf16 ? 2 : 4;
  memcpy(buffer, (const uint8_t*)array.data + offset * size, count * size);
  return load32({buffer, array.is_bf16}, 0);
}

PAGEDJAX_INLINE Floats32 load_inputs(const FloatArray& array, int64_t row_offset, int64_t k, int64_t num_inputs) {
  return k + 32 <= num_inputs ? load32(array, row_offset + k) : load_last(array, row_offset + k, num_inputs - k);
}

// One row after the norm.
struct Row {
  const Gemm& gemm;
  int64_t offset;
  Floats16 inverse_rms;

  Row(const Gemm& g, int64_t row) : gemm(g), offset(row * g.num_inputs), inverse_rms(set1(1.0f)) {
    if (g.norm == nullptr) return;
    Floats16 squares = set1(0.0f);
    for (int64_t k = 0; k < g.num_inputs; k += 32) {
      Floats32 x = load_inputs(g.x, offset, k, g.num_inputs);
      squares = fma(x.a, x.a, fma(x.b, x.b, squares));
    }
    inverse_rms = set1(1.0f / __builtin_sqrtf(sum(squares) / (float)g.num_inputs + g.eps));
  }

  PAGEDJAX_INLINE Floats32 at(int64_t k) const {
    Floats32 x = load_inputs(gemm.x, offset, k, gemm.num_inputs);
    if (gemm.norm == nullptr) return x;
    Floats32 w = load_inputs({(void*)gemm.norm, false}, 0, k, gemm.num_inputs);
    return {x.a * inverse_rms * w.a, x.b * inverse_rms * w.b};
  }
};

// ---- prepared rows --------------------------------------------------------------------------------------------------

PAGEDJAX_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// A quantised row: digits [num_inputs] int8 (where fine: high digits, then low ones), a scale a group, and a group's sum of
// x, scaled for nibbles and as the start of the integer sums for bytes.
struct QuantisedRow {
  int8_t* high;
  int8_t* low;
  float* scales;
  union {
    float* sums;
    int32_t* starts;
  };

  QuantisedRow(const Gemm& g, uint8_t* p) {
    int64_t num_groups = g.num_inputs / kGroup;
    scales = (float*)p;
    sums = scales + num_groups;
    high = (int8_t*)(sums + num_groups);
    low = high + g.num_inputs;
  }
  static int64_t num_bytes(const Gemm& g) {
    return g.num_inputs / kGroup * 2 * sizeof(float) + g.num_inputs * (g.fine ? 2 : 1);
  }
};

size_t prepared_bytes(const Gemm& g) {
  bool is_bf16 = g.format == Format::bf16;
  int64_t bytes = is_bf16 ? round_up(g.num_inputs, 32) / 2 * (int64_t)sizeof(Pair) : QuantisedRow::num_bytes(g);
  return (size_t)round_up(bytes, 64);
}

PAGEDJAX_INLINE void quantise_group(const QuantisedRow& to, int64_t group, Floats32 x, bool fine, Format format) {
  float peak = largest(max(abs(x.a), abs(x.b)));
  float steps = fine ? 127.0f * 128.0f : 127.0f;
  float inverse = peak > 0.0f ? steps / peak : 0.0f;
  // Comparisons pass over NaN, and a NaN must spoil its row: 0 * x is 0 unless x is not finite.
  float scale = peak / steps + 0.0f * sum(x.a + x.b);
  Ints16 a = round_to_int(x.a * set1(inverse)), b = round_to_int(x.b * set1(inverse));
  int32_t total = sum(a + b);
  int64_t k = group * kGroup;
  if (fine) {
    Ints16 half = set1_int(64);
    Ints16 high_a = shift_right<7>(a + half), high_b = shift_right<7>(b + half);
    store_int8(to.low + k, a - shift_left<7>(high_a));
    store_int8(to.low + k + kLanes, b - shift_left<7>(high_b));
    a = high_a, b = high_b;
  }
  store_int8(to.high + k, a);
  store_int8(to.high + k + kLanes, b);
  to.scales[group] = scale;
  if (format == Format::nibbles) {
    to.sums[group] = scale * (float)total;
  } else {
    to.starts[group] = dot_bytes_start(total);
  }
}

void prepare(const Gemm& g, int64_t begin, int64_t end) {
  size_t stride = prepared_bytes(g);
  for (int64_t r = begin; r < end; ++r) {
    Row row(g, r);
    uint8_t* to = g.prepared + r * stride;
    if (g.format == Format::bf16) {
      for (int64_t k = 0; k < g.num_inputs; k += 32) {
        Floats32 x = row.at(k);
        store_pairs((Pair*)to + k / 2, x.a, x.b);
      }
    } else {
      QuantisedRow quantised(g, to);
      for (int64_t group = 0; group < g.num_inputs / kGroup; ++group)
        quantise_group(quantised, group, row.at(group * kGroup), g.fine, g.format);
    }
  }
}

// ---- tiles: sums[row][block][16] ------------------------------------------------------------------------------------

template <int rows, int blocks>
void tile_bf16(const Gemm& g, int64_t row, int64_t block, float* sums) {
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
    for (int c = 0; c < blocks; ++c) dot_pairs<rows>(acc[c], (const uint16_t*)(w[c] + k * 4 * kBlockOutputs), x, k);
  }
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < blocks; ++c) store(sums + (r * blocks + c) * kLanes, acc[c][r]);
}

template <Format format>
PAGEDJAX_INLINE Ints16 dot8(Ints16 sums, Bytes64 first, Bytes64 second, const int8_t* x) {
  if constexpr (format == Format::nibbles) return dot_nibbles(dot_nibbles(sums, first, x), second, x + 4);
  return dot_bytes(dot_bytes(sums, first, x), second, x + 4);
}

// Integer sums of one group of 32 inputs of one block with the digits of each row, from input k on. Both digits at once:
// the weights are loaded and taken apart once.
template <Format format, bool fine, int rows>
PAGEDJAX_INLINE void dot_group(Ints16 (&sums)[rows], const uint8_t* w, const int8_t* const (&high)[rows],
                               const int8_t* const (&low)[rows], int64_t k) {
  Ints16 low_sums[rows];
  for (int r = 0; r < rows; ++r) sums[r] = low_sums[r] = set1_int(0);
  for (int j = 0; j < 4; ++j) {
    Bytes64 first, second;
    if constexpr (format == Format::nibbles) {
      Bytes64 both = load_bytes(w + 64 * j);
      first = low_nibbles(both), second = high_nibbles(both);
    } else {
      first = load_bytes(w + 128 * j), second = load_bytes(w + 128 * j + 64);
    }
    for (int r = 0; r < rows; ++r) {
      sums[r] = dot8<format>(sums[r], first, second, high[r] + k + 8 * j);
      if constexpr (fine) low_sums[r] = dot8<format>(low_sums[r], first, second, low[r] + k + 8 * j);
    }
  }
  if constexpr (fine)
    for (int r = 0; r < rows; ++r) sums[r] = shift_left<7>(sums[r]) + low_sums[r];
}

template <Format format, bool fine, int rows, int blocks>
void tile_quantised(const Gemm& g, int64_t row, int64_t block, float* sums) {
  constexpr int kGroupBytes = format == Format::nibbles ? 320 : 544;
  constexpr int kScales = format == Format::nibbles ? 256 : 512;
  int64_t num_groups = g.num_inputs / kGroup;
  size_t stride = prepared_bytes(g);
  const int8_t* high[rows];
  const int8_t* low[rows];
  const float* scales[rows];
  const float* offsets[rows];  // or int32, for bytes
  for (int r = 0; r < rows; ++r) {
    QuantisedRow x(g, g.prepared + (row + r) * stride);
    high[r] = x.high, low[r] = x.low, scales[r] = x.scales, offsets[r] = x.sums;
  }
  const uint8_t* first = g.weight + block * g.block_bytes;
  Floats16 acc[blocks][rows];
  for (int c = 0; c < blocks; ++c)
    for (int r = 0; r < rows; ++r) acc[c][r] = set1(0.0f);
  for (int64_t group = 0; group < num_groups; ++group) {
    for (int c = 0; c < blocks; ++c) {
      const uint8_t* w = first + c * g.block_bytes + group * kGroupBytes;
      Ints16 dots[rows];
      dot_group<format, fine, rows>(dots, w, high, low, group * kGroup);
      Floats16 scale = load_half((const uint16_t*)(w + kScales));
      for (int r = 0; r < rows; ++r) {
        if constexpr (format == Format::bytes) dots[r] = dots[r] + set1_int(((const int32_t*)offsets[r])[group]);
        acc[c][r] = fma(to_float(dots[r]), scale * set1(scales[r][group]), acc[c][r]);
      }
      if constexpr (format == Format::nibbles) {
        Floats16 minimum = load_half((const uint16_t*)(w + kScales + 32));
        for (int r = 0; r < rows; ++r) acc[c][r] = fma(minimum, set1(offsets[r][group]), acc[c][r]);
      }
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < blocks; ++c) store(sums + (r * blocks + c) * kLanes, acc[c][r]);
}

template <Format format, bool fine, int rows, int blocks>
PAGEDJAX_INLINE void tile(const Gemm& g, int64_t row, int64_t block, float* sums) {
  if constexpr (format == Format::bf16) {
    tile_bf16<rows, blocks>(g, row, block, sums);
  } else {
    tile_quantised<format, fine, rows, blocks>(g, row, block, sums);
  }
}

// The tile of `num_rows`, at most `rows`.
template <Format format, bool fine, int rows, int blocks>
PAGEDJAX_INLINE void tile_of(int64_t num_rows, const Gemm& g, int64_t row, int64_t block, float* sums) {
  if constexpr (rows > 1) {
    if (num_rows < rows) return tile_of<format, fine, rows - 1, blocks>(num_rows, g, row, block, sums);
  }
  tile<format, fine, rows, blocks>(g, row, block, sums);
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

// Results [column, column + 16 * blocks) of rows [row, row + num_rows) from their sums, and, where gated, those of `up`.
void finish(const Gemm& g, int64_t row, int64_t num_rows, int64_t column, int blocks, const float* sums, const float* up) {
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int c = 0; c < blocks; ++c, sums += kLanes, up += kLanes) {
      int64_t result = column + c * kBlockOutputs, count = g.num_results - result;
      if (count > kLanes) count = kLanes;
      Floats16 x = biased(g, sums, result, count);
      if (g.gated) x = silu(x) * biased(g, up, g.num_results + result, count);
      int64_t index = (row + r) * g.num_results + result;
      if (g.residual.data != nullptr) x = x + load_part(g.residual, index, count);
      store_part(g.out, index, count, x);
    }
  }
}

// ---- ranges ---------------------------------------------------------------------------------------------------------

template <Format format, bool fine, int rows, int blocks>
void run_column(const Gemm& g, int64_t row_begin, int64_t row_end, int64_t column) {
  alignas(64) float sums[rows * blocks * kLanes], up[rows * blocks * kLanes];
  int64_t block = column / kBlockOutputs;
  for (int64_t row = row_begin; row < row_end; row += rows) {
    int64_t num_rows = row_end - row < rows ? row_end - row : rows;
    tile_of<format, fine, rows, blocks>(num_rows, g, row, block, sums);
    if (g.gated) tile_of<format, fine, rows, blocks>(num_rows, g, row, block + g.num_results / kBlockOutputs, up);
    finish(g, row, num_rows, column, blocks, sums, up);
  }
}

template <Format format, bool fine, int rows, int blocks>
void run(const Gemm& g, int64_t row_begin, int64_t row_end, int64_t column, int64_t column_end) {
  for (; column + blocks * kBlockOutputs <= column_end; column += blocks * kBlockOutputs)
    run_column<format, fine, rows, blocks>(g, row_begin, row_end, column);
  for (; column < column_end; column += kBlockOutputs)
    run_column<format, fine, rows, 1>(g, row_begin, row_end, column);
}

// Few rows are bound by memory: smaller tiles share out better among threads.
constexpr int64_t kFewRows = 2;

int64_t tile_columns(const Gemm& g) {
  return (g.format == Format::bf16 && g.num_rows > kFewRows ? kFloatBlocks : kIntBlocks) * kBlockOutputs;
}

void multiply(const Gemm& g, int64_t row_begin, int64_t row_end, int64_t column_begin, int64_t column_end) {
  auto as = [&](auto function) { function(g, row_begin, row_end, column_begin, column_end); };
  switch (g.format) {
    case Format::bf16:
      if (g.num_rows > kFewRows) return as(run<Format::bf16, false, kFloatRows, kFloatBlocks>);
      return as(run<Format::bf16, false, kFewRows, kIntBlocks>);
    case Format::nibbles:
      if (g.fine) return as(run<Format::nibbles, true, kFineRows, kIntBlocks>);
      return as(run<Format::nibbles, false, kIntRows, kIntBlocks>);
    case Format::bytes:
      if (g.fine) return as(run<Format::bytes, true, kFineRows, kIntBlocks>);
      return as(run<Format::bytes, false, kIntRows, kIntBlocks>);
  }
}

}  // namespace

extern const GemmKernels gemm_kernels = {tile_columns, prepared_bytes, prepare, multiply};

}  // namespace PAGEDJAX_LEVEL
}  // namespace pagedjax
