// How ranks exchange through shared memory, and its binding to Python. Must not know layers.

#include "exchange.h"

#include <ATen/core/Tensor.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <system_error>
#include <tuple>
#include <vector>

#include "check.h"
#include "matrix.h"
#include "pool.h"
#include "turn.h"
#include "vectors.h"

namespace charonia {
namespace {

// Of each of a rank's two buffers. Longer messages go in pieces, so it need only be so large that a
// round's cost, 1 us, is little beside a piece's. A piece should still be in its writer's cache
// when it is read: between two ranks 6 MiB take 1.3 ms in pieces of 256 KiB, 1.6 ms of 1 MiB.
constexpr int64_t kBufferBytes = 256 << 10;

// Where a rank would read so much of others, each adds up its share only, and a second round hands
// the sums out.
constexpr int64_t kSharedOutBytes = 128 << 10;

// A rank waits busily as long as a peer that computes is usually late, for a sleep costs more than
// most waits. But ranks may share a core, so it soon lets others run; then it sleeps.
constexpr std::chrono::microseconds kSpin{50}, kYield{5000};

// Processors fetch cache lines in pairs.
constexpr size_t kApart = 128;

constexpr int64_t kPage = 4096;

// Why an exchange ended; the last two are followed by one for every rank.
constexpr int32_t kRunning = 0, kAborted = -1, kDiffer = -2, kLost = 1,
                  kFailed = kLost + Exchange::kMaxRanks;

}  // namespace

// At the file's start; all zero at first. The buffers follow, two for each rank.
struct Exchange::Shared {
  // What a round is about, so that ranks that no longer do the same are told.
  struct Message {
    int64_t operation, bytes;
    bool operator==(const Message&) const = default;
    const char* name() const {
      const bool is_known = 0 <= operation && operation < static_cast<int64_t>(Operation::kCount);
      return is_known ? kNames[operation] : "nothing";
    }
  };

  // Written by its rank alone.
  struct alignas(kApart) Post {
    std::atomic<uint64_t> round;
    Message messages[2];  // of the last two rounds, as the buffers
    std::atomic<bool> is_taken;
  };

  // Written when a rank sleeps, or for the last time.
  std::atomic<int32_t> end;
  std::atomic<uint32_t> sleeping, bell;
  Post posts[kMaxRanks];

  static_assert(std::atomic<uint64_t>::is_always_lock_free);  // else it would not work here
};

int64_t Exchange::bytes(int size) {
  require(1 <= size && size <= kMaxRanks, "an exchange is between 1 and ", kMaxRanks,
          " ranks, not ", size);
  const int64_t before = (sizeof(Shared) + kPage - 1) / kPage * kPage;
  return before + 2 * size * kBufferBytes;
}

Exchange::Exchange(int fd, int rank, int size, double timeout)
    : rank_(rank), size_(size), timeout_(timeout) {
  const auto length = static_cast<size_t>(bytes(size));
  require(0 <= rank && rank < size, "rank ", rank, " of ", size, "; ranks count from 0");
  require(timeout > 0, "a timeout must be positive, and it is ", timeout, " s");
  struct stat file = {};
  if (fstat(fd, &file)) throw std::system_error(errno, std::generic_category(), "shared memory");
  require(file.st_size >= bytes(size), "the shared memory has ", file.st_size, " bytes; ", size,
          " ranks need ", length);
  void* const mapped = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED)
    throw std::system_error(errno, std::generic_category(), "shared memory");
  shared_ = static_cast<Shared*>(mapped);
  if (shared_->posts[rank].is_taken.exchange(true)) {
    munmap(mapped, length);
    throw std::invalid_argument(c10::str("rank ", rank, " of this exchange is taken"));
  }
}

Exchange::~Exchange() { munmap(shared_, static_cast<size_t>(bytes(size_))); }

// ----------------------------------------------------------------------------------- rounds

char* Exchange::buffer(int rank, uint64_t round) const {
  char* const first = reinterpret_cast<char*>(shared_) + bytes(size_) - 2 * size_ * kBufferBytes;
  return first + (2 * rank + static_cast<int64_t>(round % 2)) * kBufferBytes;
}

float* Exchange::place(int64_t n) {
  if (n * static_cast<int64_t>(sizeof(float)) > kBufferBytes) return nullptr;
  await_all(round_);
  return reinterpret_cast<float*>(buffer(rank_, round_ + 1));
}

