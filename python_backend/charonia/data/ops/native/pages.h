// How K and V lie in the pages of a layer, and how they are written. Must not know who reads them.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "check.h"
#include "codes.h"
#include "matrix.h"
#include "pool.h"
#include "vectors.h"

namespace charonia {

// What is stored must be finite, or masking it out by a zero weight would not: others may read it
// there. Finite numbers stay as they are. Of a request that has computed infinities nothing right
// can come; with this number, which every type has, its sums are finite again in most cases.
constexpr float kInPlaceOfInfinity = 6e4f;
inline bool is_finite(float x) { return std::fabs(x) <= std::numeric_limits<float>::max(); }
inline bool is_finite(bf16 x) { return (x.bits & 0x7f80) != 0x7f80; }
inline float finite(float x) {
  if (is_finite(x)) return x;
  return x != x ? 0 : std::copysign(kInPlaceOfInfinity, x);
}
inline bf16 finite(bf16 x) {
  return is_finite(x) ? x : rounded<bf16>(finite(to_float(x)));
}

// Of all of them at once, as hardly ever is one that is not: the largest of their exponents.
template <class T>
bool are_finite(const T* x, int64_t count) {
  constexpr bool is_float = std::is_same_v<T, float>;
  using Bits = std::conditional_t<is_float, Words, Shorts>;
  constexpr auto kExponent = is_float ? 0x7f800000 : 0x7f80;
  Bits most = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Bits exponents = load<Bits>(x + i) & kExponent;
    most = exponents > most ? exponents : most;
  }
  bool all = true;
  for (int lane = 0; lane < kLanes; ++lane) all &= most[lane] != kExponent;
  for (; i < count; ++i) all &= is_finite(x[i]);
  return all;
}

using PagesOfLayer = std::pair<at::Tensor, at::Tensor>;  // keys, values

struct HeadShape {
  int64_t heads, kv_heads, head_dim;

  void require_sound() const {
    require(heads > 0 && kv_heads > 0 && heads % kv_heads == 0 && head_dim > 0 && head_dim % 2 == 0,
            heads, " heads of ", head_dim, " numbers cannot share ", kv_heads, " of keys");
  }

  // head_dim, filled up with zeros.
  int64_t dim() const { return (head_dim + kFill - 1) / kFill * kFill; }

  static constexpr int64_t kFill = 16;  // the widest vectors; as `_LANES` in ops.py
};

// Tokens of a block, which the widest vectors must divide.
inline int64_t checked_block_size(int64_t size) {
  require(size > 0 && size % HeadShape::kFill == 0, "blocks must be of a multiple of ",
          HeadShape::kFill, " tokens, not of ", size);
  return size;
}

// Pages of one layer in the type that is computed in. Within a block both K and V are right-hand
// sides of a product, in the units of `Format`, with dim as of `HeadShape`:
//
//   keys     [block][kv_head][dim / kStep][block_size] pairs: q K^T, columns are tokens
//   values   [block][kv_head][block_size / kStep][dim] pairs: p V, columns are dimensions
template <class T>
struct Pages {
  template <class>
  using Product = Format<T>;
  static constexpr int kStep = Format<T>::kStep;
  static constexpr bool kHasScales = false;

  Pages(const PagesOfLayer& pages, const HeadShape& shape)
      : keys(data<T>(pages.first)), values(data<T>(pages.second)), kv_heads(shape.kv_heads),
        block_size(pages.first.size(3)), dim(shape.dim()) {}

  // Return the tokens of a block.
  static int64_t require_fit(const PagesOfLayer& pages, const HeadShape& shape) {
    const auto& [keys, values] = pages;
    const int64_t dim = shape.dim();
    require_tensor(keys, "keys", kTypeOf<T>,
                   {kAnySize, shape.kv_heads, dim / kStep, kAnySize, kStep});
    const int64_t block_size = checked_block_size(keys.size(3));
    require_tensor(values, "values", kTypeOf<T>,
                   {keys.size(0), shape.kv_heads, block_size / kStep, dim, kStep});
    return block_size;
  }

  int64_t block(int64_t id, int64_t head) const { return (id * kv_heads + head) * dim * block_size; }

