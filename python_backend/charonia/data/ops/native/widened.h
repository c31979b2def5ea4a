// Products in float32 with weights of other formats, where the processor has no instructions for
// these. Must not know matrices or threads.
//
// Rows are float32. With few rows weights are widened on their way into registers, by each tile of
// rows again. With many they are widened once for all rows. Both ways add up the same products in
// the same order, so sums are equal.
#pragma once

#include <cstdint>
#include <optional>
#include <type_traits>

#include "pool.h"
#include "vectors.h"

namespace charonia {

// Widen `count` numbers.
inline void widen_all(const bf16* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, widen(from + i));
  for (; i < count; ++i) to[i] = to_float(from[i]);
}

// Whether a panel's weights of format F may be widened once for many rows.
template <class F>
constexpr bool kIsWidenedOnce =
    std::is_same_v<typename F::Input, float> && sizeof(typename F::Stored) < sizeof(float);

// From how many rows on they are, unless something else was chosen (choices.h), by what was
// measured on Zen 3. Bytes with rows of bfloat16 or whole numbers cost the most to widen. With rows
// of float32 they cost the least: 2 to 9 % are gained at 32 rows. On Zen 5, AVX2 gains 5 to 8 % at
// 64 rows and nothing at 32, and AVX-512 loses 8 to 12 % at 128.
template <class F>
constexpr std::optional<int64_t> widened_once_from() {
  constexpr bool has_bytes = sizeof(typename F::Stored) == 1;
  constexpr bool is_cheap = std::is_same_v<F, Int8<float>>;
  if (!kIsWidenedOnce<F> || (is_cheap && kLanes == 16)) return std::nullopt;
  return has_bytes && !is_cheap ? kSums / kVectors + 1 : 64;
}

struct WidenedMemory {
  Scratch panel, sums;
};
inline thread_local WidenedMemory widened_memory;

// Widen a panel's weights over `depth` inputs to [depth][kColumns]. Those of as many inputs that
// follow are brought near.
template <class F>
void widen_panel(const typename F::Stored* w, int64_t depth, float* to) {
  constexpr int kUnit = kLanes * F::kStored;
  const typename F::Stored* next = w + depth * kColumns;
  for (int64_t k = 0; k < depth; k += F::kStep, to += F::kStep * kColumns) {
    for (int v = 0; v < kVectors; ++v, w += kUnit, next += kUnit) {
      __builtin_prefetch(next, 0, 2);
      const typename F::Right right = F::fetch(w);
      for (int i = 0; i < F::kStep; ++i) store(to + i * kColumns + v * kLanes, F::number(right, i));
    }
  }
}

// sums[r] = or += x[r] W, over k inputs of a widened panel. A function of its own, or gcc 12 keeps
// some of the sums in memory.
template <int kRows>
[[gnu::noinline]] void multiply_floats(Floats (*sums)[kVectors], bool is_first, const float* x,
                                       int64_t x_stride, const float* w, int64_t k) {
  Floats own[kRows][kVectors] = {};
  if (!is_first)
    for (int r = 0; r < kRows; ++r)
      for (int v = 0; v < kVectors; ++v) own[r][v] = sums[r][v];
  const float* const units[kVectors] = {w, w + kLanes};
  multiply<Format<float>, false>(own, x, x_stride, units, kColumns, k, units);
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = own[r][v];
}

}  // namespace charonia
