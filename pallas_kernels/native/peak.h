// The most that a thread can multiply, for the benchmark that says how near the kernels come to it.
#pragma once

#include <stdint.h>

#include "levels.h"

namespace pagedjax {

// One level's loops over registers alone: each gives the multiplications and additions that `num_turns` turns do.
struct PeakKernels {
  int64_t (*multiply_bf16)(int64_t num_turns);
  int64_t (*multiply_bytes)(int64_t num_turns);
};

}  // namespace pagedjax

PAGEDJAX_DECLARE_LEVELS(PeakKernels, peak_kernels)
