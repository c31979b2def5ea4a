// Products of one chunk of keys: q K^T and p V, whatever is kept of a number. Must not know tokens.
#pragma once

#include <algorithm>
#include <span>
#include <utility>

#include "codes.h"
#include "pages.h"
#include "vectors.h"

namespace charonia {

// Of x the lanes whose number, counted from `first`, is below `end`; of `other` the rest.
inline Floats below(int64_t end, int64_t first, Floats x, Floats other) {
  Ints lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return lane + static_cast<int32_t>(first) < static_cast<int32_t>(end) ? x : other;
}

// Rows of numbers as left-hand sides of products by F, for each group of dimensions that has scales
// of its own: what sums are begun with, and what they are multiplied by in the end.
template <class F>
struct Side {
  const typename F::Input* rows;  // [groups][queries][kRowsEach][stride]
  int64_t stride, queries;
  const float* factors;  // [groups][queries]
  const int32_t* begin;  // [groups][queries][kRowsEach], of whole numbers

  // The same from query `first` on; groups are as far apart as before.
  Side from(int64_t first) const {
    return {rows + first * kRowsEach<F> * stride, stride, queries, factors + first,
            begin + first * kRowsEach<F>};
  }
};

// Where the blocks of a chunk begin for one head, and the first ones of the next chunk.
struct ChunkBlocks {
  std::span<const int64_t> starts, next;
};

// By F, over pages P, of a chunk's blocks. Where numbers are kept in codes, a key's scale is
// applied to its score, and a value's must be in its weight. Sums of a group are float32, or exact,
// of whole numbers; beyond that all is float32.
//
// Blocks lie anywhere, so the processor cannot guess the next ones: they are named.
template <class P, class F>
class ChunkProducts {
 public:
  static constexpr int64_t kQueries = 24;  // at once, so that their scores stay in the cache
  static constexpr int64_t kDepth = 1;     // rows are filled up with zeros to a multiple of it

  // For so many queries, some at a time. Their scores and weights are `stride` apart.
  ChunkProducts(const P& pages, const ChunkBlocks& blocks, int64_t /*queries*/, int64_t stride)
      : pages_(pages), starts_(blocks.starts), stride_(stride) {}

  // scores [queries][stride_] = q K^T of the first `blocks`, of codes times the factors of `side`;
  // some vectors of keys at a time. After the last keys the first values are brought near.
  void score(const Side<F>& side, int64_t queries, int64_t blocks, float* scores) const {
    if (queries <= kFew)
      score_by<kWidest>(side, queries, blocks, scores);
    else
      score_by<kWide>(side, queries, blocks, scores);
  }

  // result [queries][dim] = weights V of the first `blocks`, some vectors of dimensions at a time.
  void add_values(const Side<F>& side, int64_t queries, int64_t blocks, float* result) const {
    if (queries <= kFew)
      add_values_by<kWidest>(side, queries, blocks, result);
    else
      add_values_by<kWide>(side, queries, blocks, result);
  }

  // scales [groups][stride_] of the first `seen` values of a chunk, 0 behind, in units of steps
  // [groups]. What a query does not see must not decide how its weights are rounded.
  void read_scales(int64_t seen, float* scales, float* steps) const {
    const auto padded = static_cast<int64_t>(starts_.size()) * pages_.block_size;
    for (int64_t group = 0; group < pages_.groups(); ++group) {
      float* to = scales + group * stride_;
      for (int64_t i = 0; i < padded; i += kLanes) {
        const Floats scales_here = widen(scales_of(pages_.values, i / kLanes, group));
        store(to + i, below(seen, i, scales_here, Floats{}));
      }
      Steps of_digits;
      if constexpr (kRows > 1) of_digits = steps_up_to(largest(to, padded));
      steps[group] = of_digits.step;
      for (int64_t i = 0; i < padded; i += kLanes)
        store(to + i, load<Floats>(to + i) * of_digits.inverse);
    }
  }

 private:
  // Vectors side by side: of up to kFew queries, which wait for memory, and of more.
  static constexpr int kWidest = 4, kWide = kLanes == 16 ? kWidest : 2;
  static constexpr int64_t kFew = 4;
  static constexpr int kRows = kRowsEach<F>;
  // Queries side by side, with so many vectors.
  template <int kWidth>
  static constexpr int kTallest =
      std::min((kWidth > kWide ? kSums : kSumsOf<F>) / (kWidth * kRows), 6);

