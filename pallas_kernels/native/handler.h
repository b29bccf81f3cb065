// Defines an XLA FFI handler that the Python loader can find: a symbol of the library called `name`, listed in TARGETS of
// __init__.py, that runs `function`.
#pragma once

#include "xla/ffi/api/ffi.h"

#define PAGEDJAX_HANDLER(name, function, binding)                                                  \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame* frame); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function, binding)
