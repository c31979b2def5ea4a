// Attention over pages: what a step's queries make of K and V. Must not know weights, nor what is
// kept of a number.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "check.h"
#include "matrix.h"
#include "pages.h"
#include "pool.h"
#include "products.h"
#include "step.h"
#include "vectors.h"

namespace charonia {

// Causal attention of a step's queries over the pages, flash-style (Dao et al. 2022, arXiv
// 2205.14135): keys are taken kChunk at a time, each chunk gives a partial softmax, and the partial
// ones of a query are merged in order. An item of work is a tile of one row's tokens with all the
// heads that share a KV head; where there are few items, each is split into its chunks.
template <class T, class P>
class AttentionOverPages {
 public:
  AttentionOverPages(const Step& step, const P& pages, const T* query, int64_t token_stride,
                     int64_t num_heads, int64_t head_dim, T* out)
      : step_(step), pages_(pages), query_(query), token_stride_(token_stride),
        num_heads_(num_heads), head_dim_(head_dim), group_(num_heads / pages.kv_heads),
        chunk_(std::max<int64_t>(1, kChunk / pages.block_size) * pages.block_size), out_(out) {}

  void run() {
    const int64_t tile_tokens = std::max<int64_t>(1, kTileRows / group_);
    for (size_t row = 0; row < step_.context_lens.size(); ++row) {
      const int64_t begin = step_.query_starts[row], end = step_.query_starts[row + 1];
      for (int64_t first = begin; first < end; first += tile_tokens)
        for (int64_t head = 0; head < pages_.kv_heads; ++head) {
          const int64_t last = std::min(end, first + tile_tokens);
          const int64_t seen = step_.context_lens[row] - (end - last);
          tiles_.push_back({static_cast<int64_t>(row), head, first, last - first, seen, 0});
        }
    }
    if (tiles_.empty()) return;
    // Longest first, so that no thread is left alone with a long one.
    std::stable_sort(tiles_.begin(), tiles_.end(),
                     [](const Tile& a, const Tile& b) { return a.seen > b.seen; });
    Pool& pool = Pool::get();
    if (static_cast<int64_t>(tiles_.size()) >= 4 * pool.num_threads() ||
        tiles_.front().seen <= chunk_ || pool.num_threads() == 1) {
      pool.run(tiles_.size(), [&](int64_t i) { attend_whole(tiles_[i]); });
    } else {
      attend_split(pool);
    }
  }

 private:
  static constexpr int64_t kChunk = 256;    // keys of a partial softmax; results depend on it
  static constexpr int64_t kTileRows = 24;  // queries (token and head) of an item

  using F = typename P::template Product<T>;
  using Input = typename F::Input;
  static constexpr int kRows = kRowsEach<F>;

  struct Tile {
    int64_t row, kv_head, first, tokens;
    int64_t seen;     // keys that its last token attends to
    int64_t partial;  // where its partial results begin, if split
  };

  int64_t num_chunks(const Tile& tile) const { return (tile.seen + chunk_ - 1) / chunk_; }
  // A query's (partial) result: sum of weighted values [dim], maximum, sum of weights.
  int64_t result_size() const { return pages_.dim + kLanes; }

  void attend_whole(const Tile& tile) {
    thread_local Scratch memory;
    const int64_t queries = tile.tokens * group_;
    float* merged = memory.get<float>(2 * queries * result_size());
    float* partial = merged + queries * result_size();
    const Side<F> side = queries_of(tile);
    for (int64_t chunk = 0; chunk < num_chunks(tile); ++chunk) {
      attend_chunk(tile, side, chunk, chunk == 0 ? merged : partial);
      if (chunk > 0) merge(queries, merged, partial);
    }
    write(tile, merged);
  }

  void attend_split(Pool& pool) {
    std::vector<std::pair<int64_t, int64_t>> parts;  // tile, chunk
    int64_t size = 0;
    for (size_t i = 0; i < tiles_.size(); ++i) {
      tiles_[i].partial = size;
      size += num_chunks(tiles_[i]) * tiles_[i].tokens * group_ * result_size();
      for (int64_t chunk = 0; chunk < num_chunks(tiles_[i]); ++chunk) parts.emplace_back(i, chunk);
    }
    float* partials = scratch.partial.get<float>(size);
    const auto at = [&](const Tile& tile, int64_t chunk) {
      return partials + tile.partial + chunk * tile.tokens * group_ * result_size();
    };
    pool.run(parts.size(), [&](int64_t i) {
      const auto [tile, chunk] = parts[i];
      attend_chunk(tiles_[tile], queries_of(tiles_[tile]), chunk, at(tiles_[tile], chunk));
    });
    pool.run(tiles_.size(), [&](int64_t i) {
      const Tile& tile = tiles_[i];
      for (int64_t chunk = 1; chunk < num_chunks(tile); ++chunk)
        merge(tile.tokens * group_, at(tile, 0), at(tile, chunk));
      write(tile, at(tile, 0));
    });
  }

