// Threads that share out the work of an operation, and scratch memory. Must not know what the work
// is.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <functional>
#include <limits>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "huge_pages.h"

namespace charonia {

// Between two looks at what another thread or process is to write.
inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// The library's thread_local variables get their memory when a thread first uses one of them, and
// where the system gives none then, the C library ends the process. So a thread begins with that,
// and not in the middle of an operation; and whoever makes a thread waits until it has begun.
inline thread_local volatile bool has_begun = false;

// Threads that help the one that calls. Each thread has a share of the work, which lies together, and
// claims half of what is left of it, again and again. So it knows what comes next, and can bring it
// near. A thread that is done claims pieces from the ends of the others' shares, and a helper that
// has claimed nothing is not waited for: on a machine whose cores have other work too, a helper that
// does not get to run costs nothing.
//
// What a piece of work throws, on whatever thread, ends the job: no more pieces are begun, and the
// caller throws it once nobody is in the job any more, for the job lies on the caller's stack.
//
// A helper looks for work for kSpin after its last, then sleeps. Its door, `gate_`, says which
// job is on and how many helpers are in it; a job's end closes it before the helpers are awaited:
//
//   gate_   | number of the job : 32 | open : 1 | helpers inside : 31 |
class Pool {
 public:
  // The pool is never destroyed: its threads may outlive the interpreter's orderly end.
  static Pool& get() {
    static Pool* pool = new Pool;
    return *pool;
  }

  int num_threads() const { return 1 + static_cast<int>(helpers_.size()); }

  // Have so many threads, the caller of `run` among them; helper i on core cores[i], or unbound.
  // Throws where the system does not give them; then there are as many as it gave.
  void resize(int num_threads, const std::vector<int>& cores) {
    has_begun = true;
    stop();
    shares_ = std::vector<Share>(num_threads);
    for (int i = 0; i + 1 < num_threads; ++i) {
      const int core = i < static_cast<int>(cores.size()) ? cores[i] : -1;
      try {
        helpers_.emplace_back([this, i, core] { help(1 + i, core); });
        for (int begun; (begun = num_begun_.load()) <= i;) num_begun_.wait(begun);
      } catch (const std::system_error& error) {
        const int given = this->num_threads();
        throw std::system_error(error.code(), "the system gives " + std::to_string(given) + " of " +
                                                  std::to_string(num_threads) + " threads");
      }
    }
  }

  // In a child of fork(), which has nobody but the thread that called it.
  void forget_helpers() {
    new (&helpers_) std::vector<std::thread>;  // they are not here to be joined
    gate_.store(0);
    sleeping_.store(0);
    is_stopping_.store(false);
    has_failed_.store(false);
    new (&failure_) std::exception_ptr;
  }

  // Call f(i) for i in [0, n), on all threads, begun in this order: for the longest first. Return when
  // all is done.
  template <class F>
  void run(int64_t n, F&& f) {
    const int64_t pieces = 4 * num_threads();
    next_.store(0, std::memory_order_relaxed);
    run_ranges(std::min<int64_t>(n, num_threads()), [&](int64_t, int64_t) {
      int64_t first = next_.load(std::memory_order_relaxed);
      while (first < n) {
        const int64_t last = first + std::max<int64_t>(1, (n - first) / pieces);
        if (!next_.compare_exchange_weak(first, last, std::memory_order_relaxed)) continue;
        for (; first < last; ++first) f(first);
        first = next_.load(std::memory_order_relaxed);
      }
    });
  }

  // Call f(first, last) for ranges that make up [0, n), on all threads; return when all is done.
  template <class F>
  void run_ranges(int64_t n, F&& f) {
    if (helpers_.empty() || n < 2) {
      if (n) f(int64_t{0}, n);
      return;
    }
    job_ = std::ref(f);
    const auto threads = static_cast<int64_t>(num_threads());
    for (int64_t i = 0; i < threads; ++i)
      shares_[i].left.store(Left{i * n / threads, (i + 1) * n / threads}.packed(),
                            std::memory_order_relaxed);
    const uint64_t number = (gate_.load(std::memory_order_relaxed) >> 32) + 1;
    gate_.store(number << 32 | kOpen, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) wake();
    work(0);
    uint64_t gate = gate_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
    while (gate & kInside) {
      pause();
      gate = gate_.load(std::memory_order_acquire);
    }
    if (has_failed_.load(std::memory_order_relaxed)) raise_failure();
  }

