// A draft model's guesses at the next tokens of some rows, all of its passes in one call. Must not
// know where rows come from or which guesses are right. data/draft_model.py is the same for any
// device.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "attention.h"
#include "check.h"
#include "layer.h"
#include "pool.h"
#include "sampling.h"

namespace charonia {

// What is asked for a row: to compute `count` tokens from `start` on, which end with the last one
// known where it is to guess, then to guess.
struct GuessOfRow {
  int64_t row, start, count, num_known, num_guesses, num_prompt;
  const Sampling* sampling;
};

// The rows' tokens [rows, max_model_len] and block ids [rows, blocks], int64; drafts are written
// behind the known tokens.
struct RowTables {
  RowTables(at::Tensor tokens, at::Tensor blocks, int64_t block_size)
      : tokens(std::move(tokens)), blocks(std::move(blocks)), block_size(block_size) {
    require_tensor(this->tokens, "tokens", at::kLong, {kAnySize, kAnySize});
    require_tensor(this->blocks, "blocks", at::kLong, {this->tokens.size(0), kAnySize});
    require(block_size > 0, "block_size must be positive, not ", block_size);
  }

  // Nothing that is asked for lies, or goes, outside of the tables.
  void require_fit(const GuessOfRow& one) const {
    const int64_t size = std::min(tokens.size(1), blocks.size(1) * block_size);
    require(0 <= one.row && one.row < tokens.size(0), "there is no row ", one.row, " among ",
            tokens.size(0));
    require(one.sampling != nullptr, "row ", one.row, " has no sampling");
    require(0 <= one.start && 0 < one.count && one.count <= size - one.start, "row ", one.row,
            " cannot compute ", one.count, " tokens from ", one.start, " on; it has room for ",
            size);
    require(0 <= one.num_guesses && 0 <= one.num_prompt && one.num_prompt <= one.num_known &&
                one.num_known <= size - one.num_guesses,
            "row ", one.row, " cannot guess ", one.num_guesses, " tokens behind ", one.num_known,
            ", of which ", one.num_prompt, " are its prompt; it has room for ", size);
  }

  at::Tensor tokens, blocks;
  int64_t block_size;
};

class Guesser {
 public:
  // embedding [vocabulary, hidden]; cos, sin [positions, head_dim / 2].
  Guesser(at::Tensor embedding, std::shared_ptr<Layers> layers, std::shared_ptr<Head> head,
          at::Tensor cos, at::Tensor sin)
      : embedding_(std::move(embedding)), layers_(std::move(layers)), head_(std::move(head)),
        cos_(std::move(cos)), sin_(std::move(sin)) {
    require(layers_ && head_, "a model has layers and a head");
    require(layers_->type() == type() && layers_->hidden() == head_->hidden(), "layers of ",
            layers_->hidden(), " ", layers_->type(), " and a head of ", head_->hidden(), " ",
            type(), " do not fit");
    require_tensor(embedding_, "embedding", type(), {kAnySize, head_->hidden()});
  }

  template <class T>
  void run(std::vector<GuessOfRow> asked, const RowTables& tables,
           const std::vector<PagesOfLayer>& pages) const {
    for (int64_t place = 0; !asked.empty(); ++place) {
      pass<T>(asked, tables, pages, place);
      std::erase_if(asked, [&](const GuessOfRow& one) { return one.num_guesses <= place + 1; });
      for (GuessOfRow& one : asked) {
        one.start = one.num_known + place;
        one.count = 1;
      }
    }
  }

  at::ScalarType type() const { return head_->type(); }
  int64_t num_weights() const { return layers_->num_weights() + head_->num_weights(); }
  bool waits_for_ranks() const { return layers_->waits_for_ranks(); }

