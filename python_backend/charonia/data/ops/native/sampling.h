// What a token is drawn with, beside logits. Must not know how.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "line.h"

namespace charonia {

// A request's parameters, as in protocol.RowSampling.
struct Sampling {
  uint64_t seed;
  Cut cut;
  double repetition_penalty, frequency_penalty, presence_penalty;
  std::map<int64_t, double> logit_bias;
  std::vector<std::vector<int64_t>> bad_words;
  int64_t min_tokens;
  std::vector<int64_t> stop_ids;

  bool has_penalty() const {
    return repetition_penalty != 1 || frequency_penalty != 0 || presence_penalty != 0;
  }
  bool has_edits() const {
    return has_penalty() || !logit_bias.empty() || !bad_words.empty() || min_tokens > 0;
  }
};

// All tokens of a sequence so far; the new one's position is their number.
struct History {
  const int64_t* token_ids;
  int64_t size, num_prompt;

  int64_t num_output() const { return size - num_prompt; }

  bool output_ends_with(const int64_t* ids, int64_t count) const {
    return count <= num_output() && std::equal(ids, ids + count, token_ids + size - count);
  }
};

// Draw from one line of logits, of which only a copy is edited.
int64_t draw_line(const float* logits, int64_t vocab, const Sampling& sampling,
                  const History& history);

}  // namespace charonia
