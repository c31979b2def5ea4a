// Attention over pages: what a step's queries make of K and V. Must not know weights, nor what is
// kept of a number.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "check.h"
#include "matrix.h"
#include "pages.h"
#include "pool.h"
#include "products.h"
#include "step.h"
#include "tile_products.h"
#include "vectors.h"

namespace charonia {

// Causal attention of a step's queries over the pages, flash-style (Dao et al. 2022, arXiv
// 2205.14135): keys are taken kChunk at a time, each chunk gives a partial softmax, and the partial
// ones of a query are merged in order. An item of work is some of one row's tokens with all the
// heads that share a KV head: the more queries it has, the fewer times keys and values are read.
// Where there are few items, each is split into its chunks.
//
// Within an item some queries at a time go through a chunk: their products with keys, the weights
// that these become, and the products of those with values, so that all of it stays in the cache.
// They see no more of the chunk than the last of them does.
//
// What is called in two places is not inlined: of a sum of products a compiler rounds one before it
// adds the other, and copies of the same code may differ in which.
template <class T, class P>
class AttentionOverPages {
 public:
  AttentionOverPages(const Step& step, const P& pages, const T* query, int64_t token_stride,
                     int64_t num_heads, int64_t head_dim, T* out)
      : step_(step), pages_(pages), query_(query), token_stride_(token_stride),
        num_heads_(num_heads), head_dim_(head_dim), group_(num_heads / pages.kv_heads),
        chunk_(std::max<int64_t>(1, kChunk / pages.block_size) * pages.block_size),
        stride_(filled(chunk_)), out_(out) {}

  void run() {
    Pool& pool = Pool::get();
    const int64_t enough = kItems * pool.num_threads();
    int64_t queries = kMostQueries;
    while (cut(queries) < enough && queries > kFewestQueries) queries /= 2;
    if (items_.empty()) return;
    const auto sees_less = [](const Item& a, const Item& b) { return a.seen < b.seen; };
    const auto [least, most] = std::minmax_element(items_.begin(), items_.end(), sees_less);
    const int64_t longest = most->seen;
    const bool are_alike = longest <= 2 * least->seen;
    // Longest first, so that no thread is left alone with a long one.
    if (!are_alike)
      std::stable_sort(items_.begin(), items_.end(),
                       [&](const Item& a, const Item& b) { return sees_less(b, a); });
    if (static_cast<int64_t>(items_.size()) >= enough || longest <= chunk_ ||
        pool.num_threads() == 1) {
      const auto attend = [&](int64_t i) {
        const bool is_last = i + 1 == static_cast<int64_t>(items_.size());
        attend_whole(items_[i], is_last ? nullptr : &items_[i + 1]);
      };
      if (are_alike)  // most of a thread's rows are those that it has rotated and written before
        pool.run_ranges(items_.size(), [&](int64_t i, int64_t end) {
          for (; i < end; ++i) attend(i);
        });
      else
        pool.run(items_.size(), attend);
    } else {
      attend_split(pool, longest);
    }
  }

 private:
  static constexpr int64_t kChunk = 256;  // keys of a partial softmax; results depend on it
  static constexpr int64_t kItems = 4;    // for each thread, so that all have as much to do
  // Queries (token and head) of an item.
  static constexpr int64_t kMostQueries = 192, kFewestQueries = 24;
  static constexpr int64_t kMostNumbers = 4 << 20;  // of partial results that wait to be merged

  using F = typename P::template Product<T>;
  using Products = typename ProductsOf<P, F>::type;
  using Input = typename F::Input;
  static constexpr int kRows = kRowsEach<F>;

  struct Item {
    int64_t row, kv_head, first, tokens;
    int64_t seen;     // keys that its last token attends to
    int64_t results;  // where those of a chunk begin among those of all items, if split
  };

  // What queries have of some keys: weighted values, not yet divided; the largest exponent of a
  // weight, and the sum of weights.
  struct Results {
    float* values;  // [queries][dim]
    float* tops;
    float* totals;

    Results from(int64_t query, int64_t dim) const {
      return {values + query * dim, tops + query, totals + query};
    }
  };

