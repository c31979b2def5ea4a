// Attention over pages: how K and V lie in them, and what a step's queries make of them. Must not
// know weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "check.h"
#include "matrix.h"
#include "pool.h"
#include "vectors.h"

namespace charonia {

// What is stored must be finite, or masking it out by a zero weight would not: others may read it
// there. Finite numbers stay as they are. Of a request that has computed infinities nothing right
// can come; with this number, which every type has, its sums are finite again in most cases.
constexpr float kInPlaceOfInfinity = 6e4f;
inline float finite(float x) {
  if (std::fabs(x) <= std::numeric_limits<float>::max()) return x;
  return x != x ? 0 : std::copysign(kInPlaceOfInfinity, x);
}
inline bf16 finite(bf16 x) {
  return (x.bits & 0x7f80) == 0x7f80 ? rounded<bf16>(finite(to_float(x))) : x;
}

using PagesOfLayer = std::pair<at::Tensor, at::Tensor>;  // keys, values; see Pages

struct HeadShape {
  int64_t heads, kv_heads, head_dim;

  void require_sound() const {
    require(heads > 0 && kv_heads > 0 && heads % kv_heads == 0 && head_dim > 0 && head_dim % 2 == 0,
            heads, " heads of ", head_dim, " numbers cannot share ", kv_heads, " of keys");
  }
};

// The tokens of one step and where their context lies; see StepBatch in ops/base.py. Whatever says
// where something lies has been checked, so the tensors must not change any more.
struct Step {
  Step(at::Tensor positions, at::Tensor slots, std::vector<int64_t> query_starts,
       std::vector<int64_t> context_lens, at::Tensor block_tables, at::Tensor cos, at::Tensor sin)
      : positions(std::move(positions)), slots(std::move(slots)),
        query_starts(std::move(query_starts)), context_lens(std::move(context_lens)),
        block_tables(std::move(block_tables)), cos(std::move(cos)), sin(std::move(sin)) {
    require_tensor(this->positions, "positions", at::kLong, {kAnySize});
    require_tensor(this->slots, "slots", at::kLong, {num_tokens()});
    const auto rows = static_cast<int64_t>(this->context_lens.size());
    require_tensor(this->block_tables, "block_tables", at::kLong, {rows, kAnySize});
    require_rows(rows);
    require_tensor(this->cos, "cos", this->cos.scalar_type(), {kAnySize, kAnySize});
    require_tensor(this->sin, "sin", this->cos.scalar_type(),
                   {this->cos.size(0), this->cos.size(1)});
    require_below(data<int64_t>(this->positions), num_tokens(), this->cos.size(0), "positions");
    end_of_slots_ = end_of(this->slots);
    end_of_blocks_ = end_of(this->block_tables);
  }

  int64_t num_tokens() const { return positions.size(0); }

  // The angles are for such heads, and all slots and blocks lie in these pages.
  void require_fit(at::ScalarType type, const HeadShape& shape, const PagesOfLayer& pages) const {
    const auto& [keys, values] = pages;
    const int64_t pair = type == at::kBFloat16 ? Format<bf16>::kStep : Format<float>::kStep;
    const int64_t dim = (shape.head_dim + kFill - 1) / kFill * kFill;
    require_tensor(cos, "cos", type, {kAnySize, shape.head_dim / 2});
    require_tensor(keys, "keys", type, {kAnySize, shape.kv_heads, dim / pair, kAnySize, pair});
    const int64_t blocks = keys.size(0), block_size = keys.size(3);
    require(block_size > 0 && block_size % kFill == 0, "blocks must be of a multiple of ", kFill,
            " tokens, not of ", block_size);
    require_tensor(values, "values", type,
                   {blocks, shape.kv_heads, block_size / pair, dim, pair});
    require(end_of_slots_ <= blocks * block_size, "slots has ", end_of_slots_ - 1, "; there are ",
            blocks, " blocks of ", block_size);
    require(end_of_blocks_ <= blocks, "block_tables has ", end_of_blocks_ - 1, "; there are ",
            blocks, " blocks");
    require(longest_ <= block_tables.size(1) * block_size, "context_lens has ", longest_,
            "; block_tables has ", block_tables.size(1), " blocks of ", block_size,
            " for each row");
  }

  at::Tensor positions, slots;  // [tokens]
  std::vector<int64_t> query_starts, context_lens;
  at::Tensor block_tables;  // [rows, blocks]
  at::Tensor cos, sin;      // [positions, head_dim / 2]

 private:
  static constexpr int64_t kFill = 16;  // the widest vectors; as `_LANES` in ops.py