  // Keys and values [head_dim] of `count` tokens of one block, `stride` apart.
  void write(const int64_t* slots, int64_t count, int64_t head, const T* key, const T* value,
             int64_t stride, int64_t head_dim) const {
    for (int64_t i = 0; i < count;) {
      const T *const its_key = key + i * stride, *const its_value = value + i * stride;
      if constexpr (kHasTransposition<T>)
        if (count - i >= kLanes && slots[i] % kLanes == 0 && are_consecutive(slots + i, kLanes) &&
            head_dim % (2 * kLanes) == 0 && are_finite(its_key, kLanes, stride, head_dim) &&
            are_finite(its_value, kLanes, stride, head_dim)) {
          write_together(slots[i], head, its_key, its_value, stride, head_dim);
          i += kLanes;
          continue;
        }
      write_one(slots[i++], head, its_key, its_value, head_dim);
    }
  }

  int64_t groups() const { return 1; }

  T* keys;
  T* values;
  int64_t kv_heads, block_size, dim;

 private:
  static bool are_consecutive(const int64_t* slots, int64_t count) {
    for (int64_t i = 1; i < count; ++i)
      if (slots[i] != slots[0] + i) return false;
    return true;
  }

  static bool are_finite(const T* x, int64_t count, int64_t stride, int64_t head_dim) {
    bool all = true;
    for (int64_t i = 0; i < count; ++i) all &= charonia::are_finite(x + i * stride, head_dim);
    return all;
  }

  // The same for kLanes tokens, whose numbers are a multiple of two vectors, and finite.
  void write_together(int64_t slot, int64_t head, const T* key, const T* value, int64_t stride,
                      int64_t head_dim) const {
    const int64_t base = block(slot / block_size, head), offset = slot % block_size;
    for (int64_t d = 0; d < head_dim; d += 2 * kLanes) {
      T* const to = keys + base + (d / 2 * block_size + offset) * 2;
      transpose_pairs(key + d, stride, to, block_size * 2);
    }
    for (int64_t i = 0; i < kLanes; i += 2, value += 2 * stride) {
      T* const to = values + base + (offset + i) / 2 * dim * 2;
      for (int64_t d = 0; d < head_dim; d += kLanes)
        interleave(value + d, value + stride + d, to + 2 * d);
    }
  }

  void write_one(int64_t slot, int64_t head, const T* key, const T* value, int64_t head_dim) const {
    const int64_t base = block(slot / block_size, head), offset = slot % block_size;
    const auto put = [&](auto&& stored) {
      T* to = keys + base + offset * kStep;
      for (int64_t d = 0; d < head_dim; d += kStep, to += block_size * kStep)
        for (int i = 0; i < kStep; ++i) to[i] = stored(key[d + i]);
      to = values + base + offset / kStep * dim * kStep + offset % kStep;
      for (int64_t d = 0; d < head_dim; ++d) to[d * kStep] = stored(value[d]);
    };
    if (charonia::are_finite(key, head_dim) && charonia::are_finite(value, head_dim))
      put([](T x) { return x; });
    else
      put([](T x) { return finite(x); });
  }
};

template <class Code>
constexpr at::ScalarType kTypeOfPages = at::ScalarType::Undefined;
template <>
inline constexpr at::ScalarType kTypeOfPages<Int8Code> = at::kChar;
template <>
inline constexpr at::ScalarType kTypeOfPages<Fp8Code> = at::kFloat8_e4m3fn;
template <>
inline constexpr at::ScalarType kTypeOfPages<Int4Code> = at::kByte;

// Pages of one layer in codes, whatever is computed in. kStep codes of a column share 32
// bits; behind a head's codes of a block are their scales, bfloat16. A group of dimensions has one:
//
//   keys     [block][kv_head] [dim / kStep][block_size] 32 bits   [groups][block_size] scales
//   values   [block][kv_head] [block_size / kStep][dim] 32 bits   [groups][block_size] scales
template <class C>
struct QuantizedPages {
  using Code = C;
  template <class T>
  using Product = ProductOf<T, Code>;
  static constexpr int kStep = kPerWord<Code>;
  static constexpr bool kHasScales = true;

  QuantizedPages(const PagesOfLayer& pages, const HeadShape& shape)
      : keys(data<uint8_t>(pages.first)), values(data<uint8_t>(pages.second)),
        kv_heads(shape.kv_heads), block_size(pages.first.size(2)), dim(shape.dim()) {}