  int64_t size_of_results(int64_t queries) const {
    return queries * pages_.dim + 2 * (queries + kLanes);  // a vector may begin at the last
  }
  Results results_at(float* memory, int64_t queries) const {
    float* const tops = memory + queries * pages_.dim;
    return {memory, tops, tops + queries + kLanes};
  }

  static int64_t filled(int64_t count) {
    return (count + Products::kDepth - 1) / Products::kDepth * Products::kDepth;
  }

  // Make items of about so many queries, and return how many there are.
  int64_t cut(int64_t queries) {
    items_.clear();
    const int64_t item_tokens = std::max<int64_t>(1, queries / group_);
    for (size_t row = 0; row < step_.context_lens.size(); ++row) {
      const int64_t begin = step_.query_starts[row], end = step_.query_starts[row + 1];
      for (int64_t first = begin; first < end; first += item_tokens)
        for (int64_t head = 0; head < pages_.kv_heads; ++head) {
          const int64_t last = std::min(end, first + item_tokens);
          const int64_t seen = step_.context_lens[row] - (end - last);
          items_.push_back({static_cast<int64_t>(row), head, first, last - first, seen, 0});
        }
    }
    return static_cast<int64_t>(items_.size());
  }

  int64_t num_chunks(const Item& item) const { return (item.seen + chunk_ - 1) / chunk_; }

  // Of the item that is probably next the first keys are brought near.
  void attend_whole(const Item& item, const Item* next) {
    thread_local Scratch merged_memory, partial_memory;
    const int64_t queries = item.tokens * group_, most = std::min(queries, Products::kQueries);
    const Results merged =
        results_at(merged_memory.get<float>(size_of_results(queries)), queries);
    const Results partial = results_at(partial_memory.get<float>(size_of_results(most)), most);
    const Side<F> side = queries_of(item);
    for (int64_t chunk = 0; chunk < num_chunks(item); ++chunk)
      attend_chunk(item, side, chunk, merged, chunk == 0 ? nullptr : &partial, next);
    write(item, merged);
  }

  // Compute some chunks of all items, then merge their results in order, and so on: a longer
  // context takes no more memory. Place 0 has what is merged, and chunk 0 goes there at once.
  void attend_split(Pool& pool, int64_t longest) {
    int64_t size = 0;  // of the results of one chunk of each item
    for (Item& item : items_) {
      item.results = size;
      size += size_of_results(item.tokens * group_);
    }
    const int64_t chunks = (longest + chunk_ - 1) / chunk_;
    const int64_t at_once = std::clamp<int64_t>(kMostNumbers / size, 1, chunks);
    float* const memory = scratch.partial.get<float>((1 + at_once) * size);
    const auto at = [&](const Item& item, int64_t place) {
      return results_at(memory + place * size + item.results, item.tokens * group_);
    };
    std::vector<std::pair<int64_t, int64_t>> parts;  // item, chunk
    for (int64_t first = 0; first < chunks; first += at_once) {
      const int64_t end = std::min(first + at_once, chunks);
      const auto place_of = [first](int64_t chunk) { return chunk == 0 ? 0 : 1 + chunk - first; };
      parts.clear();
      for (size_t i = 0; i < items_.size(); ++i)
        for (int64_t chunk = first; chunk < std::min(end, num_chunks(items_[i])); ++chunk)
          parts.emplace_back(i, chunk);
      pool.run(parts.size(), [&](int64_t i) {
        const Item& item = items_[parts[i].first];
        const int64_t chunk = parts[i].second;
        attend_chunk(item, queries_of(item), chunk, at(item, place_of(chunk)), nullptr, nullptr);
      });
      pool.run(items_.size(), [&](int64_t i) {
        const Item& item = items_[i];
        const int64_t own = num_chunks(item);
        if (own <= first) return;  // all of it is written
        for (int64_t chunk = std::max<int64_t>(first, 1); chunk < std::min(end, own); ++chunk)
          merge(item.tokens * group_, at(item, 0), at(item, place_of(chunk)));
        if (own <= end) write(item, at(item, 0));
      });
    }
  }