  void require_rows(int64_t rows) {
    require(static_cast<int64_t>(query_starts.size()) == rows + 1 && query_starts.front() == 0 &&
                query_starts.back() == num_tokens(),
            "query_starts must go from 0 to ", num_tokens(), ", and have a number more than the ",
            rows, " rows");
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t count = query_starts[row + 1] - query_starts[row];
      require(0 <= count && count <= context_lens[row], "row ", row, " of context_lens has ",
              context_lens[row], ", and by query_starts ", count, " of these are of this step");
      longest_ = std::max(longest_, context_lens[row]);
    }
  }

  static int64_t end_of(const at::Tensor& numbers) {
    const int64_t* first = data<int64_t>(numbers);
    int64_t least = 0, most = -1;
    for (int64_t i = 0; i < numbers.numel(); ++i) {
      least = std::min(least, first[i]);
      most = std::max(most, first[i]);
    }
    require(least >= 0, "slots and block_tables must not have ", least);
    return most + 1;
  }

  int64_t end_of_slots_ = 0, end_of_blocks_ = 0, longest_ = 0;
};

// Pages of one layer. `dim` is head_dim, filled up with zeros to a multiple of 16; within a block
// both K and V are right-hand sides of a product, in the units of `Format`:
//
//   keys     [block][kv_head][dim / kStep][block_size] pairs: q K^T, columns are tokens
//   values   [block][kv_head][block_size / kStep][dim] pairs: p V, columns are dimensions
template <class T>
struct Pages {
  static constexpr int kStep = Format<T>::kStep;

  Pages(const at::Tensor& keys, const at::Tensor& values)
      : keys(data<T>(keys)), values(data<T>(values)), kv_heads(keys.size(1)),
        block_size(keys.size(3)), dim(keys.size(2) * keys.size(4)) {}

  int64_t block(int64_t id, int64_t head) const { return (id * kv_heads + head) * dim * block_size; }

  void write(int64_t slot, int64_t head, const T* key, const T* value, int64_t head_dim) const {
    const int64_t base = block(slot / block_size, head), offset = slot % block_size;
    for (int64_t d = 0; d < head_dim; ++d) {
      keys[base + (d / kStep * block_size + offset) * kStep + d % kStep] = finite(key[d]);
      values[base + (offset / kStep * dim + d) * kStep + offset % kStep] = finite(value[d]);
    }
  }

  T* keys;
  T* values;
  int64_t kv_heads, block_size, dim;
};

