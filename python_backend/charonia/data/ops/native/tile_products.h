// Products of one chunk of keys by AMX: sixteen or thirty-two queries in the time of one. Must not
// know tokens.
#pragma once

#include <algorithm>
#include <cstdint>

#include "pages.h"
#include "pool.h"
#include "products.h"
#include "tiles.h"
#include "vectors.h"

namespace charonia {

#if defined(__AMX_BF16__)

// Takes the place of ChunkProducts for bfloat16. Within a block keys lie as the registers take
// them. Values are laid side by side first, as a block has half as many as a register takes.
class TileProducts {
 public:
  using F = Format<bf16>;
  using Right = Tiles::Right<bf16>;
  static constexpr int64_t kQueries = 2 * Tiles::kRows;
  static constexpr int64_t kDepth = Tiles::kDepth<bf16>;

  TileProducts(const Pages<bf16>& pages, const ChunkBlocks& blocks, int64_t queries, int64_t stride)
      : pages_(pages), blocks_(blocks), has_few_queries_(queries <= Tiles::kRows),
        stride_(stride) {}

  void score(const Side<F>& side, int64_t queries, int64_t blocks, float* scores) {
    const int64_t steps = (pages_.dim + kDepth - 1) / kDepth, count = blocks * per_block();
    const auto product = [&](const auto& tile, const auto& before) {
      tiles_.multiply(queries, side.rows, side.stride, steps, count, tile, kFromZero, scores, stride_,
                      before, [] {});
    };
    const auto nothing = [](int64_t, int64_t, int64_t) {};
    const auto tile = [&](int64_t i, int64_t step) { return keys_at(i, step); };
    if (pages_.dim % kDepth) {
      const bf16* const packed = packed_keys(steps);
      product([&](int64_t i, int64_t step) -> Right {
        return {packed + (i * steps + step) * kTile, 2 * kLanes};
      }, nothing);
    } else if (is_first_) {
      product(tile, [&](int64_t i, int64_t end, int64_t step) {
        for (; i < end; ++i) bring(ahead_of_key(i, step));
      });
    } else {
      product(tile, nothing);
    }
  }

  void add_values(const Side<F>& side, int64_t queries, int64_t blocks, float* result) {
    const int64_t columns = pages_.dim / kLanes;
    const int64_t steps = (blocks * pages_.block_size + kDepth - 1) / kDepth;
    const auto product = [&](const auto& tile, const auto& before) {
      tiles_.multiply(queries, side.rows, side.stride, steps, columns, tile, kFromZero, result,
                      pages_.dim, before, [] {});
    };
    if (has_few_queries_) {
      // Nobody else needs them, so they are laid into two places in turns.
      alignas(64) bf16 room[2][4 * kTile];
      product(
          [&](int64_t i, int64_t step) -> Right {
            return {room[step % 2] + i % 4 * kTile, 2 * kLanes};
          },
          [&](int64_t i, int64_t end, int64_t step) { pack_values(step, i, end, room[step % 2]); });
      return;
    }
    if (is_first_) {
      thread_local Scratch memory;
      values_ = memory.get<bf16>(num_steps() * columns * kTile);
      for (int64_t step = 0; step < num_steps(); ++step)
        pack_values(step, 0, columns, values_ + step * columns * kTile);
      is_first_ = false;
    }
    product(
        [&](int64_t i, int64_t step) -> Right {
          return {values_ + (step * columns + i) * kTile, 2 * kLanes};
        },
        [](int64_t, int64_t, int64_t) {});
  }

 private:
  static constexpr int64_t kTile = kDepth * kLanes;  // numbers
  static constexpr int64_t kAhead = 4;               // blocks, of what is brought near
  static constexpr const float* kFromZero = nullptr;

  int64_t num_blocks() const { return static_cast<int64_t>(blocks_.starts.size()); }
  int64_t num_steps() const { return (num_blocks() * pages_.block_size + kDepth - 1) / kDepth; }
  int64_t per_block() const { return pages_.block_size / kLanes; }

