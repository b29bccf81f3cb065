// Where a worker of the pool runs. The system tends to leave a thread on the CPU of who woke it, so that the two take turns
// there for milliseconds while another CPU idles. Whoever hands out work then sends the worker elsewhere.
#pragma once

#if defined(__linux__)
#include <sched.h>
#include <unistd.h>

#include <atomic>
#endif

namespace pagedjax {

#if defined(__linux__)

inline int this_cpu() { return sched_getcpu(); }

class Seat {
 public:
  // By the worker, before it takes part in anything.
  void take() {
    if (thread_.load(std::memory_order_relaxed) == 0) {
      if (sched_getaffinity(0, sizeof allowed_, &allowed_) != 0) CPU_ZERO(&allowed_);
      thread_.store(gettid(), std::memory_order_release);
    }
    // Read at each region by its caller, so written only when it changes.
    if (int cpu = this_cpu(); cpu_.load(std::memory_order_relaxed) != cpu) cpu_.store(cpu, std::memory_order_relaxed);
  }

  // By a caller on the CPU `mine`. A worker that was seen there last cannot be running now: it may run on the others.
  void leave(int mine) {
    pid_t thread = thread_.load(std::memory_order_acquire);
    if (thread == 0 || cpu_.load(std::memory_order_relaxed) != mine) return;
    cpu_set_t others = allowed_;
    CPU_CLR(mine, &others);
    if (CPU_COUNT(&others) > 0) sched_setaffinity(thread, sizeof others, &others);
    cpu_.store(-1, std::memory_order_relaxed);
  }

 private:
  std::atomic<pid_t> thread_{0};
  std::atomic<int> cpu_{-1};
  cpu_set_t allowed_;  // to begin with
};

#else

inline int this_cpu() { return -1; }

class Seat {
 public:
  void take() {}
  void leave(int) {}
};

#endif

}  // namespace pagedjax
