// Drives the thread pool from several threads at once; exits with 0 if every item of every region ran exactly once.
#include "pool.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

std::atomic<int> num_faults{0};

void check_region(int64_t num_items) {
  std::vector<std::atomic<int>> runs(num_items);
  pagedjax::parallel_for_in_turn(num_items, [&](int64_t i, int64_t next) {
    runs[i].fetch_add(1, std::memory_order_relaxed);
    num_faults += next == i || next < -1 || next >= num_items;
  });
  for (auto& count : runs) num_faults += count.load(std::memory_order_relaxed) != 1;
}

void check_ranges(int64_t num_items) {
  std::vector<int> runs(num_items);  // not atomic: no two ranges may overlap
  pagedjax::parallel_ranges(num_items, 2, 3, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) ++runs[i];
  });
  for (int count : runs) num_faults += count != 1;
}

void check_nested() {
  std::atomic<int> runs{0};
  pagedjax::parallel_for(5, [&](int64_t) { pagedjax::parallel_for(7, [&](int64_t) { runs.fetch_add(1); }); });
  num_faults += runs.load() != 35;
}

// A thread that takes all items by itself takes them in order, and knows it.
void check_next() {
  pagedjax::parallel_for(2, [&](int64_t) {
    int64_t expected = 0;
    pagedjax::parallel_for_in_turn(5, [&](int64_t i, int64_t next) {
      num_faults += i != expected++ || next != (i < 4 ? i + 1 : -1);
    });
  });
}

}  // namespace

int main(int argc, char** argv) {
  pagedjax::set_num_threads(argc > 1 ? std::atoi(argv[1]) : 4);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([caller] {
      for (int turn = 0; turn < 300; ++turn) {
        check_region((turn * 7 + caller) % 40);
        check_ranges(turn % 23);
        // Now and then long enough for the workers to fall asleep.
        if (turn % 100 == 99) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    });
  }
  for (auto& caller : callers) caller.join();
  check_nested();
  check_next();
  std::printf("%d faults\n", num_faults.load());
  return num_faults.load() != 0;
}
