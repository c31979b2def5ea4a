// What the ranks of one host give each other: sums and copies, through shared memory. Must not know
// layers, tensors, or how ranks come by the memory.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <stdexcept>

namespace charonia {

// A rank does not answer, or the ranks were told to end.
class RankLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Collective operations of a group of processes, each of which must call them in the same order and
// with as many numbers. They go in rounds: a rank writes into a buffer of its own, posts the
// round's number, waits until the others have posted it, then reads their buffers.
//
//   rank 0   write A0 | post 1 | wait | read A0 A1 | write B0 | post 2 | wait | read B0 B1 | ...
//   rank 1     write A1 | post 1 | read A0 A1 | write B1 | post 2 | wait | read B0 B1 | ...
//
// Two buffers, A and B, taken in turns need no second wait at the end of a round. Before a rank
// writes in round n, all must have posted n - 1. Who has posted that has read all that it wants of
// round n - 2, which was in the same buffer. That is a look, no wait, but after a broadcast, for
// which its source waits for nobody. Posts are stored with release and loaded with acquire, so what
// was written before is seen after, and what was read before is not overwritten.
//
// All ranks add up the same numbers in the order of ranks, so they have the same sum, to the bit,
// and what is computed with it cannot depend on a rank or on what else is added up with it.
class Exchange {
 public:
  static constexpr int kMaxRanks = 64;

  // The size of the shared file of so many ranks. Raises where that is not 1 to kMaxRanks.
  static int64_t bytes(int size);

  // fd: of a file of `bytes(size)` zeros that all ranks map; it may be closed afterwards.
  // timeout: seconds after which a rank that does not answer counts as lost.
  Exchange(int fd, int rank, int size, double timeout);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  // All operations raise RankLost; from then on every rank's do. Threads of one process take turns.

  // to [n] = the sum in float32 of all ranks' parts, rounded once to T; `to` may be `part`.
  template <class P, class T>
  void sum(const P* part, int64_t n, T* to);

  // Where a part of n numbers need not be copied from if the next operation is its sum: this
  // rank's next buffer. Null where the part is too long for that.
  float* place(int64_t n);

  // to [n] = this rank's share of the sum of all ranks' parts [size, n].
  template <class T>
  void reduce_scatter(const T* parts, int64_t n, T* to);

  // to [size, bytes] = what the ranks gave, one after the other.
  void all_gather(const char* from, int64_t bytes, char* to);

  // at [bytes] becomes that of rank `source`, which waits for nobody but for its buffers.
  void broadcast(char* at, int64_t bytes, int source);

  // What this rank has done of an operation so far; bytes are those that it gave, or received.
  struct Counter {
    std::atomic<int64_t> calls, bytes, nanoseconds;
  };
  enum class Operation { kAllReduce, kAllGather, kBroadcast, kReduceScatter, kCount };
  static constexpr const char* kNames[] = {"all_reduce", "all_gather", "broadcast",
                                           "reduce_scatter"};
  const Counter& counter(Operation operation) const {
    return counters_[static_cast<int>(operation)];
  }

  // End this and every other rank's waiting, now and in future. Any thread may.
  void abort();

  // The same, because this rank cannot go on with what the others are in the middle of.
  void fail();

 private:
  struct Shared;
  class Turn;

  template <class T>
  using OfRanks = std::array<const T*, kMaxRanks>;

  // Begin a round of n numbers: this rank's buffer, to be written to before `post`.
  template <class T>
  T* own(Operation operation, int64_t n);

  void post();

  void await_all(uint64_t round);

  // A rank's buffer once it has posted.
  template <class T>
  const T* of(int rank);

  // Post, and wait for everybody's.
  template <class T>
  OfRanks<T> all();

  template <class P, class T>
  void sum_piece(const P* part, int64_t n, T* to);

  // to [end - begin] = the sum of parts from begin to end.
  template <class P, class T>
  void add_up(const OfRanks<P>& parts, int64_t begin, int64_t end, T* to) const;

  char* buffer(int rank, uint64_t round) const;
  int64_t share(int64_t n, int rank) const { return n * rank / size_; }  // where it begins
  void await(int rank, uint64_t round);
  void sleep(int rank, uint64_t round);
  void end(int32_t cause);
  void wake();
  [[noreturn]] void raise_lost() const;

  const int rank_, size_;
  const double timeout_;
  Shared* shared_;
  uint64_t round_ = 0;
  Counter counters_[static_cast<int>(Operation::kCount)] = {};
  std::mutex one_operation_;
};

}  // namespace charonia