  static void bring(Right tile) {
    for (int row = 0; row < kLanes; ++row) __builtin_prefetch(tile.first + row * tile.unit);
  }

  // Of the i-th kLanes keys.
  Right keys_at(int64_t i, int64_t step) const {
    const bf16* const keys = pages_.keys + blocks_.starts[i / per_block()];
    const int64_t unit = step * pages_.block_size + i % per_block();
    return {keys + unit * 2 * kLanes, 2 * pages_.block_size};
  }

  // What is needed that much later: keys, or behind the last of them as much of the values.
  Right ahead_of_key(int64_t i, int64_t step) const {
    const int64_t count = num_blocks() * per_block();
    i += kAhead * per_block();
    if (i < count) return keys_at(i, step);
    i = std::min(i - count, count - 1);
    const bf16* const values = pages_.values + blocks_.starts[i / per_block()];
    return {values + (i % per_block() * pages_.dim + step * kDepth) * kLanes, 2 * kLanes};
  }

  // Keys with dimensions filled up with zeros to whole steps.
  const bf16* packed_keys(int64_t steps) {
    if (keys_ != nullptr) return keys_;
    thread_local Scratch memory;
    const int64_t count = num_blocks() * per_block();
    bf16* const to = memory.get<bf16>(count * steps * kTile);
    for (int64_t i = 0; i < count; ++i) {
      const Right from = keys_at(i, 0);
      for (int64_t pair = 0; pair < steps * kLanes; ++pair)
        store(to + (i * steps * kLanes + pair) * 2 * kLanes,
              pair < pages_.dim / 2 ? load<Floats>(from.first + pair * from.unit) : Floats{});
    }
    return keys_ = to;
  }

  // to [end - first tiles] = a step's values in columns from the first on; zeros behind the last
  // block. Meanwhile what is needed later is brought near.
  void pack_values(int64_t step, int64_t first, int64_t end, bf16* to) const {
    const int64_t per_block = pages_.block_size / 2, row = 2 * pages_.dim;
    for (int64_t pair = 0; pair < kLanes; ++pair) {
      const int64_t at = step * kLanes + pair, block = at / per_block;
      if (block >= num_blocks()) {
        for (int64_t i = first; i < end; ++i)
          store(to + ((i - first) * kLanes + pair) * 2 * kLanes, Floats{});
        continue;
      }
      const int64_t offset = at % per_block * row + first * 2 * kLanes;
      const bf16* from = pages_.values + blocks_.starts[block] + offset;
      const bf16* ahead = ahead_of_values(block) + offset;
      for (int64_t i = first; i < end; ++i, from += 2 * kLanes, ahead += 2 * kLanes) {
        store(to + ((i - first) * kLanes + pair) * 2 * kLanes, load<Floats>(from));
        __builtin_prefetch(ahead);
      }
    }
  }

  // What is needed so much later: values, or behind the last of them the next chunk's keys.
  const bf16* ahead_of_values(int64_t block) const {
    block += kAhead;
    if (block < num_blocks()) return pages_.values + blocks_.starts[block];
    block -= num_blocks();
    if (block < static_cast<int64_t>(blocks_.next.size())) return pages_.keys + blocks_.next[block];
    return pages_.values + blocks_.starts.back();
  }

  const Pages<bf16>& pages_;
  const ChunkBlocks& blocks_;
  const bool has_few_queries_;
  const int64_t stride_;
  const bf16* keys_ = nullptr;  // of packed_keys
  bf16* values_ = nullptr;      // as pack_values lays them, step by step
  bool is_first_ = true;        // of the times that some of the queries go through the chunk
  Tiles tiles_;
};

#endif

// What multiplies a chunk of pages P by F.
template <class P, class F>
struct ProductsOf {
  using type = ChunkProducts<P, F>;
};
#if defined(__AMX_BF16__)
template <>
struct ProductsOf<Pages<bf16>, Format<bf16>> {
  using type = TileProducts;
};
#endif

}  // namespace charonia