  // Functions of their own for each width, or gcc 12 keeps too little in registers.
  template <int kWidth>
  [[gnu::noinline]] void score_by(const Side<F>& side, int64_t queries, int64_t blocks,
                                  float* scores) const {
    const int64_t block_size = pages_.block_size, size = pages_.dim / pages_.groups();
    const int64_t vectors = blocks * block_size / kLanes;
    for (int64_t group = 0; group < pages_.groups(); ++group) {
      const int64_t units = group * (size / F::kStep) * block_size;
      const auto unit = [&](int64_t v) {
        const auto* pages = v < vectors ? pages_.keys : pages_.values;
        const auto [start, key] = place_of(v < vectors ? v : std::min(v - vectors, vectors - 1));
        return pages + start + (units + key) * F::kStored;
      };
      const auto some = [&](int64_t v, auto count) {
        constexpr int wide = decltype(count)::value;
        const typename F::Stored* w[wide];
        const typename F::Stored* ahead[wide];
        Floats scales[wide];
        for (int i = 0; i < wide; ++i) {
          w[i] = unit(v + i);
          ahead[i] = unit(v + wide + i);
          if constexpr (P::kHasScales) {
            scales[i] = widen(scales_of(pages_.keys, v + i, group));
            __builtin_prefetch(scales_of(pages_.keys, std::min(v + wide + i, vectors - 1), group));
            __builtin_prefetch(scales_of(pages_.values, v + i, group));
          }
        }
        in_tiles<kTallest<wide>>(queries, [&](int64_t first, auto queries_here) {
          constexpr int height = decltype(queries_here)::value;
          typename F::Sum sums[height * kRows][wide];
          const int64_t query = group * side.queries + first;
          begin_sums(sums, side, query);
          multiply<F>(sums, side.rows + query * kRows * side.stride, side.stride, w,
                      block_size * F::kStored, size, ahead);
          for (int q = 0; q < height; ++q)
            for (int i = 0; i < wide; ++i) {
              float* to = scores + (first + q) * stride_ + (v + i) * kLanes;
              const Floats sum = joined(sums + q * kRows, i);
              if constexpr (P::kHasScales) {
                const Floats before = group == 0 ? Floats{} : load<Floats>(to);
                store(to, sum * (scales[i] * side.factors[query + q]) + before);
              } else {
                store(to, sum);
              }
            }
        });
      };
      in_widths<kWidth>(vectors, some);
    }
  }

  template <int kWidth>
  [[gnu::noinline]] void add_values_by(const Side<F>& side, int64_t queries, int64_t blocks,
                                       float* result) const {
    const int64_t block_size = pages_.block_size, dim = pages_.dim, size = dim / pages_.groups();
    for (int64_t group = 0; group < pages_.groups(); ++group)
      in_widths<kWidth>(size / kLanes, [&](int64_t v, auto count) {
        constexpr int wide = decltype(count)::value;
        const int64_t d = group * size + v * kLanes;
        in_tiles<kTallest<wide>>(queries, [&](int64_t first, auto queries_here) {
          constexpr int height = decltype(queries_here)::value;
          const int64_t query = group * side.queries + first;
          typename F::Sum sums[height * kRows][wide];
          begin_sums(sums, side, query);
          for (int64_t block = 0; block < blocks; ++block) {
            const typename F::Stored* w[wide];
            const typename F::Stored* ahead[wide];
            for (int i = 0; i < wide; ++i) {
              const auto* column = pages_.values + (d + i * kLanes) * F::kStored;
              w[i] = column + starts_[block];
              ahead[i] = column + starts_[std::min(block + 2, blocks - 1)];
            }
            multiply<F>(sums, side.rows + query * kRows * side.stride + block * block_size,
                        side.stride, w, dim * F::kStored, block_size, ahead);
          }
          for (int q = 0; q < height; ++q)
            for (int i = 0; i < wide; ++i) {
              Floats sum = joined(sums + q * kRows, i);
              if constexpr (P::kHasScales) sum *= side.factors[query + q];
              store(result + (first + q) * dim + d + i * kLanes, sum);
            }
        });
      });
  }

  // Call some(first, Rows<width>) for `count` vectors, kWidth at a time, then one by one.
  template <int kWidth, class Some>
  static void in_widths(int64_t count, const Some& some) {
    int64_t v = 0;
    for (; v + kWidth <= count; v += kWidth) some(v, Rows<kWidth>{});
    for (; v < count; ++v) some(v, Rows<1>{});
  }

  // What the sums of some queries' rows begin with.
  template <int kHeight, int kWidth>
  [[gnu::always_inline]] static void begin_sums(typename F::Sum (&sums)[kHeight][kWidth],
                                                const Side<F>& side, int64_t query) {
    for (int row = 0; row < kHeight; ++row)
      for (int i = 0; i < kWidth; ++i) {
        sums[row][i] = typename F::Sum{};
        if constexpr (kRows > 1) sums[row][i] += side.begin[query * kRows + row];
      }
  }

  // Where the block of the v-th vector of keys begins, and which of its keys is the vector's first.
  std::pair<int64_t, int64_t> place_of(int64_t v) const {
    const int64_t per_block = pages_.block_size / kLanes;
    if (per_block == 1) return {starts_[v], 0};  // a division takes as long as many products
    return {starts_[v / per_block], v % per_block * kLanes};
  }

  // Of the v-th vector of keys or their values.
  const bf16* scales_of(const uint8_t* pages, int64_t v, int64_t group) const {
    const auto [start, key] = place_of(v);
    return pages_.scales(pages, start, group) + key;
  }

  const P& pages_;
  const std::span<const int64_t> starts_;
  const int64_t stride_;
};

}  // namespace charonia