  // Keys of a chunk that query `q` of an item attends to; may be negative.
  int64_t visible(const Item& item, int64_t chunk, int64_t q) const {
    return item.seen - (item.tokens - 1 - q / group_) - chunk * chunk_;
  }

  // The same, from 0 to `most`.
  int64_t num_seen(const Item& item, int64_t chunk, int64_t q, int64_t most) const {
    return std::clamp<int64_t>(visible(item, chunk, q), 0, most);
  }

  // results = those of one chunk. Or, given memory for the partial ones of as many queries as are
  // multiplied at once, merge those of the chunk into results.
  [[gnu::noinline]] void attend_chunk(const Item& item, const Side<F>& side, int64_t chunk,
                                      const Results& results, const Results* partial,
                                      const Item* next) const {
    const int64_t queries = item.tokens * group_;
    const int64_t keys = std::min(chunk_, item.seen - chunk * chunk_);
    thread_local Scratch score_memory;
    float* scores = score_memory.get<float>(std::min(queries, Products::kQueries) * stride_);
    const ChunkBlocks blocks = blocks_of(item, chunk, next);
    Products products(pages_, blocks, queries, stride_);
    for (int64_t first = 0; first < queries; first += Products::kQueries) {
      const int64_t count = std::min(Products::kQueries, queries - first);
      const int64_t seen = std::min(keys, visible(item, chunk, first + count - 1));
      const Results to = results.from(first, pages_.dim);
      if (seen <= 0) {
        if (!partial) see_nothing(count, to);
        continue;
      }
      const Results& part = partial ? *partial : to;
      products.score(side.from(first), count, num_blocks(seen), scores);
      const Side<F> weights = weigh(item, chunk, first, count, seen, products, scores, part);
      products.add_values(weights, count, num_blocks(seen), part.values);
      if (partial) merge(count, to, part);
    }
  }

  int64_t num_blocks(int64_t keys) const {
    return (keys + pages_.block_size - 1) / pages_.block_size;
  }

  // Of a chunk, and of the one behind it; behind the last one that is the next item's first, if there
  // is one. Until this thread asks for others.
  ChunkBlocks blocks_of(const Item& item, int64_t chunk, const Item* next) const {
    thread_local std::vector<int64_t> starts;
    starts.clear();
    const auto add = [&](const Item& of, int64_t its_chunk) {
      const int64_t per_chunk = chunk_ / pages_.block_size, first = its_chunk * per_chunk;
      const int64_t end = std::min(num_blocks(of.seen), first + per_chunk);
      const int64_t* const table =
          data<int64_t>(step_.block_tables) + of.row * step_.block_tables.size(1);
      for (int64_t i = first; i < end; ++i) starts.push_back(pages_.block(table[i], of.kv_head));
    };
    add(item, chunk);
    const size_t own = starts.size();
    if (chunk + 1 < num_chunks(item))
      add(item, chunk + 1);
    else if (next)
      add(*next, 0);
    const std::span<const int64_t> all = starts;
    return {all.first(own), all.subspan(own)};
  }

  // The queries of an item as left-hand sides of products with keys, in order of token and head.
  Side<F> queries_of(const Item& item) const {
    const int64_t queries = item.tokens * group_, dim = pages_.dim, groups = pages_.groups();
    const int64_t size = dim / groups, stride = filled(size);
    thread_local Scratch row_memory, factor_memory, begin_memory;
    Input* rows = row_memory.get<Input>(groups * queries * kRows * stride);
    float* factors = factor_memory.get<float>(groups * queries);
    int32_t* begin = begin_memory.get<int32_t>(groups * queries * kRows);
    for (int64_t q = 0; q < queries; ++q) {
      const T* from = query_ + (item.first + q / group_) * token_stride_ +
                      (item.kv_head * group_ + q % group_) * head_dim_;
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t row = (g * queries + q) * kRows;
        const int64_t count = std::min(size, head_dim_ - g * size);
        factors[g * queries + q] = fill(from + g * size, count, rows + row * stride, stride);
        if constexpr (kRows > 1)
          for (int i = 0; i < kRows; ++i)
            begin[row + i] = minus_bias<typename P::Code>(rows + (row + i) * stride, size);
      }
    }
    return {rows, stride, queries, factors, begin};
  }