  // Keys of a chunk that query `q` of a tile attends to; may be negative.
  int64_t visible(const Tile& tile, int64_t chunk, int64_t q) const {
    return tile.seen - (tile.tokens - 1 - q / group_) - chunk * chunk_;
  }

  // result [queries][result_size]: softmax-weighted values of one chunk, not yet divided.
  void attend_chunk(const Tile& tile, const Side<F>& side, int64_t chunk, float* result) const {
    const int64_t queries = tile.tokens * group_, block_size = pages_.block_size;
    const int64_t keys = std::min(chunk_, tile.seen - chunk * chunk_);
    const int64_t blocks = (keys + block_size - 1) / block_size;
    thread_local Scratch score_memory;
    float* scores = score_memory.get<float>(queries * chunk_);
    const int64_t* table = data<int64_t>(step_.block_tables) +
                           tile.row * step_.block_tables.size(1) + chunk * (chunk_ / block_size);
    const std::vector<int64_t>& starts = block_starts(table, blocks, tile.kv_head);
    const ChunkProducts<P, F> products(pages_, starts, chunk_, result_size());
    products.score(side, queries, scores);
    products.add_values(weigh(tile, chunk, keys, products, scores, result), queries, result);
  }

  const std::vector<int64_t>& block_starts(const int64_t* table, int64_t blocks,
                                           int64_t head) const {
    thread_local std::vector<int64_t> starts;
    starts.resize(blocks);
    for (int64_t i = 0; i < blocks; ++i) starts[i] = pages_.block(table[i], head);
    return starts;
  }

  // The queries of a tile as left-hand sides of products with keys, in order of token and head.
  Side<F> queries_of(const Tile& tile) const {
    const int64_t queries = tile.tokens * group_, dim = pages_.dim, groups = pages_.groups();
    thread_local Scratch row_memory, factor_memory, begin_memory;
    Input* rows = row_memory.get<Input>(queries * kRows * dim);
    float* factors = factor_memory.get<float>(groups * queries);
    int32_t* begin = begin_memory.get<int32_t>(groups * queries * kRows);
    const int64_t size = dim / groups;
    for (int64_t q = 0; q < queries; ++q) {
      const T* from = query_ + (tile.first + q / group_) * token_stride_ +
                      (tile.kv_head * group_ + q % group_) * head_dim_;
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t row = (g * queries + q) * kRows;
        const int64_t count = std::min(size, head_dim_ - g * size);
        factors[g * queries + q] = fill(from + g * size, count, rows + row * size, size);
        if constexpr (kRows > 1)
          for (int i = 0; i < kRows; ++i)
            begin[row + i] = minus_bias<typename P::Code>(rows + (row + i) * size, size);
      }
    }
    return {rows, size, factors, begin};
  }

  // rows [kRows][size] = x [count], and zeros behind; return what products are to be multiplied by.
  float fill(const T* x, int64_t count, Input* rows, int64_t size) const {
    const float factor = 1.0f / std::sqrt(static_cast<float>(head_dim_));
    if constexpr (std::is_same_v<Input, T>) {
      std::copy(x, x + count, rows);
      std::fill(rows + count, rows + size, T{});
      return factor;
    } else {
      thread_local Scratch memory;
      float* numbers = memory.get<float>(size);
      for (int64_t i = 0; i < size; ++i) numbers[i] = i < count ? to_float(x[i]) : 0.0f;
      Steps steps;
      if constexpr (kRows > 1) steps = steps_up_to(largest(numbers, size));
      for (int64_t i = 0; i < size; i += kLanes)
        put(rows + i, size, load<Floats>(numbers + i) * steps.inverse);
      return steps.step * factor;
    }
  }