template <class T>
T* Exchange::own(Operation operation, int64_t n) {
  await_all(round_);
  ++round_;
  const auto size = static_cast<int64_t>(sizeof(T));
  shared_->posts[rank_].messages[round_ % 2] = {static_cast<int64_t>(operation), n * size};
  return reinterpret_cast<T*>(buffer(rank_, round_));
}

void Exchange::post() {
  shared_->posts[rank_].round.store(round_, std::memory_order_seq_cst);
  if (shared_->sleeping.load(std::memory_order_seq_cst) > 0) wake();
  if (shared_->end.load(std::memory_order_relaxed) != kRunning) raise_lost();
}

void Exchange::await_all(uint64_t round) {
  for (int rank = 0; rank < size_; ++rank) await(rank, round);
}

template <class T>
const T* Exchange::of(int rank) {
  await(rank, round_);
  const auto& mine = shared_->posts[rank_].messages[round_ % 2];
  const auto& its = shared_->posts[rank].messages[round_ % 2];
  if (its != mine) {
    end(kDiffer);
    throw std::runtime_error(c10::str("the ranks do not do the same: ", rank_, " of the group gives ",
                                      mine.bytes, " bytes to ", mine.name(), ", ", rank, " gives ",
                                      its.bytes, " to ", its.name()));
  }
  return reinterpret_cast<const T*>(buffer(rank, round_));
}

template <class T>
Exchange::OfRanks<T> Exchange::all() {
  post();
  OfRanks<T> buffers;
  for (int rank = 0; rank < size_; ++rank) buffers[rank] = of<T>(rank);
  return buffers;
}

void Exchange::await(int rank, uint64_t round) {
  const auto& posted = shared_->posts[rank].round;
  if (posted.load(std::memory_order_acquire) >= round) return;
  const auto start = std::chrono::steady_clock::now();
  const auto timeout = std::chrono::duration<double>(timeout_);
  while (posted.load(std::memory_order_acquire) < round) {
    if (shared_->end.load(std::memory_order_relaxed) != kRunning) raise_lost();
    const auto waited = std::chrono::steady_clock::now() - start;
    if (waited < kSpin)
      pause();
    else if (waited > timeout)
      end(kLost + rank);
    else if (waited < kYield)
      sched_yield();
    else
      sleep(rank, round);
  }
}

// Until a rank posts, or for a moment. Who posts looks for sleepers afterwards, who sleeps looks
// for posts once it is known to sleep, and all of these operations have one order: so one of the
// two sees the other, and a bell that rings in between is not the one that was read.
void Exchange::sleep(int rank, uint64_t round) {
  constexpr timespec kMoment = {0, 50'000'000};  // so that a timeout is noticed
  shared_->sleeping.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t bell = shared_->bell.load(std::memory_order_seq_cst);
  if (shared_->posts[rank].round.load(std::memory_order_seq_cst) < round &&
      shared_->end.load(std::memory_order_seq_cst) == kRunning)
    syscall(SYS_futex, &shared_->bell, FUTEX_WAIT, bell, &kMoment, nullptr, 0);
  shared_->sleeping.fetch_sub(1, std::memory_order_seq_cst);
}

// std::atomic's wait and notify know the threads of one process only.
void Exchange::wake() {
  shared_->bell.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, &shared_->bell, FUTEX_WAKE, std::numeric_limits<int>::max(), nullptr, nullptr,
          0);
}

// The first cause stays.
void Exchange::end(int32_t cause) {
  int32_t running = kRunning;
  shared_->end.compare_exchange_strong(running, cause, std::memory_order_seq_cst);
  wake();
}

void Exchange::abort() { end(kAborted); }

void Exchange::fail() { end(kFailed + rank_); }

void Exchange::raise_lost() const {
  const int32_t cause = shared_->end.load(std::memory_order_relaxed);
  if (cause == kAborted) throw RankLost("the exchange between ranks was aborted");
  if (cause == kDiffer) throw RankLost("the ranks of the group do not do the same");
  if (cause >= kFailed)
    throw RankLost(c10::str("rank ", cause - kFailed, " of the group has failed in a step"));
  throw RankLost(
      c10::str("rank ", cause - kLost, " of the group did not answer within ", timeout_, " s"));
}