 private:
  // Compute what is asked; rows that still guess draw the token `place` behind the known ones.
  template <class T>
  void pass(const std::vector<GuessOfRow>& asked, const RowTables& tables,
            const std::vector<PagesOfLayer>& pages, int64_t place) const {
    const Step step = step_of(asked, tables);
    const int64_t size = embedding_.size(1), num_tokens = step.num_tokens();
    layers_->require_fit(num_tokens, step, pages);
    thread_local Scratch residual_memory, x_memory, logits_memory;
    T* residual = residual_memory.get<T>(num_tokens * size);
    T* x = x_memory.get<T>(num_tokens * size);
    T* to = residual;
    for (const GuessOfRow& one : asked) {
      const int64_t* ids = tokens_of(one, tables) + one.start;
      require_below(ids, one.count, embedding_.size(0), "tokens");
      for (int64_t i = 0; i < one.count; ++i, to += size) {
        const T* from = data<T>(embedding_) + ids[i] * size;
        std::copy(from, from + size, to);
      }
    }
    (*layers_)(residual, num_tokens, step, pages, x);
    // The last token of each row that guesses is moved to the front.
    std::vector<const GuessOfRow*> guessing;
    for (size_t i = 0; i < asked.size(); ++i) {
      if (asked[i].num_guesses <= place) continue;
      const auto last = step.query_starts[i + 1] - 1, line = static_cast<int64_t>(guessing.size());
      for (T* lines : {residual, x})
        if (last != line)
          std::copy(lines + last * size, lines + (last + 1) * size, lines + line * size);
      guessing.push_back(&asked[i]);
    }
    const auto num_lines = static_cast<int64_t>(guessing.size());
    if (num_lines == 0) return;
    const int64_t vocab = head_->vocabulary();
    float* logits = logits_memory.get<float>(num_lines * vocab);
    (*head_)(static_cast<const T*>(x), static_cast<const T*>(residual), num_lines, logits);
    Pool::get().run(num_lines, [&](int64_t line) {
      const GuessOfRow& one = *guessing[line];
      int64_t* known = tokens_of(one, tables);
      const History history = {known, one.num_known + place, one.num_prompt};
      known[history.size] = draw_line(logits + line * vocab, vocab, *one.sampling, history);
    });
  }

  static int64_t* tokens_of(const GuessOfRow& one, const RowTables& tables) {
    return data<int64_t>(tables.tokens) + one.row * tables.tokens.size(1);
  }

  Step step_of(const std::vector<GuessOfRow>& asked, const RowTables& tables) const {
    std::vector<int64_t> query_starts = {0}, context_lens;
    for (const GuessOfRow& one : asked) {
      query_starts.push_back(query_starts.back() + one.count);
      context_lens.push_back(one.start + one.count);
    }
    const int64_t longest = *std::max_element(context_lens.begin(), context_lens.end());
    const int64_t num_blocks = (longest + tables.block_size - 1) / tables.block_size;
    const auto int64s = tables.tokens.options();
    auto positions = at::empty({query_starts.back()}, int64s);
    auto slots = at::empty({query_starts.back()}, int64s);
    auto block_tables = at::empty({static_cast<int64_t>(asked.size()), num_blocks}, int64s);
    int64_t* position = data<int64_t>(positions);
    int64_t* slot = data<int64_t>(slots);
    int64_t* to = data<int64_t>(block_tables);
    for (const GuessOfRow& one : asked) {
      const int64_t* blocks = data<int64_t>(tables.blocks) + one.row * tables.blocks.size(1);
      to = std::copy(blocks, blocks + num_blocks, to);
      for (int64_t i = one.start; i < one.start + one.count; ++i) {
        *position++ = i;
        *slot++ = blocks[i / tables.block_size] * tables.block_size + i % tables.block_size;
      }
    }
    return {positions, slots, query_starts, context_lens, block_tables, cos_, sin_};
  }

  at::Tensor embedding_;
  std::shared_ptr<Layers> layers_;
  std::shared_ptr<Head> head_;
  at::Tensor cos_, sin_;
};

}  // namespace charonia