  // The weights of a chunk's values as left-hand sides of products with them: e^(score - max) times
  // the values' scales, 0 for keys that a query does not see. In result their maximum and sum.
  Side<F> weigh(const Tile& tile, int64_t chunk, int64_t keys, const ChunkProducts<P, F>& products,
                const float* scores, float* result) const {
    const int64_t queries = tile.tokens * group_, groups = pages_.groups();
    const int64_t block_size = pages_.block_size;
    const int64_t padded = (keys + block_size - 1) / block_size * block_size;
    thread_local Scratch row_memory, factor_memory, begin_memory, scale_memory;
    Input* rows = row_memory.get<Input>(groups * queries * kRows * chunk_);
    float* factors = factor_memory.get<float>(groups * queries);
    int32_t* begin = begin_memory.get<int32_t>(groups * queries * kRows);
    float* scales = scale_memory.get<float>(groups * (chunk_ + 1));
    float* steps = scales + groups * chunk_;
    int64_t scales_of = -1;
    for (int64_t q = 0; q < queries; ++q) {
      const int64_t seen = std::clamp<int64_t>(visible(tile, chunk, q), 0, keys);
      if constexpr (P::kHasScales)
        if (seen != std::exchange(scales_of, seen)) products.read_scales(seen, scales, steps);
      weigh_query(scores + q * chunk_, seen, padded, result + q * result_size() + pages_.dim,
                  [&](int64_t i, Floats weight) {
                    for (int64_t g = 0; g < groups; ++g) {
                      Floats scaled = weight;
                      if constexpr (P::kHasScales) scaled *= load<Floats>(scales + g * chunk_ + i);
                      put(rows + (g * queries + q) * kRows * chunk_ + i, chunk_, scaled);
                    }
                  });
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t row = (g * queries + q) * kRows;
        factors[g * queries + q] = P::kHasScales ? steps[g] : 1.0f;
        if constexpr (kRows > 1)
          for (int i = 0; i < kRows; ++i)
            begin[row + i] = minus_bias<typename P::Code>(rows + (row + i) * chunk_, padded);
      }
    }
    return {rows, chunk_, factors, begin};
  }

  // Give put(i, weights) the weights of a query, e^(score - max), 0 from `seen` on up to `padded`;
  // state = max, sum.
  template <class Put>
  static void weigh_query(const float* scores, int64_t seen, int64_t padded, float* state,
                          const Put& put) {
    const Floats none = splat(-std::numeric_limits<float>::infinity());
    const auto masked = [&](int64_t i) { return below(seen, i, load<Floats>(scores + i), none); };
    Floats most = none;
    for (int64_t i = 0; i < seen; i += kLanes) most = max(most, masked(i));
    const float top = max(most);
    Floats total = {};
    for (int64_t i = 0; i < padded; i += kLanes) {
      const Floats weight = i < seen ? exp(masked(i) - top) : Floats{};
      total += weight;
      put(i, weight);
    }
    state[0] = top;
    state[1] = sum(total);
  }

  // Merge the partial softmax of the next chunk into what came before it.
  void merge(int64_t queries, float* merged, const float* partial) const {
    const int64_t dim = pages_.dim;
    for (int64_t q = 0; q < queries; ++q) {
      float* a = merged + q * result_size();
      const float* b = partial + q * result_size();
      if (b[dim + 1] == 0.0f) continue;  // the query sees nothing of this chunk
      const float top = std::max(a[dim], b[dim]);
      const float keep = std::exp(a[dim] - top), take = std::exp(b[dim] - top);
      for (int64_t d = 0; d < dim; d += kLanes)
        store(a + d, load<Floats>(a + d) * keep + load<Floats>(b + d) * take);
      a[dim] = top;
      a[dim + 1] = a[dim + 1] * keep + b[dim + 1] * take;
    }
  }

  void write(const Tile& tile, const float* merged) const {
    for (int64_t q = 0; q < tile.tokens * group_; ++q) {
      const float* from = merged + q * result_size();
      const float factor = 1.0f / from[pages_.dim + 1];
      T* to = out_ + ((tile.first + q / group_) * num_heads_ + tile.kv_head * group_ + q % group_) *
                         head_dim_;
      for (int64_t d = 0; d < head_dim_; ++d) to[d] = rounded<T>(from[d] * factor);
    }
  }

  const Step& step_;
  const P pages_;
  const T* query_;
  const int64_t token_stride_, num_heads_, head_dim_, group_, chunk_;
  T* out_;
  std::vector<Tile> tiles_;
};

// query, out: [tokens, num_heads, head_dim], tokens of `query` token_stride apart.
template <class T, class P>
void attend_over_pages(const Step& step, const P& pages, const T* query, int64_t token_stride,
                       int64_t num_heads, int64_t head_dim, T* out) {
  AttentionOverPages<T, P>(step, pages, query, token_stride, num_heads, head_dim, out).run();
}

}  // namespace charonia