// ------------------------------------------------------------------------------- operations

// One operation at a time, counted.
class Exchange::Turn {
 public:
  Turn(Exchange& exchange, Operation operation, int64_t bytes)
      : guard_(exchange.one_operation_),
        counter_(exchange.counters_[static_cast<int>(operation)]),
        start_(std::chrono::steady_clock::now()) {
    counter_.calls.fetch_add(1, std::memory_order_relaxed);
    counter_.bytes.fetch_add(bytes, std::memory_order_relaxed);
  }
  ~Turn() {
    const std::chrono::nanoseconds spent = std::chrono::steady_clock::now() - start_;
    counter_.nanoseconds.fetch_add(spent.count(), std::memory_order_relaxed);
  }

 private:
  const std::lock_guard<std::mutex> guard_;
  Counter& counter_;
  const std::chrono::steady_clock::time_point start_;
};

template <class P, class T>
void Exchange::add_up(const OfRanks<P>& parts, int64_t begin, int64_t end, T* to) const {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    Floats total = widen(parts[0] + i);
    for (int rank = 1; rank < size_; ++rank) total += widen(parts[rank] + i);
    narrow(to + i - begin, total);
  }
  for (; i < end; ++i) {
    float total = to_float(parts[0][i]);
    for (int rank = 1; rank < size_; ++rank) total += to_float(parts[rank][i]);
    to[i - begin] = rounded<T>(total);
  }
}

template <class P, class T>
void Exchange::sum_piece(const P* part, int64_t n, T* to) {
  P* const mine = own<P>(Operation::kAllReduce, n);
  if (part != mine) std::copy_n(part, n, mine);
  const auto parts = all<P>();
  if ((size_ - 1) * n * static_cast<int64_t>(sizeof(P)) < kSharedOutBytes) {
    add_up(parts, 0, n, to);
    return;
  }
  add_up(parts, share(n, rank_), share(n, rank_ + 1), own<T>(Operation::kAllReduce, n));
  const auto shares = all<T>();
  for (int rank = 0; rank < size_; ++rank)
    std::copy_n(shares[rank], share(n, rank + 1) - share(n, rank), to + share(n, rank));
}

template <class P, class T>
void Exchange::sum(const P* part, int64_t n, T* to) {
  const Turn turn(*this, Operation::kAllReduce, n * static_cast<int64_t>(sizeof(P)));
  constexpr int64_t kMost = kBufferBytes / sizeof(P);
  for (int64_t first = 0; first < n; first += kMost)
    sum_piece(part + first, std::min(kMost, n - first), to + first);
}

template void Exchange::sum(const float*, int64_t, float*);
template void Exchange::sum(const float*, int64_t, bf16*);
template void Exchange::sum(const bf16*, int64_t, bf16*);

template <class T>
void Exchange::reduce_scatter(const T* parts, int64_t n, T* to) {
  const Turn turn(*this, Operation::kReduceScatter, size_ * n * static_cast<int64_t>(sizeof(T)));
  const int64_t most = kBufferBytes / static_cast<int64_t>(sizeof(T)) / size_;
  for (int64_t first = 0; first < n; first += most) {
    const int64_t count = std::min(most, n - first);
    T* const mine = own<T>(Operation::kReduceScatter, count);
    for (int rank = 0; rank < size_; ++rank)
      std::copy_n(parts + rank * n + first, count, mine + rank * count);
    add_up(all<T>(), rank_ * count, (rank_ + 1) * count, to + first);
  }
}

void Exchange::all_gather(const char* from, int64_t bytes, char* to) {
  const Turn turn(*this, Operation::kAllGather, bytes);
  for (int64_t first = 0; first < bytes; first += kBufferBytes) {
    const int64_t count = std::min(kBufferBytes, bytes - first);
    std::copy_n(from + first, count, own<char>(Operation::kAllGather, count));
    const auto parts = all<char>();
    for (int rank = 0; rank < size_; ++rank)
      std::copy_n(parts[rank], count, to + rank * bytes + first);
  }
}

void Exchange::broadcast(char* at, int64_t bytes, int source) {
  const Turn turn(*this, Operation::kBroadcast, bytes);
  for (int64_t first = 0; first < bytes; first += kBufferBytes) {
    const int64_t count = std::min(kBufferBytes, bytes - first);
    char* const mine = own<char>(Operation::kBroadcast, count);
    if (rank_ == source) std::copy_n(at + first, count, mine);
    post();
    if (rank_ != source) std::copy_n(of<char>(source), count, at + first);
  }
}

