// Drawing tokens from logits on a CPU, edits included: all lines of a step in one call. Must not
// know how one line is drawn from (line.h), or requests beyond their parameters and tokens.

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cfloat>
#include <limits>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "check.h"
#include "matrix.h"
#include "pool.h"
#include "sampling.h"
#include "turn.h"

namespace charonia {
namespace {

// The product rounded to float32, never fused with an addition: the same on every processor.
inline float times(float a, float b) { return static_cast<float>(static_cast<double>(a) * b); }

void penalize(float* logits, int64_t vocab, const Sampling& sampling, const History& history) {
  constexpr int32_t kDone = -1;
  require_below(history.token_ids, history.size, vocab, "token ids");
  thread_local std::vector<int32_t> counts;  // all 0 between calls
  if (static_cast<int64_t>(counts.size()) < vocab) counts.resize(vocab);
  const auto repetition = static_cast<float>(sampling.repetition_penalty);
  const auto frequency = static_cast<float>(sampling.frequency_penalty);
  const auto presence = static_cast<float>(sampling.presence_penalty);
  for (int64_t i = history.num_prompt; i < history.size; ++i) ++counts[history.token_ids[i]];
  for (int64_t i = 0; i < history.size; ++i) {
    const int64_t id = history.token_ids[i];
    const int32_t count = std::exchange(counts[id], kDone);
    if (count == kDone) continue;
    const float old = logits[id];
    const float repeated = old > 0 ? old / repetition : old * repetition;
    const float frequented = repeated - times(frequency, static_cast<float>(count));
    logits[id] = frequented - (count > 0 ? presence : 0.0f);
  }
  for (int64_t i = 0; i < history.size; ++i) counts[history.token_ids[i]] = 0;
}

void edit(float* logits, int64_t vocab, const Sampling& sampling, const History& history) {
  require(sampling.largest_id < vocab, "parameters name token ", sampling.largest_id,
          "; there are ", vocab);
  for (const auto& [id, bias] : sampling.logit_bias) logits[id] += static_cast<float>(bias);
  if (history.num_output() < sampling.min_tokens)
    for (const int64_t id : sampling.stop_ids) logits[id] += -kInfinity;
  for (const auto& word : sampling.bad_words)
    if (history.output_ends_with(word.data(), static_cast<int64_t>(word.size()) - 1))
      logits[word.back()] += -kInfinity;
  if (sampling.has_penalty()) penalize(logits, vocab, sampling, history);
}

// All tokens that are not allowed become -inf.
void keep_allowed(float* logits, int64_t vocab, const Sampling& sampling) {
  if (sampling.allowed_ids.empty()) return;
  int64_t next = 0;
  for (const int64_t id : sampling.allowed_ids) {
    if (id > next) std::fill(logits + next, logits + id, -kInfinity);
    next = id + 1;
  }
  std::fill(logits + next, logits + vocab, -kInfinity);
}

// NaN and -inf become the smallest number, +inf the largest.
void repair(float* logits, int64_t vocab) {
  for (int64_t i = 0; i < vocab; ++i)
    logits[i] = logits[i] >= -FLT_MAX ? std::min(logits[i], FLT_MAX) : -FLT_MAX;
}

}  // namespace

// ------------------------------------------------------------------------------------- draw

// Only a line that is not sound is repaired, before the edits and after.
int64_t draw_line(const float* logits, int64_t vocab, const Sampling& sampling,
                  const History& history) {
  thread_local Scratch scratch;
  float* copy = nullptr;
  if (sampling.has_edits()) {
    copy = scratch.get<float>(vocab);
    std::copy(logits, logits + vocab, copy);
    edit(copy, vocab, sampling, history);
    keep_allowed(copy, vocab, sampling);
  }
  Line line(copy ? copy : logits, vocab);
  if (line.is_sound()) return line.draw(sampling.cut, {sampling.seed, history.size});
  copy = scratch.get<float>(vocab);
  std::copy(logits, logits + vocab, copy);
  repair(copy, vocab);
  edit(copy, vocab, sampling, history);
  repair(copy, vocab);
  keep_allowed(copy, vocab, sampling);
  return Line(copy, vocab).draw(sampling.cut, {sampling.seed, history.size});
}

namespace {

// Draw a token for each line: logits [n, vocab] float32, histories n of [tokens] int64.
std::vector<int64_t> draw(const at::Tensor& logits, const std::vector<const Sampling*>& samplings,
                          const std::vector<at::Tensor>& histories,
                          const std::vector<int64_t>& num_prompts) {
  const size_t n = samplings.size();
  require_tensor(logits, "logits", at::kFloat, {static_cast<int64_t>(n), kAnySize});
  const int64_t vocab = logits.size(1);
  require(0 < vocab && vocab <= std::numeric_limits<int32_t>::max(), "there are ", vocab,
          " tokens");
  require(histories.size() == n && num_prompts.size() == n, n, " lines, ", histories.size(),
          " histories and ", num_prompts.size(), " lengths of prompts");
  std::vector<History> known;
  for (size_t i = 0; i < n; ++i) {
    require(samplings[i] != nullptr, "line ", i, " has no sampling");
    require_tensor(histories[i], "token ids", at::kLong, {kAnySize});
    known.push_back({data<int64_t>(histories[i]), histories[i].size(0), num_prompts[i]});
    require(0 <= num_prompts[i] && num_prompts[i] <= known[i].size, num_prompts[i],
            " tokens of a prompt among ", known[i].size);
  }
  std::vector<int64_t> token_ids(n);
  const float* from = data<float>(logits);
  const auto turn = take_turn();
  Pool::get().run(static_cast<int64_t>(n), [&](int64_t i) {
    token_ids[i] = draw_line(from + i * vocab, vocab, *samplings[i], known[i]);
  });
  return token_ids;
}

}  // namespace

void bind_sampling(pybind11::module_& module) {
  namespace py = pybind11;
  py::class_<Sampling>(module, "Sampling", py::module_local())
      .def(py::init([](uint64_t seed, double temperature, int64_t top_k, double top_p, double min_p,
                       double repetition, double frequency, double presence,
                       std::map<int64_t, double> bias, std::vector<std::vector<int64_t>> bad_words,
                       std::vector<int64_t> allowed_ids, int64_t min_tokens,
                       std::vector<int64_t> stop_ids) {
        Sampling sampling{seed,
                          {temperature, top_k, top_p, min_p},
                          repetition,
                          frequency,
                          presence,
                          std::move(bias),
                          std::move(bad_words),
                          std::move(allowed_ids),
                          min_tokens,
                          std::move(stop_ids)};
        sampling.check();
        return sampling;
      }));
  module.def("draw", &draw);
}

}  // namespace charonia