// Causal attention of a step's queries over the pages, flash-style (Dao et al. 2022, arXiv
// 2205.14135): keys are taken kChunk at a time, each chunk gives a partial softmax, and the partial
// ones of a query are merged in order. An item of work is a tile of one row's tokens with all the
// heads that share a KV head; where there are few items, each is split into its chunks.
template <class T>
class AttentionOverPages {
 public:
  AttentionOverPages(const Step& step, const Pages<T>& pages, const T* query, int64_t token_stride,
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
  static constexpr int kWide = 4;           // vectors side by side: few queries share much work
  static constexpr int64_t kTileRows = 24;  // queries (token and head) of an item

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
    for (int64_t chunk = 0; chunk < num_chunks(tile); ++chunk) {
      attend_chunk(tile, chunk, chunk == 0 ? merged : partial);
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
      attend_chunk(tiles_[tile], chunk, at(tiles_[tile], chunk));
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
  void attend_chunk(const Tile& tile, int64_t chunk, float* result) const {
    const int64_t queries = tile.tokens * group_, dim = pages_.dim, block_size = pages_.block_size;
    const int64_t keys = std::min(chunk_, tile.seen - chunk * chunk_);
    const int64_t blocks = (keys + block_size - 1) / block_size;
    thread_local Scratch query_memory, score_memory, weight_memory;
    T* query = query_memory.get<T>(queries * dim);
    float* scores = score_memory.get<float>(queries * chunk_);
    T* weights = weight_memory.get<T>(queries * chunk_);
    for (int64_t q = 0; q < queries; ++q) {
      const T* from = query_ + (tile.first + q / group_) * token_stride_ +
                      (tile.kv_head * group_ + q % group_) * head_dim_;
      std::copy(from, from + head_dim_, query + q * dim);
      std::fill(query + q * dim + head_dim_, query + (q + 1) * dim, T{});
    }
    const int64_t* table = data<int64_t>(step_.block_tables) +
                           tile.row * step_.block_tables.size(1) + chunk * (chunk_ / block_size);
    std::vector<int64_t>& starts = block_starts(table, blocks, tile.kv_head);
    score(query, queries, starts, scores);
    for (int64_t q = 0; q < queries; ++q)
      weigh(scores + q * chunk_, std::min(keys, visible(tile, chunk, q)), blocks * block_size,
            weights + q * chunk_, result + q * result_size() + dim);
    add_values(weights, queries, starts, result);
  }

  std::vector<int64_t>& block_starts(const int64_t* table, int64_t blocks, int64_t head) const {
    thread_local std::vector<int64_t> starts;
    starts.resize(blocks);
    for (int64_t i = 0; i < blocks; ++i) starts[i] = pages_.block(table[i], head);
    return starts;
  }

  // scores [queries][chunk_] = q K^T / sqrt(head_dim), kWide vectors of keys at a time. Blocks lie
  // anywhere, so the processor cannot guess the next ones: they are named, and after the last
  // keys the first values.
  void score(const T* query, int64_t queries, const std::vector<int64_t>& starts,
             float* scores) const {
    constexpr int kStep = Format<T>::kStep;
    const int64_t block_size = pages_.block_size, dim = pages_.dim;
    const int64_t vectors = static_cast<int64_t>(starts.size()) * block_size / kLanes;
    const float factor = 1.0f / std::sqrt(static_cast<float>(head_dim_));
    const auto unit = [&](int64_t v) {
      const T* pages = v < vectors ? pages_.keys : pages_.values;
      const int64_t key = (v < vectors ? v : std::min(v - vectors, vectors - 1)) * kLanes;
      return pages + starts[key / block_size] + key % block_size * kStep;
    };
    const auto some = [&](int64_t v, auto count) {
      constexpr int wide = decltype(count)::value;
      const T* units[wide];
      const T* ahead[wide];
      for (int i = 0; i < wide; ++i) {
        units[i] = unit(v + i);
        ahead[i] = unit(v + wide + i);
      }
      in_tiles<wide>(queries, [&](int64_t first, auto rows_here) {
        constexpr int height = decltype(rows_here)::value;
        Floats sums[height][wide] = {};
        multiply<Format<T>>(sums, query + first * dim, dim, units, block_size * kStep, dim, ahead);
        for (int r = 0; r < height; ++r)
          for (int i = 0; i < wide; ++i)
            store(scores + (first + r) * chunk_ + (v + i) * kLanes, sums[r][i] * factor);
      });
    };
    int64_t v = 0;
    for (; v + kWide <= vectors; v += kWide) some(v, Rows<kWide>{});
    for (; v < vectors; ++v) some(v, Rows<1>{});
  }

  // weights [padded] = e^(score - max), 0 from `keys` on; state = max, sum.
  void weigh(const float* scores, int64_t keys, int64_t padded, T* weights, float* state) const {
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    const Ints lane = lane_numbers();
    const auto masked = [&](int64_t i) {
      return lane + static_cast<int32_t>(i) < static_cast<int32_t>(std::max<int64_t>(keys, 0))
                 ? load<Floats>(scores + i)
                 : splat(kNone);
    };
    Floats largest = splat(kNone);
    for (int64_t i = 0; i < keys; i += kLanes) largest = max(largest, masked(i));
    const float top = max(largest);
    Floats total = {};
    for (int64_t i = 0; i < padded; i += kLanes) {
      const Floats weight = i < keys ? exp(masked(i) - top) : Floats{};
      total += weight;
      narrow(weights + i, weight);
    }
    state[0] = top;
    state[1] = sum(total);
  }

  static Ints lane_numbers() {
    Ints lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    return lane;
  }

  // result [queries][result_size] = weights V, kWide vectors of dimensions at a time.
  void add_values(const T* weights, int64_t queries, const std::vector<int64_t>& starts,
                  float* result) const {
    constexpr int kStep = Format<T>::kStep;
    const int64_t block_size = pages_.block_size, dim = pages_.dim;
    const int64_t blocks = starts.size();
    const auto some = [&](int64_t d, auto count) {
      constexpr int wide = decltype(count)::value;
      in_tiles<wide>(queries, [&](int64_t first, auto rows_here) {
        constexpr int height = decltype(rows_here)::value;
        Floats sums[height][wide] = {};
        for (int64_t block = 0; block < blocks; ++block) {
          const T* units[wide];
          const T* ahead[wide];
          for (int i = 0; i < wide; ++i) {
            const T* column = pages_.values + (d + i * kLanes) * kStep;
            units[i] = column + starts[block];
            ahead[i] = column + starts[std::min(block + 2, blocks - 1)];
          }
          multiply<Format<T>>(sums, weights + first * chunk_ + block * block_size, chunk_, units,
                              dim * kStep, block_size, ahead);
        }
        for (int r = 0; r < height; ++r)
          for (int i = 0; i < wide; ++i)
            store(result + (first + r) * result_size() + d + i * kLanes, sums[r][i]);
      });
    };
    int64_t d = 0;
    for (; d + kWide * kLanes <= dim; d += kWide * kLanes) some(d, Rows<kWide>{});
    for (; d < dim; d += kLanes) some(d, Rows<1>{});
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
  const Pages<T> pages_;
  const T* query_;
  const int64_t token_stride_, num_heads_, head_dim_, group_, chunk_;
  T* out_;
  std::vector<Tile> tiles_;
};

}  // namespace charonia