 private:
  static constexpr uint64_t kOpen = uint64_t{1} << 31;
  static constexpr uint64_t kInside = kOpen - 1;
  static constexpr std::chrono::microseconds kSpin{200};

  // What is left of a share.
  struct Left {
    int64_t first, end;

    static Left of(uint64_t packed) {
      return {static_cast<int64_t>(packed >> 32), static_cast<int64_t>(packed & 0xffffffff)};
    }
    uint64_t packed() const {
      return static_cast<uint64_t>(first) << 32 | static_cast<uint64_t>(end);
    }
  };
  struct alignas(64) Share {
    std::atomic<uint64_t> left{0};
  };

  // Nothing gets out of here, or the caller would leave a job that others are in.
  void work(int thread) noexcept {
    try {
      for (int i = 0; i < num_threads(); ++i) claim_and_do((thread + i) % num_threads(), i == 0);
    } catch (...) {
      if (!has_failed_.exchange(true, std::memory_order_relaxed))
        failure_ = std::current_exception();
      for (Share& share : shares_) share.left.store(0, std::memory_order_relaxed);
      next_.store(std::numeric_limits<int64_t>::max(), std::memory_order_relaxed);
    }
  }

  // Half of what is left of a share, and so on; of one's own the front.
  void claim_and_do(int whose, bool is_own) {
    std::atomic<uint64_t>& share = shares_[whose].left;
    uint64_t packed = share.load(std::memory_order_relaxed);
    for (;;) {
      const Left left = Left::of(packed);
      if (left.first >= left.end) return;
      const int64_t size = (left.end - left.first + 1) / 2;
      const int64_t middle = is_own ? left.first + size : left.end - size;
      const Left mine = is_own ? Left{left.first, middle} : Left{middle, left.end};
      const Left rest = is_own ? Left{middle, left.end} : Left{left.first, middle};
      if (!share.compare_exchange_weak(packed, rest.packed(), std::memory_order_relaxed)) continue;
      job_(mine.first, mine.end);
      packed = share.load(std::memory_order_relaxed);
    }
  }

  // Once all helpers are out of the job; what they wrote before is seen.
  [[noreturn]] void raise_failure() {
    has_failed_.store(false, std::memory_order_relaxed);
    std::rethrow_exception(std::exchange(failure_, nullptr));
  }

  void help(int thread, int core) {
    has_begun = true;
    num_begun_.fetch_add(1);
    num_begun_.notify_one();
    if (core >= 0) bind(core);
    uint64_t done = gate_.load(std::memory_order_acquire) >> 32;
    if (gate_.load(std::memory_order_acquire) & kOpen) --done;
    for (;;) {
      uint64_t gate = await(done);
      if (is_stopping_.load(std::memory_order_acquire)) return;
      done = gate >> 32;
      while ((gate & kOpen) && gate >> 32 == done) {
        if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) {
          work(thread);
          gate_.fetch_sub(1, std::memory_order_acq_rel);
          break;
        }
      }
    }
  }