  // What exponents of 2 are of products of queries with keys.
  float factor() const {
    return std::numbers::log2e_v<float> / std::sqrt(static_cast<float>(head_dim_));
  }

  // rows [kRows][size] = x [count], and zeros behind; return what products are to be multiplied by.
  float fill(const T* x, int64_t count, Input* rows, int64_t size) const {
    if constexpr (std::is_same_v<Input, T>) {
      std::copy(x, x + count, rows);
      std::fill(rows + count, rows + size, T{});
      return factor();
    } else {
      thread_local Scratch memory;
      float* numbers = memory.get<float>(size);
      for (int64_t i = 0; i < size; ++i) numbers[i] = i < count ? to_float(x[i]) : 0.0f;
      Steps steps;
      if constexpr (kRows > 1) steps = steps_up_to(largest(numbers, size));
      for (int64_t i = 0; i < size; i += kLanes)
        put(rows + i, size, load<Floats>(numbers + i) * steps.inverse);
      return steps.step * factor();
    }
  }

  // The weights of a chunk's values as left-hand sides of products with them, for `count` queries
  // from the first on that see no more than `keys`: 2^(exponent - top) times the values' scales, 0
  // for keys that a query does not see. Tops and totals go to `results`.
  Side<F> weigh(const Item& item, int64_t chunk, int64_t first, int64_t count, int64_t keys,
                const Products& products, const float* scores, const Results& results) const {
    const int64_t groups = pages_.groups();
    const int64_t padded = filled(num_blocks(keys) * pages_.block_size);
    thread_local Scratch row_memory, factor_memory, begin_memory, scale_memory;
    Input* rows = row_memory.get<Input>(groups * count * kRows * stride_);
    float* factors = factor_memory.get<float>(groups * count);
    int32_t* begin = begin_memory.get<int32_t>(groups * count * kRows);
    float* scales = scale_memory.get<float>(groups * (stride_ + 1));
    float* steps = scales + groups * stride_;
    const float factor_of_scores = P::kHasScales ? 1.0f : factor();  // or it is in them
    for (int64_t q = 0; q < count; ++q)
      results.tops[q] = factor_of_scores *
                        largest_of(scores + q * stride_, num_seen(item, chunk, first + q, keys));
    int64_t scales_of = -1;  // so many keys
    for (int64_t q = 0; q < count; ++q) {
      const int64_t seen = num_seen(item, chunk, first + q, keys);
      if constexpr (P::kHasScales)
        if (seen != std::exchange(scales_of, seen)) products.read_scales(seen, scales, steps);
      results.totals[q] = weigh_query(
          scores + q * stride_, factor_of_scores, results.tops[q], seen, padded,
          [&](int64_t i, auto... weights) {
            if constexpr (!P::kHasScales) {
              put(rows + q * stride_ + i, stride_, weights...);
            } else {
              for (int64_t g = 0; g < groups; ++g) {
                Input* const to = rows + (g * count + q) * kRows * stride_;
                int64_t at = i;
                const auto put_one = [&](Floats weight) {
                  put(to + at, stride_, weight * load<Floats>(scales + g * stride_ + at));
                  at += kLanes;
                };
                (put_one(weights), ...);
              }
            }
          });
      if constexpr (P::kHasScales)
        for (int64_t g = 0; g < groups; ++g) {
          const int64_t row = (g * count + q) * kRows;
          factors[g * count + q] = steps[g];
          if constexpr (kRows > 1)
            for (int i = 0; i < kRows; ++i)
              begin[row + i] = minus_bias<typename P::Code>(rows + (row + i) * stride_, padded);
        }
    }
    return {rows, stride_, count, factors, begin};
  }

  // The largest of a query's scores of the keys that it sees; -inf without one. In four chains, so
  // that none is waited for.
  static float largest_of(const float* scores, int64_t seen) {
    const Floats none = splat(-std::numeric_limits<float>::infinity());
    constexpr int kChains = 4;
    Floats most[kChains] = {none, none, none, none};
    int64_t i = 0;
    for (; i + kChains * kLanes <= seen; i += kChains * kLanes)
      for (int chain = 0; chain < kChains; ++chain)
        most[chain] = max(most[chain], load<Floats>(scores + i + chain * kLanes));
    for (; i < seen; i += kLanes)
      most[0] = max(most[0], below(seen, i, load<Floats>(scores + i), none));
    return max(max(max(most[0], most[1]), max(most[2], most[3])));
  }

