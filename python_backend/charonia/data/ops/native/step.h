// The tokens of one step and where their context lies. Must not know what is computed of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "check.h"
#include "matrix.h"
#include "pages.h"

namespace charonia {

// See StepBatch in ops/base.py. Whatever says where something lies has been checked, so the tensors
// must not change any more.
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
    last_slot_ = last_of(this->slots);
    last_block_ = last_of(this->block_tables);
  }

  int64_t num_tokens() const { return positions.size(0); }

  // The angles are for such heads, and all slots and blocks lie in these pages.
  void require_fit(at::ScalarType type, const HeadShape& shape, const PagesOfLayer& pages) const {
    require_tensor(cos, "cos", type, {kAnySize, shape.head_dim / 2});
    int64_t block_size = 0;
    with_type(type, [&](auto zero) {
      with_pages_type<decltype(zero)>(pages, [&](auto pages_type) {
        block_size = decltype(pages_type)::type::require_fit(pages, shape);
      });
    });
    const int64_t blocks = pages.first.size(0);
    require(last_slot_ < blocks * block_size, "slots has ", last_slot_, "; there are ", blocks,
            " blocks of ", block_size);
    require(last_block_ < blocks, "block_tables has ", last_block_, "; there are ", blocks,
            " blocks");
    require(longest_ <= block_tables.size(1) * block_size, "context_lens has ", longest_,
            "; block_tables has ", block_tables.size(1), " blocks of ", block_size,
            " for each row");
  }

  // Behind which tokens another block begins in the pages; the last is the number of tokens.
  const std::vector<int64_t>& ends_of_blocks(int64_t block_size) const {
    if (block_size == block_size_) return ends_of_blocks_;
    block_size_ = block_size;
    ends_of_blocks_.clear();
    const int64_t* const at = data<int64_t>(slots);
    for (int64_t i = 1; i <= num_tokens(); ++i)
      if (i == num_tokens() || at[i] / block_size != at[i - 1] / block_size)
        ends_of_blocks_.push_back(i);
    return ends_of_blocks_;
  }

  at::Tensor positions, slots;  // [tokens]
  std::vector<int64_t> query_starts, context_lens;
  at::Tensor block_tables;  // [rows, blocks]
  at::Tensor cos, sin;      // [positions, head_dim / 2]

 private:
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

  // The largest, or -1 of none.
  static int64_t last_of(const at::Tensor& numbers) {
    const int64_t* first = data<int64_t>(numbers);
    int64_t least = 0, most = -1;
    for (int64_t i = 0; i < numbers.numel(); ++i) {
      least = std::min(least, first[i]);
      most = std::max(most, first[i]);
    }
    require(least >= 0, "slots and block_tables must not have ", least);
    return most;
  }

  int64_t last_slot_ = -1, last_block_ = -1, longest_ = 0;
  mutable int64_t block_size_ = 0;  // of ends_of_blocks_
  mutable std::vector<int64_t> ends_of_blocks_;
};

}  // namespace charonia
