// A pool of threads that all native kernels share.
//
// A decode step calls some 150 kernels, each of 10 to 500 us, so handing out work must cost about a microsecond: workers
// spin for a short while after a region ends, and only then sleep. An idle process uses no CPU. The caller works too,
// and needs no worker to finish: a region ends even if every worker sleeps or belongs to the parent of a fork.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pagedjax {

// How many threads, the caller included, share a region. Takes effect if called before the first region.
void set_num_threads(int num_threads);
int num_threads();

// Calls fn(context, i, next) once for every i in [0, num_items), on several threads, and returns when all calls have.
// `next` is the item that this thread will likely take after i, or -1. `fn` must not throw. A second caller at the same
// time, or a region within a region, runs its items by itself, in order.
using Item = void (*)(void* context, int64_t i, int64_t next);
void run_region(int64_t num_items, Item fn, void* context);

// fn(i, next) for every i in [0, num_items). Items should take at least some microseconds each.
template <class Fn>
void parallel_for_in_turn(int64_t num_items, const Fn& fn) {
  run_region(num_items, [](void* context, int64_t i, int64_t next) { (*static_cast<const Fn*>(context))(i, next); },
             const_cast<Fn*>(&fn));
}

// fn(i) for every i in [0, num_items).
template <class Fn>
void parallel_for(int64_t num_items, const Fn& fn) {
  parallel_for_in_turn(num_items, [&](int64_t i, int64_t) { fn(i); });
}

// fn(begin, end) for about `pieces_per_thread` pieces a thread of [0, num_items), none smaller than `least`.
template <class Fn>
void parallel_ranges(int64_t num_items, int64_t pieces_per_thread, int64_t least, const Fn& fn) {
  int64_t wanted = pieces_per_thread * num_threads();
  int64_t size = (num_items + wanted - 1) / wanted;
  if (size < least) size = least;
  int64_t num_pieces = (num_items + size - 1) / size;
  parallel_for(num_pieces, [&](int64_t piece) {
    int64_t begin = piece * size, end = begin + size;
    fn(begin, end < num_items ? end : num_items);
  });
}

// Says what the next region will likely read: threads that wait for it fetch [begin, end) into their caches.
void fetch_when_idle(const uint8_t* begin, const uint8_t* end);

// At least `num_bytes` of the calling thread's own memory, on a cache line, valid until its next call. The content is
// undefined. Workers may use it within the caller's region.
void* scratch(size_t num_bytes);

}  // namespace pagedjax
