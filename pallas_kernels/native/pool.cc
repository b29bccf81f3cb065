#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include "seat.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pagedjax {
namespace {

// The gap between two kernels of a step is below this, the gap between two steps of a lone stream about so.
constexpr std::chrono::microseconds kSpinTime(150);
// A worker that is not done after this has likely been put aside, and needs this CPU more than a spinning caller does.
constexpr std::chrono::microseconds kCallerSpinTime(30);
constexpr size_t kCacheLine = 64;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// What is to be fetched next, by whoever waits. A range that is replaced while somebody takes of it costs a few lines
// that nobody needs.
struct alignas(kCacheLine) Fetched {
  std::atomic<const uint8_t*> next{nullptr}, end{nullptr};
} fetched;

// Fetches four lines, if any are left; else lets the core's other half work for a moment.
inline void fetch_or_relax() {
  if (fetched.next.load(std::memory_order_relaxed) >= fetched.end.load(std::memory_order_relaxed)) return relax();
  const uint8_t* line = fetched.next.fetch_add(4 * kCacheLine, std::memory_order_relaxed);
  for (const uint8_t* past = line + 4 * kCacheLine; line < past; line += kCacheLine) __builtin_prefetch(line);
}

// Spins until `done()`, calling `idle()` and looking at the clock now and then. False once `limit` is over.
template <class Done, class Idle>
bool spin_until(const Done& done, const Idle& idle, std::chrono::microseconds limit) {
  auto start = std::chrono::steady_clock::now();
  for (int turn = 1;; ++turn) {
    if (done()) return true;
    idle();
    if (turn % 64 == 0 && std::chrono::steady_clock::now() - start > limit) return false;
  }
}

class Pool {
 public:
  explicit Pool(int num_threads) : num_threads_(num_threads), seats_(new Seat[num_threads]) {
    for (int i = 1; i < num_threads; ++i) {
      try {
        std::thread([this, i] { work(&seats_[i]); }).detach();
      } catch (const std::system_error&) {  // no more threads to be had: the others do the work
        break;
      }
    }
  }

  int num_threads() const { return num_threads_; }

  void run(int64_t num_items, Item fn, void* context) {
    std::unique_lock<std::mutex> region(in_region_, std::try_to_lock);
    bool is_shared = num_items > 1 && num_items <= INT32_MAX && num_threads_ > 1 && region.owns_lock();
    if (!is_shared) {  // Items counts in 32 bits
      for (int64_t i = 0; i < num_items; ++i) fn(context, i, i + 1 < num_items ? i + 1 : -1);
      return;
    }
    fn_ = fn, context_ = context;
    unfinished_.store(num_items, std::memory_order_relaxed);
    unclaimed_.store({0, static_cast<int32_t>(num_items)}, std::memory_order_release);
    wake();
    int cpu = this_cpu();
    for (int i = 1; i < num_threads_; ++i) seats_[i].send_away(cpu);
    take_part(&Pool::claim_last);
    wait_for_others();
  }

 private:
  // The items that are left, [first, past): one atomic value says both whether there are any and which, so that a
  // latecomer of an earlier region either gets a valid item of this one, whose fields it then sees, or none.
  struct alignas(8) Items {
    int32_t first, past;
  };

  // Workers claim from the front, where they fetched while they waited (`fetch_when_idle`), the caller from the back.
  static int64_t claim_first(Items* left) { return left->first++; }
  static int64_t claim_last(Items* left) { return --left->past; }
  using Claim = int64_t (*)(Items*);

  void take_part(Claim claim) {
    Items left = unclaimed_.load(std::memory_order_acquire);
    while (left.first < left.past) {
      Items rest = left;
      int64_t item = claim(&rest);
      if (!unclaimed_.compare_exchange_weak(left, rest, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      fn_(context_, item, rest.first < rest.past ? claim(&rest) : -1);
      if (unfinished_.fetch_sub(1) == 1 && is_caller_asleep_.load()) {
        std::lock_guard<std::mutex> lock(sleep_);
        is_done_.notify_one();
      }
      left = unclaimed_.load(std::memory_order_acquire);
    }
  }

  void wait_for_others() {
    auto is_done = [this] { return unfinished_.load() == 0; };
    if (spin_until(is_done, relax, kCallerSpinTime)) return;
    std::unique_lock<std::mutex> lock(sleep_);
    is_caller_asleep_.store(true);  // before looking again: workers count first, then look for a sleeper
    is_done_.wait(lock, is_done);
    is_caller_asleep_.store(false);
  }

  void wake() {
    num_regions_.fetch_add(1);
    if (num_sleeping_.load() == 0) return;
    std::lock_guard<std::mutex> lock(sleep_);
    is_awake_.notify_all();
  }

  void work(Seat* seat) {
    uint32_t seen = 0;
    for (;;) {
      if (!spin_until([&] { return num_regions_.load() != seen; }, fetch_or_relax, kSpinTime)) {
        std::unique_lock<std::mutex> lock(sleep_);
        num_sleeping_.fetch_add(1);  // before looking again: `wake` counts first, then looks for sleepers
        is_awake_.wait(lock, [&] { return num_regions_.load() != seen; });
        num_sleeping_.fetch_sub(1);
      }
      seen = num_regions_.load();
      seat->note();
      take_part(&Pool::claim_first);
    }
  }

  const int num_threads_;
  const std::unique_ptr<Seat[]> seats_;
  std::mutex in_region_;
  Item fn_ = nullptr;
  void* context_ = nullptr;
  alignas(kCacheLine) std::atomic<Items> unclaimed_{Items{0, 0}};
  alignas(kCacheLine) std::atomic<int64_t> unfinished_{0};
  alignas(kCacheLine) std::atomic<uint32_t> num_regions_{0};
  std::atomic<int> num_sleeping_{0};
  std::atomic<bool> is_caller_asleep_{false};
  std::mutex sleep_;
  std::condition_variable is_awake_, is_done_;
};

std::atomic<int> wanted_threads{1};

// Never destroyed: its threads may still spin when the process runs its destructors.
Pool& pool() {
  static Pool* shared = new Pool(wanted_threads.load());
  return *shared;
}

struct Scratch {
  void* data = nullptr;
  size_t num_bytes = 0;
  ~Scratch() { std::free(data); }
};

}  // namespace

void set_num_threads(int num_threads) { wanted_threads.store(num_threads < 1 ? 1 : num_threads); }

int num_threads() { return pool().num_threads(); }

void run_region(int64_t num_items, Item fn, void* context) { pool().run(num_items, fn, context); }

void fetch_when_idle(const uint8_t* begin, const uint8_t* end) {
  fetched.end.store(nullptr, std::memory_order_relaxed);  // lest somebody fetches from `begin` to the old end
  fetched.next.store(begin, std::memory_order_relaxed);
  fetched.end.store(end, std::memory_order_relaxed);
}

void* scratch(size_t num_bytes) {
  static thread_local Scratch mine;
  if (num_bytes > mine.num_bytes) {
    std::free(mine.data);
    mine.num_bytes = (num_bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
    mine.data = std::aligned_alloc(kCacheLine, mine.num_bytes);
    if (mine.data == nullptr) throw std::bad_alloc();
  }
  return mine.data;
}

}  // namespace pagedjax
