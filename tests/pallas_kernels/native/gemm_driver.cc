// Runs the products of every level here over many shapes, on buffers that end where their last byte is used, and checks
// that each level agrees with the plain one. For sanitizers: they see every read and write.
#include "gemm.h"
#include "levels.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

using namespace pagedjax;

namespace {

Level level;

struct Case {
  Format format;
  bool fine, gated, extras, is_bf16, only_largest;
  int64_t num_rows, num_inputs, num_outputs;
};

std::mt19937 random_bits(1);

template <class T>
std::vector<T> random_numbers(size_t count) {
  std::vector<T> found(count);
  std::normal_distribution<float> normal;
  for (T& x : found) {
    float value = normal(random_bits);
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if constexpr (sizeof(T) == 2) {
      x = static_cast<T>(bits >> 16);
    } else {
      std::memcpy(&x, &bits, 4);
    }
  }
  return found;
}

// Any bytes are a weight but for the scales, which must be finite: their exponent's highest bit is cleared.
std::vector<uint8_t> random_weight(const Case& c, int64_t block_bytes) {
  int64_t num_blocks = (c.num_outputs + kBlockOutputs - 1) / kBlockOutputs;
  std::vector<uint8_t> bytes(num_blocks * block_bytes);
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<uint8_t>(random_bits());
    bool is_scale = c.format == Format::bf16 || static_cast<int64_t>(i) % (c.format == Format::nibbles ? 320 : 544) >=
                                                    (c.format == Format::nibbles ? 256 : 512);
    if (is_scale && i % 2 == 1) bytes[i] = (bytes[i] & 0x80) | (c.format == Format::bf16 ? 0x3e : 0x2c);
  }
  return bytes;
}

std::vector<float> run(const Case& c, Level at, uint32_t seed) {
  random_bits.seed(seed);
  level = at;
  const GemmKernels& kernels = PAGEDJAX_AT_LEVEL(gemm_kernels);
  Gemm g{};
  g.format = c.format, g.fine = c.fine, g.gated = c.gated, g.eps = 1e-5f;
  g.num_rows = c.num_rows, g.num_inputs = c.num_inputs, g.num_outputs = c.num_outputs;
  g.num_results = c.gated ? c.num_outputs / 2 : c.num_outputs;
  g.block_bytes = c.format == Format::bf16      ? (c.num_inputs + 1) / 2 * 64
                  : c.format == Format::nibbles ? c.num_inputs / kGroup * 320
                                                : c.num_inputs / kGroup * 544;
  std::vector<uint8_t> weight = random_weight(c, g.block_bytes);
  auto x16 = random_numbers<uint16_t>(c.is_bf16 ? c.num_rows * c.num_inputs : 0);
  auto x32 = random_numbers<float>(c.is_bf16 ? 0 : c.num_rows * c.num_inputs);
  auto norm = random_numbers<float>(c.num_inputs), bias = random_numbers<float>(c.num_outputs);
  auto residual = random_numbers<float>(c.num_rows * g.num_results);
  std::vector<float> out32(c.is_bf16 ? 0 : c.num_rows * g.num_results);
  std::vector<uint16_t> out16(c.is_bf16 ? c.num_rows * g.num_results : 0);
  g.weight = weight.data();
  g.x = {c.is_bf16 ? (void*)x16.data() : (void*)x32.data(), c.is_bf16};
  g.out = {c.is_bf16 ? (void*)out16.data() : (void*)out32.data(), c.is_bf16};
  if (c.extras) g.norm = norm.data(), g.bias = {bias.data(), false}, g.residual = {residual.data(), false};
  std::vector<Largest> largest(c.only_largest ? c.num_rows : 0, Largest{-INFINITY, 0});
  if (c.only_largest) g.out = {nullptr, false}, g.largest = largest.data();
  size_t prepared = kernels.prepared_bytes(g) * c.num_rows;
  g.prepared = static_cast<uint8_t*>(std::aligned_alloc(64, prepared));
  kernels.prepare(g, 0, c.num_rows);
  int64_t tile = kernels.tile_columns(g), half = c.num_rows / 2;
  for (int64_t begin = 0; begin < g.num_results; begin += tile) {
    int64_t end = begin + tile < g.num_results ? begin + tile : g.num_results;
    kernels.multiply(g, 0, half, begin, end, end);
    kernels.multiply(g, half, c.num_rows, begin, end, end);
  }
  std::free(g.prepared);
  if (c.only_largest) {
    out32.clear(), out16.clear();
    for (const Largest& kept : largest) out32.push_back(kept.value);
  }
  for (uint16_t half_bits : out16) {
    uint32_t bits = static_cast<uint32_t>(half_bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    out32.push_back(value);
  }
  return out32;
}

// Of all results of the plain level: what two machines can be compared by.
double squares = 0;

int check(const Case& c, Level at) {
  std::vector<float> expected = run(c, Level::plain, 7), got = run(c, at, 7);
  for (float x : expected) squares += double(x) * x;
  double largest = 0, apart = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    largest = std::fmax(largest, std::fabs(expected[i]));
    apart = std::fmax(apart, std::fabs(double(expected[i]) - got[i]));
    if (!std::isfinite(got[i])) apart = INFINITY;
  }
  // Inputs rounded to bfloat16 or to 8 bits, where ties may fall otherwise; a lone output may be small by chance.
  if (apart <= 2e-2 * largest + 2e-2) return 0;
  std::printf("level %d format %d fine %d gated %d rows %lld in %lld out %lld: %g of %g\n", int(at), int(c.format), c.fine,
              c.gated, (long long)c.num_rows, (long long)c.num_inputs, (long long)c.num_outputs, apart, largest);
  return 1;
}

}  // namespace

Level pagedjax::current_level() { return level; }

int main() {
  int num_faults = 0, num_checks = 0;
  for (int at = 0; at <= static_cast<int>(best_level()); ++at)
    for (Format format : {Format::bf16, Format::nibbles, Format::bytes})
      for (int64_t num_rows : {1, 2, 3, 7, 13})
        for (int64_t num_inputs : {32, 96, 45})
          for (int64_t num_outputs : {1, 32, 37, 96, 160})
            for (int options = 0; options < 16; ++options) {
              Case c{format, (options & 1) != 0, (options & 2) != 0, (options & 4) != 0, (options & 8) != 0,
                     false, num_rows, num_inputs, num_outputs};
              c.only_largest = !c.gated && !c.extras && c.is_bf16;
              if (format != Format::bf16 && num_inputs % kGroup) continue;
              if (format == Format::bf16 && c.fine) continue;
              if (c.gated && num_outputs % 32) continue;
              num_faults += check(c, static_cast<Level>(at));
              ++num_checks;
            }
  std::printf("%d faults in %d products, squares %.2e\n", num_faults, num_checks, squares);
  return num_faults != 0;
}
