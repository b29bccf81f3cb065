// Levels of instruction sets. `build.py` compiles every `*_isa.cc` once a level, with PAGEDJAX_LEVEL set to its name and
// the compiler's flags for it; the best that the processor has runs.
//
// An `*_isa.cc` must keep to its own namespace, pagedjax::PAGEDJAX_LEVEL, and include no header of the C++ library whose
// inline functions could be shared: the linker keeps one copy of such a function, which may be a copy full of AVX-512.
// What it offers goes into a table of function pointers, a constant, since code that runs at load must run everywhere.
#pragma once

namespace pagedjax {

// In order: a processor of one level can run all below. The names are those of build.py and of PAGEDJAX_NATIVE.
enum class Level { plain, avx2, avx512, avx512_bf16 };

// The best level that was compiled in and that this processor and system can run.
Level best_level();

// The level that kernels must use, at most `best_level()`.
Level current_level();

}  // namespace pagedjax

// The entry `name` of type `Type` that the current level's copy of an `*_isa.cc` defines:
//   PAGEDJAX_DECLARE_LEVELS(GemmKernels, gemm_kernels)    at namespace scope, outside all namespaces
//   const GemmKernels& kernels = PAGEDJAX_AT_LEVEL(gemm_kernels);
#define PAGEDJAX_DECLARE_LEVELS(Type, name)                   \
  namespace pagedjax {                                        \
  namespace plain { extern const Type name; }                 \
  namespace avx2 { extern const Type name; }                  \
  namespace avx512 { extern const Type name; }                \
  namespace avx512_bf16 { extern const Type name; }           \
  }

#if defined(PAGEDJAX_HAS_AVX2)
#define PAGEDJAX_IF_AVX2(x) x
#else
#define PAGEDJAX_IF_AVX2(x)
#endif
#if defined(PAGEDJAX_HAS_AVX512)
#define PAGEDJAX_IF_AVX512(x) x
#else
#define PAGEDJAX_IF_AVX512(x)
#endif
#if defined(PAGEDJAX_HAS_AVX512_BF16)
#define PAGEDJAX_IF_AVX512_BF16(x) x
#else
#define PAGEDJAX_IF_AVX512_BF16(x)
#endif

#define PAGEDJAX_AT_LEVEL(name)                                                                                   \
  (PAGEDJAX_IF_AVX512_BF16(::pagedjax::current_level() >= ::pagedjax::Level::avx512_bf16 ? ::pagedjax::avx512_bf16::name :) \
   PAGEDJAX_IF_AVX512(::pagedjax::current_level() >= ::pagedjax::Level::avx512 ? ::pagedjax::avx512::name :)      \
   PAGEDJAX_IF_AVX2(::pagedjax::current_level() >= ::pagedjax::Level::avx2 ? ::pagedjax::avx2::name :)            \
   ::pagedjax::plain::name)
