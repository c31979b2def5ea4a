// What Python gives is checked where it comes in, before any of it is read: an error names what is
// wrong and what is accepted. Must not know what is computed.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "vectors.h"

namespace charonia {

template <class... Args>
void require(bool holds, const Args&... text) {
  if (!holds) throw std::invalid_argument(c10::str(text...));
}

template <class T>
constexpr at::ScalarType kTypeOf = at::ScalarType::Undefined;
template <>
inline constexpr at::ScalarType kTypeOf<float> = at::kFloat;
template <>
inline constexpr at::ScalarType kTypeOf<bf16> = at::kBFloat16;
template <>
inline constexpr at::ScalarType kTypeOf<int64_t> = at::kLong;

inline bool is_plain(const at::Tensor& x) {
  return x.defined() && x.layout() == at::kStrided && x.is_cpu() && x.is_contiguous();
}

constexpr int64_t kAnySize = -1;

[[noreturn]] inline void refuse_tensor(const at::Tensor& x, const char* name, at::ScalarType type,
                                       std::initializer_list<int64_t> shape) {
  std::string wanted;
  for (const int64_t size : shape)
    wanted += (wanted.empty() ? "" : ", ") + (size == kAnySize ? "any" : std::to_string(size));
  const std::string strides = x.layout() == at::kStrided ? c10::str(x.strides()) : "";
  throw std::invalid_argument(c10::str(name, " must be a contiguous ", type, " tensor [", wanted,
                                       "] on the CPU, not ", x.scalar_type(), " ", x.sizes(),
                                       " with strides ", strides, " on ", x.device()));
}

// The tensor lies in a row in this process' memory, and has this type and shape.
inline void require_tensor(const at::Tensor& x, const char* name, at::ScalarType type,
                           std::initializer_list<int64_t> shape) {
  const auto fits = [](int64_t wanted, int64_t size) {
    return wanted == kAnySize || wanted == size;
  };
  if (!is_plain(x) || x.scalar_type() != type || x.dim() != static_cast<int64_t>(shape.size()) ||
      !std::equal(shape.begin(), shape.end(), x.sizes().begin(), fits))
    refuse_tensor(x, name, type, shape);
}

// All `count` numbers are from 0 up to `end`, which is excluded.
inline void require_below(const int64_t* numbers, int64_t count, int64_t end, const char* name) {
  uint64_t largest = 0;  // what is negative is larger than any size
  for (int64_t i = 0; i < count; ++i)
    largest = std::max(largest, static_cast<uint64_t>(numbers[i]));
  if (count > 0 && largest >= static_cast<uint64_t>(std::max<int64_t>(end, 0)))
    throw std::invalid_argument(c10::str(name, " has ", static_cast<int64_t>(largest),
                                         "; accepted are 0 to ", end - 1));
}

}  // namespace charonia
