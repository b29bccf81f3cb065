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
  // By the worker, before it takes part in anything. One that was sent away has arrived, and may go where it likes again.
  void note() {
    if (thread_.load(std::memory_order_relaxed) == 0) thread_.store(gettid(), std::memory_order_release);
    if (was_sent_away_.load(std::memory_order_acquire)) {
      sched_setaffinity(0, sizeof allowed_, &allowed_);
      was_sent_away_.store(false, std::memory_order_release);
    }
    // Read at each region by its caller, so written only when it changes.
    if (int cpu = this_cpu(); cpu_.load(std::memory_order_relaxed) != cpu) cpu_.store(cpu, std::memory_order_relaxed);
  }

  // By a caller on the CPU `mine`: a worker that was seen there last has to take another, if there is one.
  void send_away(int mine) {
    pid_t thread = thread_.load(std::memory_order_acquire);
    if (thread == 0 || cpu_.load(std::memory_order_relaxed) != mine || was_sent_away_.load(std::memory_order_acquire))
      return;
    if (sched_getaffinity(thread, sizeof allowed_, &allowed_) != 0) return;
    cpu_set_t others = allowed_;
    CPU_CLR(mine, &others);
    if (CPU_COUNT(&others) == 0 || sched_setaffinity(thread, sizeof others, &others) != 0) return;
    was_sent_away_.store(true, std::memory_order_release);
  }

 private:
  std::atomic<pid_t> thread_{0};
  std::atomic<int> cpu_{-1};
  std::atomic<bool> was_sent_away_{false};
  cpu_set_t allowed_;  // before it was sent away; the caller's to write until then, the worker's to read afterwards
};

#else

inline int this_cpu() { return -1; }

class Seat {
 public:
  void note() {}
  void send_away(int) {}
};

#endif

}  // namespace pagedjax