  // Give put(i, weights) the weights of a query, 2^(score * factor - top), two vectors at a time
  // where there are as many, 0 from `seen` on up to `padded`; return their sum.
  template <class Put>
  static float weigh_query(const float* scores, float factor, float top, int64_t seen,
                           int64_t padded, const Put& put) {
    const Floats none = splat(-std::numeric_limits<float>::infinity());
    const auto weight_of = [&](Floats some) { return exp2(some * factor - top); };
    Floats total[2] = {};
    int64_t i = 0;
    for (; i + 2 * kLanes <= seen; i += 2 * kLanes) {
      const Floats first = weight_of(load<Floats>(scores + i));
      const Floats second = weight_of(load<Floats>(scores + i + kLanes));
      total[0] += first;
      total[1] += second;
      put(i, first, second);
    }
    for (; i < seen; i += kLanes) {
      const Floats weight = weight_of(below(seen, i, load<Floats>(scores + i), none));
      total[0] += weight;
      put(i, weight);
    }
    for (; i < padded; i += kLanes) put(i, Floats{});
    return sum(total[0] + total[1]);
  }

  void see_nothing(int64_t queries, const Results& results) const {
    std::fill(results.values, results.values + queries * pages_.dim, 0.0f);
    std::fill(results.tops, results.tops + queries, -std::numeric_limits<float>::infinity());
    std::fill(results.totals, results.totals + queries, 0.0f);
  }

  // Merge the partial softmax of the next chunk into what came before it. Of a chunk of which a
  // query sees nothing, nothing comes.
  [[gnu::noinline]] void merge(int64_t queries, const Results& merged,
                               const Results& partial) const {
    const int64_t dim = pages_.dim;
    for (int64_t first = 0; first < queries; first += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, queries - first);
      const Floats before = load<Floats>(merged.tops + first);
      const Floats next = load<Floats>(partial.tops + first);
      const Floats top = max(next, before);
      const Floats keep = exp2(before - top), take = exp2(next - top);
      const Floats total = load<Floats>(merged.totals + first) * keep +
                           load<Floats>(partial.totals + first) * take;
      std::memcpy(merged.tops + first, &top, count * sizeof(float));
      std::memcpy(merged.totals + first, &total, count * sizeof(float));
      for (int64_t q = 0; q < count; ++q) {
        float* a = merged.values + (first + q) * dim;
        const float* b = partial.values + (first + q) * dim;
        for (int64_t d = 0; d < dim; d += kLanes)
          store(a + d, load<Floats>(a + d) * keep[q] + load<Floats>(b + d) * take[q]);
      }
    }
  }

  void write(const Item& item, const Results& merged) const {
    for (int64_t q = 0; q < item.tokens * group_; ++q) {
      const float* from = merged.values + q * pages_.dim;
      const float factor = 1.0f / merged.totals[q];
      T* to = out_ + ((item.first + q / group_) * num_heads_ + item.kv_head * group_ + q % group_) *
                         head_dim_;
      for (int64_t d = 0; d < head_dim_; d += kLanes)
        narrow_some(to + d, load<Floats>(from + d) * factor, head_dim_ - d);
    }
  }

  const Step& step_;
  const P pages_;
  const T* query_;
  const int64_t token_stride_, num_heads_, head_dim_, group_, chunk_;
  const int64_t stride_;  // of the scores and weights of a query
  T* out_;
  std::vector<Item> items_;
};

// query, out: [tokens, num_heads, head_dim], tokens of `query` token_stride apart.
template <class T, class P>
void attend_over_pages(const Step& step, const P& pages, const T* query, int64_t token_stride,
                       int64_t num_heads, int64_t head_dim, T* out) {
  AttentionOverPages<T, P>(step, pages, query, token_stride, num_heads, head_dim, out).run();
}

}  // namespace charonia
