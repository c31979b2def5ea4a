// What a token is drawn with, beside logits. Must not know how.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <vector>

#include "check.h"
#include "line.h"

namespace charonia {

// A request's parameters, as in protocol.RowSampling.
struct Sampling {
  uint64_t seed;
  Cut cut;
  double repetition_penalty, frequency_penalty, presence_penalty;
  std::map<int64_t, double> logit_bias;
  std::vector<std::vector<int64_t>> bad_words;
  std::vector<int64_t> allowed_ids;  // none: all; `check` sorts them
  int64_t min_tokens;
  std::vector<int64_t> stop_ids;
  int64_t largest_id = -1;  // of all token ids in here

  // Raises what the parameters' own ranges rule out, sorts, and finds `largest_id`.
  void check() {
    require(cut.temperature >= 0 && std::isfinite(cut.temperature), "temperature is ",
            cut.temperature);
    require(0 < cut.top_p && cut.top_p <= 1, "top_p is ", cut.top_p);
    require(0 <= cut.min_p && cut.min_p <= 1, "min_p is ", cut.min_p);
    require(cut.top_k >= 0 && min_tokens >= 0, "top_k is ", cut.top_k, ", min_tokens ", min_tokens);
    require(repetition_penalty > 0 && std::isfinite(repetition_penalty) &&
                std::isfinite(frequency_penalty) && std::isfinite(presence_penalty),
            "penalties are ", repetition_penalty, ", ", frequency_penalty, ", ", presence_penalty);
    for (const auto& [id, bias] : logit_bias) {
      require(std::isfinite(bias), "logit_bias of ", id, " is ", bias);
      include(id);
    }
    for (const int64_t id : stop_ids) include(id);
    std::sort(allowed_ids.begin(), allowed_ids.end());
    for (const int64_t id : allowed_ids) include(id);
    for (const auto& word : bad_words) {
      require(!word.empty(), "a sequence of bad_words is empty");
      for (const int64_t id : word) include(id);
    }
  }

  bool has_penalty() const {
    return repetition_penalty != 1 || frequency_penalty != 0 || presence_penalty != 0;
  }
  bool has_edits() const {
    return has_penalty() || !logit_bias.empty() || !bad_words.empty() || !allowed_ids.empty() ||
           min_tokens > 0;
  }

 private:
  void include(int64_t id) {
    require(id >= 0, "there is no token ", id);
    largest_id = std::max(largest_id, id);
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
