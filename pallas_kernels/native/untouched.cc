// Arrays that nobody has written yet, as an XLA FFI handler: large ones are fresh pages of the system, which come into
// being, zeroed, when they are first touched. A KV cache of some GiB is so had at once, and takes what is used of it.
#include "handler.h"

namespace pagedjax {
namespace {

namespace ffi = xla::ffi;

ffi::Error untouched(ffi::RemainingRets) { return ffi::Error::Success(); }

}  // namespace
}  // namespace pagedjax

PAGEDJAX_HANDLER(pagedjax_untouched, pagedjax::untouched,
                 xla::ffi::Ffi::Bind().RemainingRets());
