// What the Python loader calls through ctypes: which levels there are, which one to use, what this was built from.
#include "levels.h"
#include "peak.h"
#include "pool.h"
#include "xla/ffi/api/c_api.h"

#include <atomic>

#define PAGEDJAX_EXPORT extern "C" __attribute__((visibility("default")))

namespace pagedjax {
namespace {
std::atomic<Level> level{Level::plain};
}

Level best_level() {
  Level best = Level::plain;
#if defined(__x86_64__)
  __builtin_cpu_init();  // asks the system too: without its support for wide registers a level does not count
#if defined(PAGEDJAX_HAS_AVX2)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    best = Level::avx2;
#endif
#if defined(PAGEDJAX_HAS_AVX512)
  if (best == Level::avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vnni"))
    best = Level::avx512;
#endif
#if defined(PAGEDJAX_HAS_AVX512_BF16)
  if (best == Level::avx512 && __builtin_cpu_supports("avx512bf16")) best = Level::avx512_bf16;
#endif
#endif
  return best;
}

Level current_level() { return level.load(std::memory_order_relaxed); }

}  // namespace pagedjax

PAGEDJAX_EXPORT int pagedjax_best_level() { return static_cast<int>(pagedjax::best_level()); }

// `level` must be at most the best.
PAGEDJAX_EXPORT void pagedjax_configure(int level, int num_threads) {
  pagedjax::level.store(static_cast<pagedjax::Level>(level));
  pagedjax::set_num_threads(num_threads);
}

// 1000 * major + minor of the interface to XLA.
PAGEDJAX_EXPORT int pagedjax_ffi_version() { return 1000 * XLA_FFI_API_MAJOR + XLA_FFI_API_MINOR; }

PAGEDJAX_EXPORT const char* pagedjax_source_hash() { return PAGEDJAX_SOURCE_HASH; }

// Multiplications and additions by all threads, of bfloat16 or of bytes: how many they are.
PAGEDJAX_EXPORT double pagedjax_multiply_in_registers(bool is_bytes, long num_turns) {
  const pagedjax::PeakKernels& kernels = PAGEDJAX_AT_LEVEL(peak_kernels);
  std::atomic<int64_t> total{0};
  pagedjax::parallel_for(pagedjax::num_threads(),
                         [&](int64_t) { total += (is_bytes ? kernels.multiply_bytes : kernels.multiply_bf16)(num_turns); });
  return static_cast<double>(total.load());
}
