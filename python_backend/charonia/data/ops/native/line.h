// One line of logits and how a token is drawn from it. Must not know requests, edits or tensors.
//
// What is drawn is defined in data/sampling, and the same here: constraints.py (what
// truncation keeps), noise.py (the noise), ranking.py (the order of tokens). The way there is
// another, made for one core that sees a line after the other:
//
//   1. the highest logit of each block of 64 tokens                    one pass over the line
//   2. the best sum of logit / temperature and noise, skipping         no pass: a hash per block
//      the blocks that cannot have it
//   3. top-p: the mass of the tokens before the one found. If that     one pass
//      reaches top_p, the token lies outside: drop it and all after
//      it, and go on at 2.
//
// Nothing is sorted or selected: top-p keeps a beginning of the tokens in order, so a token found
// outside cuts off the rest as well. All but a share of 1 - top_p of the draws end at the first.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "vectors.h"

namespace charonia {

constexpr int64_t kBlock = 64;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kSlack = 1e-3;            // far above any rounding error of a bound
constexpr double kDoubt = 2e-4;            // of the mass; float32 sums are off by less than half
constexpr double kMassUnit = 0x1p40;       // per mass of the best token
constexpr double kMinTemperature = 1e-5;   // below, a line is greedy
constexpr double kLeastRelative = -29.0;   // e^-29 rounds to no unit of mass

// ------------------------------------------------------------------------------------ noise

struct Noise {
  Noise(uint64_t seed, int64_t position)
      : key(mix(mix(seed + kGamma) + (static_cast<uint64_t>(position) + 1) * kGamma)) {}

  uint64_t of_block(uint64_t block) const { return mix(key - (block + 1) * kGamma); }
  uint64_t of_token(uint64_t id) const { return mix(key + (id + 1) * kGamma); }

  static double exponential(uint64_t hash) {
    return -std::log((static_cast<double>(hash >> 12) + 0.5) * 0x1p-52);
  }
  // 1 - u for exponential(hash) = -log(u): never above it, and close where it is small.
  static float least_exponential(uint64_t hash) {
    return static_cast<float>(static_cast<int64_t>(~hash >> 12)) * 0x1p-52f + 0x1p-53f;
  }

 private:
  static constexpr uint64_t kGamma = 0x9E3779B97F4A7C15;

  static uint64_t mix(uint64_t state) {
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB;
    return state ^ (state >> 31);
  }

  uint64_t key;
};

// ------------------------------------------------------------------------------------- line

// What truncates, as in protocol.RowSampling; a top_k of 0 is off.
struct Cut {
  double temperature;
  int64_t top_k;
  double top_p, min_p;
};

// Tokens are ordered by falling logit, among equals by rising id.
struct Token {
  float logit;
  int64_t id;

  bool is_before(const Token& other) const {
    return logit > other.logit || (logit == other.logit && id < other.id);
  }
};

// One line of logits. What may be drawn is always a beginning of the tokens in order, written as
// the `end` that they are before.
class Line {
 public:
  Line(const float* logits, int64_t vocab)
      : logits_(logits), vocab_(vocab), highest_(memory().highest), weights_(memory().weights),
        least_(memory().least) {
    const int64_t num_blocks = (vocab + kBlock - 1) / kBlock;
    highest_.assign((num_blocks + kLanes - 1) / kLanes * kLanes, -kInfinity);
    Ints is_nan = {};
    Floats top = splat(-kInfinity);
    for (int64_t block = 0; block < num_blocks; ++block) {
      Floats most = splat(-kInfinity);
      in_vectors(block, [&](int64_t, Floats x) {
        most = max(x, most);
        is_nan |= x != x;
      });
      highest_[block] = max(most);
      top = max(most, top);
    }
    highest_.resize(num_blocks);
    top_ = max(top);
    for (int lane = 0; lane < kLanes; ++lane) has_nan_ |= is_nan[lane] != 0;
  }

  // Neither NaN nor +inf, and not all -inf.
  bool is_sound() const { return !has_nan_ && std::fabs(top_) <= FLT_MAX; }

  int64_t first() const {
    const int64_t block = std::find(highest_.begin(), highest_.end(), top_) - highest_.begin();
    return std::find(logits_ + block * kBlock, logits_ + vocab_, top_) - logits_;
  }