  // Wait for a job after number `done`.
  uint64_t await(uint64_t done) {
    for (;;) {
      auto spin_until = std::chrono::steady_clock::now() + kSpin;
      for (int i = 0;; ++i) {
        const uint64_t gate = gate_.load(std::memory_order_acquire);
        if (gate >> 32 != done || is_stopping_.load(std::memory_order_relaxed)) return gate;
        pause();
        if (i % 64 == 63 && std::chrono::steady_clock::now() > spin_until) break;
      }
      const uint32_t bell = bell_.load(std::memory_order_seq_cst);
      sleeping_.fetch_add(1, std::memory_order_seq_cst);
      if (gate_.load(std::memory_order_seq_cst) >> 32 == done && !is_stopping_.load())
        bell_.wait(bell);
      sleeping_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  void wake() {
    bell_.fetch_add(1, std::memory_order_seq_cst);
    bell_.notify_all();
  }

  static void bind(int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
  }

  void stop() {
    is_stopping_.store(true);
    wake();
    for (auto& helper : helpers_) helper.join();
    helpers_.clear();
    num_begun_.store(0);
    is_stopping_.store(false);
  }

  std::vector<std::thread> helpers_;
  std::vector<Share> shares_;  // of the caller's thread, then of the helpers
  std::atomic<int> num_begun_{0};  // of the helpers
  std::function<void(int64_t, int64_t)> job_;
  alignas(64) std::atomic<int64_t> next_{0};  // of `run`
  std::exception_ptr failure_;  // the first, written by who set has_failed_
  std::atomic<bool> has_failed_{false};
  alignas(64) std::atomic<uint64_t> gate_{0};
  alignas(64) std::atomic<uint32_t> bell_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<bool> is_stopping_{false};
};

// Norms and rotations of few rows are not worth another thread: what it writes would have to come
// from the other core's cache.
inline bool is_worth_sharing(int64_t rows) { return rows >= 64; }

template <class F>
void for_rows(int64_t rows, F&& f) {
  const auto some = [&f](int64_t row, int64_t end) {
    for (; row < end; ++row) f(row);
  };
  if (is_worth_sharing(rows))
    Pool::get().run_ranges(rows, some);
  else
    some(0, rows);
}

// Seconds that the calling thread has spent in each kind of operation since the start: cheap enough
// to be counted always (about 0.05 us each). Written in one's turn, and read at any time.
enum class Phase {
  kNorm, kQkv, kRope, kAttention, kOutput, kGateUp, kDown, kHead, kExchange, kCount
};
inline constexpr const char* kPhaseNames[] = {"norm",    "qkv",  "rope", "attention", "output",
                                              "gate_up", "down", "head", "exchange"};
inline std::atomic<double> phase_seconds[static_cast<int>(Phase::kCount)];

class Timed {
 public:
  explicit Timed(Phase phase) : phase_(phase), start_(std::chrono::steady_clock::now()) {}
  ~Timed() {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start_;
    std::atomic<double>& seconds = phase_seconds[static_cast<int>(phase_)];
    seconds.store(seconds.load(std::memory_order_relaxed) + spent.count(),
                  std::memory_order_relaxed);
  }

 private:
  Phase phase_;
  std::chrono::steady_clock::time_point start_;
};

// Memory that only grows, for what lives within one operation. In huge pages where it is large: tiles
// take rows that lie far apart, and with small pages each of these needs a translation of its own.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(memory_); }

  template <class T>
  T* get(int64_t count) {
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    if (bytes > size_) grow(bytes);
    return static_cast<T*>(memory_);
  }

 private:
  static constexpr size_t kLarge = 256 << 10;

  void grow(size_t bytes) {
    const size_t alignment = bytes < kLarge ? 64 : kHugePage;
    const size_t size = (bytes + alignment - 1) / alignment * alignment;
    std::free(std::exchange(memory_, nullptr));
    size_ = 0;
    memory_ = std::aligned_alloc(alignment, size);
    if (!memory_) throw std::bad_alloc();
    if (bytes >= kLarge) advise_huge_pages(memory_, size);
    size_ = size;
  }

  void* memory_ = nullptr;
  size_t size_ = 0;
};

// Scratch memory is shared by all models of a process, so one operation runs at a time. It is never
// destroyed: as the process ends, another thread may still compute.
inline std::mutex one_at_a_time;
struct SharedScratch {
  Scratch normed, wide, rows, inner, partial, numbers, steps, less;
};
inline SharedScratch& scratch = *new SharedScratch;

// In a child of fork() nothing computes, whatever did in its parent.
inline void begin_anew_in_child() {
  new (&one_at_a_time) std::mutex;
  new (&scratch) SharedScratch;
  Pool::get().forget_helpers();
}

}  // namespace charonia
