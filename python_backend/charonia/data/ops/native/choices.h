// How products read the weights of a matrix, where what is fastest depends on its shape and on the
// processor: tuning.py measures that. A choice changes how long a product takes, and no bit of its
// result. Must not know products.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>

#include "check.h"

namespace charonia {

// The number format of weights: that of the model; int8 with a step for each output, widened for
// products; or the same multiplied by rows that are rounded to int8, too.
enum class Quantization { kNone, kInt8, kW8a8 };

struct Choice {
  // Bytes between what is read, for one row or several, and what is brought near meanwhile.
  int64_t ahead_of_one, ahead_of_several;
  // The number of rows from which on a panel's weights are widened once for all of them.
  std::optional<int64_t> widened_from;
  // The number of rows from which on whole numbers are multiplied by tiles, and not by vectors.
  int64_t tiles_from = 1;

  int64_t ahead(int64_t rows) const { return rows > 1 ? ahead_of_several : ahead_of_one; }

  void require_sound() const {
    constexpr int64_t kMost = 1 << 20;
    for (const int64_t bytes : {ahead_of_one, ahead_of_several})
      require(bytes > 0 && bytes <= kMost, "weights are read ", bytes,
              " bytes ahead; accepted are 1 to ", kMost);
    require(!widened_from || *widened_from > 0, "weights are widened once for ",
            widened_from.value_or(0), " rows or more; accepted are 1 and more");
    require(tiles_from > 0, "tiles are used for ", tiles_from,
            " rows or more; accepted are 1 and more");
  }
};

// What was chosen, for matrices that will be made.
class Choices {
 public:
  static constexpr int64_t kLeastWeights = 1 << 19;  // of a matrix that is worth a choice

  static Choices& get() {
    static Choices* choices = new Choices;
    return *choices;
  }

  void set(at::ScalarType type, Quantization quantization, int64_t inputs, const Choice& choice) {
    choice.require_sound();
    const std::lock_guard guard(lock_);
    choices_[{type, quantization, inputs}] = choice;
  }

  std::optional<Choice> of(at::ScalarType type, Quantization quantization, int64_t inputs) {
    const std::lock_guard guard(lock_);
    const auto found = choices_.find({type, quantization, inputs});
    if (found == choices_.end()) return std::nullopt;
    return found->second;
  }

 private:
  std::mutex lock_;
  std::map<std::tuple<at::ScalarType, Quantization, int64_t>, Choice> choices_;
};

}  // namespace charonia