  int64_t draw(const Cut& cut, const Noise& noise) {
    const bool has_top_k = 0 < cut.top_k && cut.top_k < vocab_;
    if (cut.temperature < kMinTemperature || (has_top_k && cut.top_k == 1))
      return first();
    temperature_ = cut.temperature;
    Token end = {-kInfinity, vocab_};
    if (cut.min_p > 0) end = end_of_min_p(std::log(cut.min_p));
    if (has_top_k) end = sooner(end, end_of_top_k(cut.top_k));
    const Token end_of_mass = end;
    weigh(noise);
    for (;;) {
      const Token found = best(noise, end);
      if (cut.top_p >= 1 || is_in_nucleus(found, end_of_mass, cut.top_p))
        return found.id;
      end = found;
    }
  }

 private:
  struct Memory {
    std::vector<float> highest, weights, least;
  };
  static Memory& memory() {
    thread_local Memory memory;
    return memory;
  }

  static Token sooner(const Token& a, const Token& b) { return a.is_before(b) ? a : b; }

  // f(id of the first, logits) for each vector of a block; past the vocabulary's end is -inf.
  template <class F>
  [[gnu::always_inline]] void in_vectors(int64_t block, F&& f) const {
    const int64_t begin = block * kBlock;
    if (begin + kBlock <= vocab_) {
      for (int64_t i = 0; i < kBlock; i += kLanes) f(begin + i, load<Floats>(logits_ + begin + i));
      return;
    }
    for (int64_t i = begin; i < vocab_; i += kLanes) {
      float some[kLanes];
      for (int lane = 0; lane < kLanes; ++lane)
        some[lane] = i + lane < vocab_ ? logits_[i + lane] : -kInfinity;
      f(i, load<Floats>(some));
    }
  }

  // (logit - highest logit) / temperature. The definition is in float64; float32 is for bounds.
  double relative(float logit) const {
    return (static_cast<double>(logit) - static_cast<double>(top_)) / temperature_;
  }
  // e to that. Where it is no number (-inf at a temperature that rounds to infinity) it is 0.
  Floats weight(Floats logits) const {
    return exp(max((logits - top_) * static_cast<float>(1 / temperature_), splat(-100.0f)));
  }

  // The lowest logit that min-p keeps is found by halving the range of a float's bits.
  Token end_of_min_p(double log_min_p) const {
    const auto ordered = [](int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); };
    int64_t low = ordered(bits<int32_t>(-FLT_MAX)), high = ordered(bits<int32_t>(top_));
    while (low < high) {
      const int64_t middle = (low + high) >> 1;
      if (relative(bits<float>(ordered(static_cast<int32_t>(middle)))) >= log_min_p)
        high = middle;
      else
        low = middle + 1;
    }
    return {bits<float>(ordered(static_cast<int32_t>(high))), vocab_};
  }

  // The first k tokens lie in blocks whose highest logit is at least the k-th highest of these.
  Token end_of_top_k(int64_t k) const {
    float least = -kInfinity;
    if (k <= static_cast<int64_t>(highest_.size())) {
      std::vector<float> sorted = highest_;
      std::nth_element(sorted.begin(), sorted.begin() + k - 1, sorted.end(), std::greater<>());
      least = sorted[k - 1];
    }
    std::vector<Token> tokens;
    for (size_t block = 0; block < highest_.size(); ++block) {
      if (highest_[block] < least) continue;
      const int64_t first = static_cast<int64_t>(block) * kBlock;
      for (int64_t id = first; id < std::min(first + kBlock, vocab_); ++id)
        if (logits_[id] >= least) tokens.push_back({logits_[id], id});
    }
    std::nth_element(tokens.begin(), tokens.begin() + k - 1, tokens.end(),
                     [](const Token& a, const Token& b) { return a.is_before(b); });
    return {tokens[k - 1].logit, tokens[k - 1].id + 1};
  }

  // For each block the weight of its highest logit, and 64 times less than its least exponential.
  void weigh(const Noise& noise) {
    const auto num_blocks = static_cast<int64_t>(highest_.size());
    highest_.resize((num_blocks + kLanes - 1) / kLanes * kLanes, -kInfinity);
    weights_.resize(highest_.size());
    least_.resize(num_blocks);
    for (size_t i = 0; i < highest_.size(); i += kLanes)
      store(&weights_[i], weight(load<Floats>(&highest_[i])));
    highest_.resize(num_blocks);
    for (int64_t block = 0; block < num_blocks; ++block)
      least_[block] = Noise::least_exponential(noise.of_block(block));
  }

  struct Best {
    double score;
    Token token;
  };

