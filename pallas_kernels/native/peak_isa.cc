// The loops of peak.h at one level of instructions: enough independent sums to keep every multiplier busy.
#include "peak.h"
#include "simd.h"

namespace pagedjax {
namespace PAGEDJAX_LEVEL {
namespace {

constexpr int kSums = 12;

// Hides what memory holds from the compiler. Only before and after a loop: within it sums would be stored each turn.
PAGEDJAX_INLINE void hide(void* p) { asm volatile("" : : "r"(p) : "memory"); }

// Turns take inputs in two places by turns, so that a loop of sums cannot become one multiplication.
int64_t multiply_bf16(int64_t num_turns) {
  alignas(64) uint16_t weights[2 * kLanes] = {};
  Pair pairs[kSums + 1];
  memset(pairs, 0, sizeof pairs);
  hide(weights), hide(pairs);
  const Pair* x[kSums];
  Floats16 sums[kSums];
  for (int i = 0; i < kSums; ++i) x[i] = pairs + i, sums[i] = set1(0.0f);
  for (int64_t turn = 0; turn < num_turns; ++turn) dot_pairs<kSums>(sums, weights, x, turn % 2);
  hide(sums);
  return num_turns * kSums * kLanes * 2 * 2;
}

int64_t multiply_bytes(int64_t num_turns) {
  alignas(64) uint8_t weights[4 * kLanes] = {};
  alignas(64) int8_t x[4 * (kSums + 1)] = {};
  hide(weights), hide(x);
  Bytes64 w = load_bytes(weights);
  Ints16 sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = set1_int(0);
  for (int64_t turn = 0; turn < num_turns; ++turn)
    for (int i = 0; i < kSums; ++i) sums[i] = dot_nibbles(sums[i], w, x + 4 * (i + turn % 2));
  hide(sums);
  return num_turns * kSums * kLanes * 4 * 2;
}

}  // namespace

extern const PeakKernels peak_kernels;
const PeakKernels peak_kernels = {multiply_bf16, multiply_bytes};

}  // namespace PAGEDJAX_LEVEL
}  // namespace pagedjax