  // The tensors are [block][kv_head][block_size][bytes of a token], whatever lies where therein.
  // Return the tokens of a block.
  static int64_t require_fit(const PagesOfLayer& pages, const HeadShape& shape) {
    const auto& [keys, values] = pages;
    require(Code::kGroup == 0 || shape.head_dim % kGroup == 0, "heads of ", shape.head_dim,
            " numbers have no scale for every ", kGroup);
    const int64_t width = bytes_of_token(shape.dim());
    require_tensor(keys, "keys", kTypeOfPages<Code>, {kAnySize, shape.kv_heads, kAnySize, width});
    const int64_t block_size = checked_block_size(keys.size(2));
    require_tensor(values, "values", kTypeOfPages<Code>,
                   {keys.size(0), shape.kv_heads, block_size, width});
    return block_size;
  }

  int64_t groups() const { return groups_of(dim); }
  int64_t block(int64_t id, int64_t head) const {
    return (id * kv_heads + head) * block_size * bytes_of_token(dim);
  }

  // Scales of a group of dimensions, one for each token of the block that begins at `start`.
  const bf16* scales(const uint8_t* pages, int64_t start, int64_t group) const {
    const uint8_t* behind_codes = pages + start + dim * block_size * Code::kBits / 8;
    return reinterpret_cast<const bf16*>(behind_codes) + group * block_size;
  }

  // Keys and values [head_dim] of `count` tokens of one block, `stride` apart. Tokens may share bytes
  // of values with others of their block, so one thread writes to a block.
  template <class T>
  void write(const int64_t* slots, int64_t count, int64_t head, const T* key, const T* value,
             int64_t stride, int64_t head_dim) const {
    for (int64_t i = 0; i < count; ++i, key += stride, value += stride) {
      const int64_t start = block(slots[i] / block_size, head), offset = slots[i] % block_size;
      encode(keys, start, offset, key, head_dim, [&](int64_t d, uint8_t code) {
        put_code<Code>(keys + start + (d / kStep * block_size + offset) * 4, d % kStep, code);
      });
      encode(values, start, offset, value, head_dim, [&](int64_t d, uint8_t code) {
        put_code<Code>(values + start + (offset / kStep * dim + d) * 4, offset % kStep, code);
      });
    }
  }

  uint8_t* keys;
  uint8_t* values;
  int64_t kv_heads, block_size, dim;

 private:
  static constexpr int64_t kGroup = std::max<int64_t>(Code::kGroup, 1);

  static int64_t groups_of(int64_t dim) { return Code::kGroup ? dim / kGroup : 1; }
  static int64_t bytes_of_token(int64_t dim) {
    return dim * Code::kBits / 8 + groups_of(dim) * static_cast<int64_t>(sizeof(bf16));
  }

  // Store the scales of x [head_dim], and give put(d, code) the code of each number.
  template <class T, class Put>
  void encode(uint8_t* pages, int64_t start, int64_t offset, const T* x, int64_t head_dim,
              Put&& put) const {
    thread_local Scratch number_memory, error_memory, code_memory;
    const int64_t group = Code::kGroup ? kGroup : head_dim;
    const auto filled = static_cast<int64_t>(
        std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(group, HeadShape::kFill))));
    float* numbers = number_memory.get<float>(filled);
    double* errors = error_memory.get<double>(filled);
    uint8_t* codes = code_memory.get<uint8_t>(filled);
    std::fill(numbers + group, numbers + filled, 0.0f);
    for (int64_t first = 0; first < head_dim; first += group) {
      for (int64_t i = 0; i < group; ++i) numbers[i] = finite(to_float(x[first + i]));
      const bf16 scale = quantize<Code>(numbers, filled, errors, codes);
      const_cast<bf16*>(scales(pages, start, first / group))[offset] = scale;
      for (int64_t i = 0; i < group; ++i) put(first + i, codes[i]);
    }
  }
};

template <class P>
struct Type {
  using type = P;
};

// Call f(Type<P>{}) with the type of these pages for a model that computes in T.
template <class T, class F>
void with_pages_type(const PagesOfLayer& pages, F&& f) {
  const at::ScalarType type = pages.first.scalar_type();
  if (type == kTypeOfPages<Int8Code>)
    f(Type<QuantizedPages<Int8Code>>{});
  else if (type == kTypeOfPages<Fp8Code>)
    f(Type<QuantizedPages<Fp8Code>>{});
  else if (type == kTypeOfPages<Int4Code>)
    f(Type<QuantizedPages<Int4Code>>{});
  else
    f(Type<Pages<T>>{});  // whose check says what is wrong with any other
}

// Call f(pages) with pages of their type.
template <class T, class F>
void with_pages(const PagesOfLayer& pages, const HeadShape& shape, F&& f) {
  with_pages_type<T>(pages,
                     [&](auto type) { f(typename decltype(type)::type(pages, shape)); });
}

}  // namespace charonia