// ---------------------------------------------------------------------------------- binding

namespace {

void require_plain(const at::Tensor& x, const char* name) {
  require(is_plain(x), name, " must be a contiguous tensor on the CPU, not ", x.device(),
          " with shape ", x.sizes(), " and strides ", x.strides());
}

// Call f with a value of the element type, of those that can be added up.
template <class F>
void with_summed_type(const at::Tensor& x, F&& f) {
  require(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
          "ranks add up float32 and bfloat16, not ", x.scalar_type());
  with_type(x.scalar_type(), f);
}

void all_reduce(Exchange& exchange, const at::Tensor& x) {
  require_plain(x, "x");
  with_summed_type(x, [&](auto zero) {
    using T = decltype(zero);
    exchange.sum(static_cast<const T*>(data<T>(x)), x.numel(), data<T>(x));
  });
}

// parts must be [size, *one.shape], of the same type.
void require_parts_of(const at::Tensor& one, const at::Tensor& parts, int size) {
  std::vector<int64_t> shape = {size};
  shape.insert(shape.end(), one.sizes().begin(), one.sizes().end());
  require(parts.sizes() == shape && parts.scalar_type() == one.scalar_type(), size,
          " ranks' parts of ", one.sizes(), " ", one.scalar_type(), " are ", at::IntArrayRef(shape),
          " of the same type, not ", parts.sizes(), " ", parts.scalar_type());
}

void all_gather(Exchange& exchange, const at::Tensor& x, const at::Tensor& out) {
  require_plain(x, "x");
  require_plain(out, "out");
  require_parts_of(x, out, exchange.size());
  exchange.all_gather(data<char>(x), static_cast<int64_t>(x.nbytes()), data<char>(out));
}

void broadcast(Exchange& exchange, const at::Tensor& x, int source) {
  require_plain(x, "x");
  require(0 <= source && source < exchange.size(), "there is no rank ", source, " among ",
          exchange.size());
  exchange.broadcast(data<char>(x), static_cast<int64_t>(x.nbytes()), source);
}

void reduce_scatter(Exchange& exchange, const at::Tensor& x, const at::Tensor& out) {
  require_plain(x, "x");
  require_plain(out, "out");
  require_parts_of(out, x, exchange.size());
  with_summed_type(x, [&](auto zero) {
    using T = decltype(zero);
    exchange.reduce_scatter(static_cast<const T*>(data<T>(x)), out.numel(), data<T>(out));
  });
}

// By name: calls, bytes, seconds.
std::map<std::string, std::tuple<int64_t, int64_t, double>> counters(const Exchange& exchange) {
  std::map<std::string, std::tuple<int64_t, int64_t, double>> all;
  for (int i = 0; i < static_cast<int>(Exchange::Operation::kCount); ++i) {
    const auto& counter = exchange.counter(static_cast<Exchange::Operation>(i));
    all[Exchange::kNames[i]] = {counter.calls, counter.bytes,
                                1e-9 * static_cast<double>(counter.nanoseconds)};
  }
  return all;
}

}  // namespace

void bind_exchange(pybind11::module_& module) {
  namespace py = pybind11;
  using WithoutLock = py::call_guard<Unlocked>;
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const RankLost& lost) {
      const auto type = py::module_::import("charonia.errors").attr("RankLostError");
      PyErr_SetString(type.ptr(), lost.what());
    }
  });
  module.def("exchange_bytes", &Exchange::bytes);
  py::class_<Exchange, std::shared_ptr<Exchange>>(module, "Exchange", py::module_local())
      .def(py::init<int, int, int, double>(), py::arg("fd"), py::arg("rank"), py::arg("size"),
           py::arg("timeout"))
      .def_property_readonly("rank", &Exchange::rank)
      .def_property_readonly("size", &Exchange::size)
      .def("counters", &counters)
      .def("all_reduce", &all_reduce, WithoutLock())
      .def("all_gather", &all_gather, WithoutLock())
      .def("broadcast", &broadcast, WithoutLock())
      .def("reduce_scatter", &reduce_scatter, WithoutLock())
      .def("abort", &Exchange::abort, WithoutLock());
}

}  // namespace charonia