  // The token before `end` with the best sum of relative logit and noise.
  //
  // A token of a block beats the best so far only if the block's least exponential A is below
  // exp(relative - best), so only if something less than A is.
  Token best(const Noise& noise, const Token& end) const {
    const auto num_blocks = static_cast<int64_t>(highest_.size());
    int64_t start = 0;
    float most = -1;
    for (int64_t block = 0; block < num_blocks; ++block) {
      const float promise = highest_[block] >= end.logit ? weights_[block] / least_[block] : -1;
      start = promise > most ? block : start;
      most = std::max(promise, most);
    }
    Best best = {-std::numeric_limits<double>::infinity(), {top_, vocab_}};
    visit(start, noise, end, best);
    float reach = reach_of(best);
    for (int64_t block = 0; block < num_blocks; ++block) {
      if (weights_[block] * reach < least_[block] || highest_[block] < end.logit || block == start)
        continue;
      visit(block, noise, end, best);
      reach = reach_of(best);
    }
    return best.token;
  }

  static float reach_of(const Best& best) {
    return static_cast<float>(kBlock * std::exp(-best.score + kSlack));
  }

  void visit(int64_t block, const Noise& noise, const Token& end, Best& best) const {
    const uint64_t hash = noise.of_block(block);
    const double smallest = Noise::exponential(hash) / kBlock;
    const int64_t first = block * kBlock, owner = first + static_cast<int64_t>(hash % kBlock);
    const auto consider = [&](int64_t id, double exponential) {
      const Token token = {logits_[id], id};
      const double score = relative(token.logit) + static_cast<float>(-std::log(exponential));
      if (token.is_before(end) &&
          (score > best.score || (score == best.score && id < best.token.id)))
        best = {score, token};
    };
    if (owner < vocab_) consider(owner, smallest);
    const double missing = best.score + std::log(smallest) - kSlack;  // even with the most noise
    for (int64_t id = first; id < std::min(first + kBlock, vocab_); ++id)
      if (id != owner && logits_[id] >= end.logit && !(relative(logits_[id]) < missing))
        consider(id, smallest + Noise::exponential(noise.of_token(id)));
  }

  // Whether the mass of all tokens before this one is less than top_p of that of all before
  // `end`. Sums in float32 decide unless they come too close to it; then exact ones do.
  bool is_in_nucleus(const Token& token, const Token& end, double top_p) const {
    double before = 0, whole = 0;
    const auto num_blocks = static_cast<int64_t>(highest_.size());
    for (int64_t begin = 0; begin < num_blocks; begin += kBlock) {
      Floats some_before = {}, some_whole = {};
      for (int64_t block = begin; block < std::min(begin + kBlock, num_blocks); ++block) {
        if (highest_[block] < end.logit) continue;
        in_vectors(block, [&](int64_t first, Floats x) {
          const Floats w = weight(x);
          some_before += are_before(token, first, x) ? w : Floats{};
          some_whole += are_before(end, first, x) ? w : Floats{};
        });
      }
      before += sum(some_before);
      whole += sum(some_whole);
    }
    if (before == 0) return true;  // the first is always in
    const double distance = before - whole * top_p;
    return std::fabs(distance) > whole * kDoubt ? distance < 0
                                                : is_exactly_in_nucleus(token, end, top_p);
  }

  // Token::is_before for the tokens first, first + 1, …
  [[gnu::always_inline]] static Ints are_before(const Token& token, int64_t first, Floats x) {
    Ints ids;
    for (int lane = 0; lane < kLanes; ++lane) ids[lane] = lane;
    ids += static_cast<int32_t>(first);
    return (x > token.logit) | ((x == token.logit) & (ids < static_cast<int32_t>(token.id)));
  }

  // With masses as whole numbers, so that no order of addition matters.
  bool is_exactly_in_nucleus(const Token& token, const Token& end, double top_p) const {
    int64_t before = 0, whole = 0;
    for (int64_t id = 0; id < vocab_; ++id) {
      const Token other = {logits_[id], id};
      const double exponent = relative(other.logit);
      if (!(exponent >= kLeastRelative) || !other.is_before(end)) continue;
      const int64_t mass = std::llrint(std::exp(exponent) * kMassUnit);
      whole += mass;
      if (other.is_before(token)) before += mass;
    }
    return before == 0 || static_cast<double>(before) < static_cast<double>(whole) * top_p;
  }

  const float* logits_;
  int64_t vocab_;
  std::vector<float>&highest_, &weights_, &least_;  // of each block
  float top_;
  bool has_nan_ = false;
  double temperature_ = 1;
};

}  // namespace charonia
