// Rows of numbers rounded to whole numbers of 8 bits, for products with weights that are such. Must
// not know matrices or threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "codes.h"
#include "vectors.h"

namespace charonia {

// Weights are stored as codes of Int8Code. Without instructions for integers both sides are float32:
// a group's sum is exact there, too.
using WholeFormat = CodeFormat<Int8Code, std::conditional_t<kHasIntegerProducts, Digit, float>>;

// The numbers of a row are filled up with zeros to whole steps of products, and cut into groups of
// about one size, each with a scale of its own. As `group_bounds` of quantize.py has it.
struct Groups {
  static constexpr int64_t kMost = 1024, kMultiple = 64;
  static_assert(127 * 127 * kMost < 1 << 24, "or sums are not exact in float32");

  explicit Groups(int64_t inputs)
      : multiples((inputs + kMultiple - 1) / kMultiple),
        count((multiples * kMultiple + kMost - 1) / kMost) {}

  int64_t begin(int64_t group) const { return group * multiples / count * kMultiple; }
  int64_t size(int64_t group) const { return begin(group + 1) - begin(group); }
  int64_t filled() const { return multiples * kMultiple; }

  int64_t multiples, count;
};

// Rows as left-hand sides. `less` is what codes add to a sum, taken away: they are not less than 0.
struct WholeRows {
  WholeFormat::Input* numbers;  // [rows][filled]
  float* steps;                 // [rows][groups]
  int32_t* less;                // [rows][groups]

  WholeRows from(int64_t row, const Groups& groups) const {
    return {numbers + row * groups.filled(), steps + row * groups.count,
            less + row * groups.count};
  }
};

inline void put_whole(Digit* to, Floats x) {
  store_bytes(to, bits<Ints>(x + 12582912.0f));  // the nearest whole number is in the low bits
}
inline void put_whole(float* to, Floats x) { store(to, whole(x)); }

// Round x [inputs] to the first of `rows`. A group with a NaN has that as its step.
template <class T>
[[gnu::noinline]] void round_row(const T* x, int64_t inputs, const Groups& groups,
                                 const WholeRows& rows) {
  alignas(64) float wide[Groups::kMost];
  for (int64_t group = 0; group < groups.count; ++group) {
    const int64_t first = groups.begin(group), size = groups.size(group);
    const int64_t count = std::min(size, inputs - first);
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(wide + i, widen(x + first + i));
    for (; i < size; ++i) wide[i] = i < count ? to_float(x[first + i]) : 0.0f;
    const Steps steps = steps_up_to(largest(wide, size), 127.0f);
    WholeFormat::Input* const to = rows.numbers + first;
    for (i = 0; i < size; i += kLanes)
      put_whole(to + i, alone(load<Floats>(wide + i) * steps.inverse));
    rows.steps[group] = steps.step;
    rows.less[group] = minus_bias<Int8Code>(to, size);
  }
}

// A sum of products with weights, of one of products with their codes.
inline Floats of_numbers(Ints sum, int32_t less) { return to_floats(sum + less); }
inline Floats of_numbers(Floats sum, int32_t) { return sum; }

}  // namespace charonia
