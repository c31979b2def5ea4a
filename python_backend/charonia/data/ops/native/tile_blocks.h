// Of products by tiles: scratch memory, sums that wait, what is brought near, blocks of inputs. Must
// not know how weights are packed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "pool.h"
#include "vectors.h"

namespace charonia {

constexpr int64_t kTileRows = 32;  // are multiplied at once: two tiles of them

// For products of the calling thread: weights that are widened, and sums that wait for more inputs.
struct TileMemory {
  Scratch wide, sums;
};
inline thread_local TileMemory tile_memory;

// Sums of some rows, a panel and a group of inputs that were not handed out yet.
template <class Sum, class Out>
class WaitingSums {
 public:
  using Number = std::conditional_t<std::is_same_v<Sum, Floats>, float, int32_t>;

  explicit WaitingSums(const Out& out) : out_(out) {}

  // Where those of the next rows go.
  Number* next() { return reinterpret_cast<Number*>(sums_[side_ ^ 1]); }
  Sum (&row(int64_t r))[kVectors] { return sums_[side_ ^ 1][r]; }

  // They are there; all before them were handed out.
  void wait(int64_t first_row, int64_t count, int64_t panel, int64_t group) {
    side_ ^= 1;
    first_row_ = first_row;
    panel_ = panel;
    group_ = group;
    count_ = count;
    given_ = 0;
  }

  // How many are to be handed out in each of so many steps.
  int64_t share(int64_t steps) const { return steps ? (count_ + steps - 1) / steps : 0; }

  void hand_out(int64_t count) {
    const int64_t end = std::min(count_, given_ + count);
    for (; given_ < end; ++given_)
      out_(first_row_ + given_, panel_, group_, sums_[side_][given_]);
  }
  void hand_out_all() { hand_out(count_); }

 private:
  const Out& out_;
  alignas(64) Sum sums_[2][kTileRows][kVectors];
  int side_ = 0;
  int64_t first_row_ = 0, panel_ = 0, group_ = 0, count_ = 0, given_ = 0;
};

// Numbers that are brought near in so many times, as many each time.
template <class N>
class Bringing {
 public:
  Bringing(const N* first, int64_t count, int64_t times) : at_(first), end_(first + count) {
    if (times) each_ = (count + times * kLine - 1) / (times * kLine) * kLine;
  }
  // To a cache, as __builtin_prefetch numbers them.
  template <int kCache>
  void some() {
    const N* const to = std::min(at_ + each_, end_);
    for (; at_ < to; at_ += kLine) __builtin_prefetch(at_, 0, kCache);
  }

 private:
  static constexpr int64_t kLine = 64 / sizeof(N);
  const N *at_, *end_;
  int64_t each_ = 0;
};

// One of `count` blocks of a panel's inputs.
struct InputBlock {
  int64_t panel = 0, index = 0, count = 1;

  bool is_last() const { return index + 1 == count; }
  int64_t begin(int64_t steps) const { return index * steps / count; }
  int64_t end(int64_t steps) const { return (index + 1) * steps / count; }
};

}  // namespace charonia
