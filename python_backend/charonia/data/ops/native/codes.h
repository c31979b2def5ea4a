// Numbers in 8 or 4 bits with scales, as kv_format.py defines them: how they are rounded, how their
// codes lie in memory, and products with them. Must not know pages.
//
// A code is a number of few bits; what is kept is code times scale. Codes are right-hand sides of
// products as numbers of other formats are (see vectors.h), with kStep consecutive k of a column in
// 32 bits. The scales are none of the products' business: along k they are part of the left-hand
// side, across columns they are applied to the sums.
#pragma once

#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <type_traits>

#include "vectors.h"

namespace charonia {

// ------------------------------------------------------------------------------------ codes

// Nearest whole number, ties to even; below 2^22.
inline Floats whole(Floats x) { return x + 12582912.0f - 12582912.0f; }
inline Floats bounded(Floats x, float least, float most) {
  const Floats raised = x > splat(least) ? x : splat(least);
  return raised < splat(most) ? raised : splat(most);
}
inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
inline Ints to_ints(Floats x) { return __builtin_convertvector(x, Ints); }

// The lowest bytes of whole numbers. Written down because GCC 12 takes one lane after the other.
inline void store_bytes(void* to, Ints x) {
#if defined(__AVX512F__)
  store(to, _mm512_cvtepi32_epi8((__m512i)x));
#else
  for (int lane = 0; lane < kLanes; ++lane)
    static_cast<uint8_t*>(to)[lane] = static_cast<uint8_t>(x[lane]);
#endif
}

// Each kind of codes has:
//
//   kBits      of a code
//   kGroup     numbers that share a scale; 0 is all of a head
//   kTops      what the number of the largest magnitude may be scaled to
//   rounded    of scaled numbers the nearest that have a code
//   code       of such a number, as whole numbers
//   shift(k)   where in 32 bits the code of the k-th number begins
//   number     the inverse of code, of what lies in the lowest bits

struct Int8Code {
  static constexpr int kBits = 8, kBias = 128;
  static constexpr int64_t kGroup = 0;
  static constexpr float kTops[] = {127.0f};
  static constexpr int shift(int k) { return 8 * k; }
  static Floats rounded(Floats scaled) { return bounded(whole(scaled), -127.0f, 127.0f); }
  static Ints code(Floats number) { return to_ints(number) + kBias; }
  static Floats number(Words at) { return to_floats(bits<Ints>(at & 0xffu) - kBias); }
};

// The two halves of eight numbers share bytes.
struct Int4Code {
  static constexpr int kBits = 4, kBias = 8;
  static constexpr int64_t kGroup = 32;
  static constexpr float kTops[] = {-5.5f, -6.0f, -6.5f, -7.0f, -7.5f, -8.0f, -8.5f, -9.0f};
  static constexpr int shift(int k) { return k < 4 ? 8 * k : 8 * (k - 4) + 4; }
  static Floats rounded(Floats scaled) { return bounded(whole(scaled), -8.0f, 7.0f); }
  static Ints code(Floats number) { return to_ints(number) + kBias; }
  static Floats number(Words at) { return to_floats(bits<Ints>(at & 0xfu) - kBias); }
};

// e4m3: a sign, 4 bits of exponent, 3 of mantissa, no infinities (Micikevicius et al. 2022, arXiv
// 2209.05433). Below 2^-6 numbers are multiples of 2^-9. The first and second of four lie in the
// even bytes, so that each two are the low halves of 16 bits.
struct Fp8Code {
  static constexpr int kBits = 8, kBias = 0;
  static constexpr int64_t kGroup = 0;
  // 224 times 2^(0/8) to 2^(7/8)
  static constexpr float kTops[] = {224.0f,      244.273727f, 266.382385f, 290.492065f,
                                    316.783844f, 345.455231f, 376.721588f, 410.81781f};
  static constexpr int shift(int k) { return 16 * (k % 2) + 8 * (k / 2); }

  static Floats rounded(Floats scaled) {
    const Floats x = bounded(scaled, -448.0f, 448.0f);
    const Words raw = bits<Words>(x) & 0x7fffffffu, sign = bits<Words>(x) & 0x80000000u;
    const Words normal = (raw + 0x7ffffu + ((raw >> 20) & 1u)) & ~0xfffffu;
    const Words small = bits<Words>(whole(bits<Floats>(raw) * 512.0f) * (1.0f / 512.0f));
    return bits<Floats>((bits<Floats>(raw) < splat(1.0f / 64.0f) ? small : normal) | sign);
  }
  static Ints code(Floats number) {
    const Words raw = bits<Words>(number) & 0x7fffffffu, sign = bits<Words>(number) >> 31 << 7;
    const Ints small = to_ints(bits<Floats>(raw) * 512.0f);
    const Words normal = (raw >> 20) - (120u << 3);
    return bits<Floats>(raw) < splat(1.0f / 64.0f) ? small | bits<Ints>(sign)
                                                    : bits<Ints>(normal | sign);
  }
  static Floats number(Words at) {
    return bits<Floats>((at & 0x7fu) << 20 | (at & 0x80u) << 24) * 0x1p120f;
  }
};

template <class Code>
constexpr int kPerWord = 32 / Code::kBits;

// Put the code of the k-th of the numbers that share 32 bits there. Not atomic: nobody else may
// write to these bits meanwhile.
template <class Code>
inline void put_code(uint8_t* word, int64_t k, uint8_t code) {
  const int shift = Code::shift(static_cast<int>(k));
  uint8_t& byte = word[shift / 8];
  if constexpr (Code::kBits == 8)
    byte = code;
  else
    byte = static_cast<uint8_t>((byte & 0xf0 >> shift % 8) | code << shift % 8);
}

// Sum of 2^n numbers: the second half is added to the first until one is left. Overwrites them.
inline double sum_in_halves(double* numbers, int64_t count) {
  for (int64_t half = count / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) numbers[i] += numbers[i + half];
  return numbers[0];
}

// Codes of x [count], filled up with zeros to a power of two from 16 on, and their scale. Errors are
// summed up in float64, where squares of float32 are exact, and in halves: torch can do the same.
template <class Code>
bf16 quantize(const float* x, int64_t count, double* errors, uint8_t* codes) {
  constexpr float kLeast = 1e-30f;  // all of which is smaller is stored as zeros
  Floats most = load<Floats>(x), least = most;
  for (int64_t i = kLanes; i < count; i += kLanes) {
    const Floats some = load<Floats>(x + i);
    most = max(most, some);
    least = some < least ? some : least;
  }
  const float high = max(most), low = -max(-least);
  float largest = high >= -low ? high : low;
  if (std::fabs(largest) < kLeast) largest = 0.0f;
  const auto scaled = [&](int64_t i, float scale) {
    return scale == 0.0f ? Floats{} : load<Floats>(x + i) / splat(scale);
  };
  bf16 best = {};
  double least_error = std::numeric_limits<double>::infinity();
  for (const float top : Code::kTops) {
    const bf16 candidate = rounded<bf16>(largest / top);
    const float scale = to_float(candidate);
    double error = 0.0;
    if constexpr (std::size(Code::kTops) > 1) {
      for (int64_t i = 0; i < count; i += kLanes) {
        const Floats exact = scaled(i, scale);
        float lanes[kLanes];
        store(lanes, (Code::rounded(exact) - exact) * scale);
        for (int lane = 0; lane < kLanes; ++lane)
          errors[i + lane] = static_cast<double>(lanes[lane]) * static_cast<double>(lanes[lane]);
      }
      error = sum_in_halves(errors, count);
    }
    if (error < least_error) {
      least_error = error;
      best = candidate;
    }
  }
  for (int64_t i = 0; i < count; i += kLanes) {
    store_bytes(codes + i, Code::code(Code::rounded(scaled(i, to_float(best)))));
  }
  return best;
}

// --------------------------------------------------------------------------------- products

// The right-hand side is codes, and the left-hand side numbers of type Input.
template <class Code, class Input>
struct CodeFormat;

template <class Code>
struct CodeFormat<Code, float> {
  using Input = float;
  using Stored = uint8_t;
  using Sum = Floats;
  static constexpr int kStep = kPerWord<Code>, kStored = 4;
  using Left = const float*;
  struct Right {
    Floats numbers[kStep];
  };
  static Left broadcast(const float* x) { return x; }
  static Right fetch(const uint8_t* w) {
    const Words words = load<Words>(w);
    Right right;
    for (int k = 0; k < kStep; ++k) right.numbers[k] = Code::number(words >> Code::shift(k));
    return right;
  }
  static Floats number(const Right& w, int k) { return w.numbers[k]; }
  static void add_product(Floats& to, Left a, const Right& b) {
    for (int k = 0; k < kStep; ++k) to += splat(a[k]) * b.numbers[k];
  }
};

#if defined(__AVX512BF16__)
template <>
struct CodeFormat<Fp8Code, bf16> {
  using Input = bf16;
  using Stored = uint8_t;
  using Sum = Floats;
  static constexpr int kStep = 4, kStored = 4;
  struct Left {
    __m512bh first, second;
  };
  using Right = Left;
  static Left broadcast(const bf16* x) {
    return {(__m512bh)_mm512_set1_epi32(load<int32_t>(x)),
            (__m512bh)_mm512_set1_epi32(load<int32_t>(x + 2))};
  }
  static Right fetch(const uint8_t* w) {
    const __m512i pairs = load<__m512i>(w);
    return {widened(pairs), widened(_mm512_srli_epi16(pairs, 8))};
  }
  static void add_product(Floats& to, const Left& a, const Right& b) {
    to = _mm512_dpbf16_ps(_mm512_dpbf16_ps(to, a.first, b.first), a.second, b.second);
  }

 private:
  // Of the low bytes. Exponents are those of bfloat16 less 120; what has none, the multiples of
  // 2^-9 from 0 to 7, is looked up.
  static __m512bh widened(__m512i pairs) {
    const __m512i small = _mm512_broadcast_i32x4(_mm_setr_epi16(
        0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    const __m512i magnitude = _mm512_and_si512(pairs, _mm512_set1_epi16(0x7f));
    const __m512i normal =
        _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    const __m512i number = _mm512_mask_permutexvar_epi16(
        normal, _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8)), magnitude, small);
    const __m512i sign =
        _mm512_and_si512(_mm512_slli_epi16(pairs, 8), _mm512_set1_epi16(-32768));
    return (__m512bh)_mm512_or_si512(number, sign);
  }
};
#endif

// The left-hand side is whole numbers of 8 bits: those themselves (w8a8.h), or digits of numbers of
// 16 bits, 256 times one digit and another, both from -128 to 127, each in a row of its own. Codes
// are multiplied as they lie, from 0 on, so that of a sum kBias times the sum of the digits is to be
// taken away.
using Digit = int8_t;
constexpr float kMostInDigits = 127 * 256 + 127;

#if defined(__AVX512VNNI__)
constexpr bool kHasIntegerProducts = true;

template <class Code>
struct CodeFormat<Code, Digit> {
  using Input = Digit;
  using Stored = uint8_t;
  using Sum = Ints;
  static constexpr int kStep = kPerWord<Code>, kStored = 4, kWords = kStep / 4;
  struct Left {
    __m512i words[kWords];
  };
  using Right = Left;
  static Left broadcast(const Digit* x) {
    Left left;
    for (int i = 0; i < kWords; ++i)
      left.words[i] = _mm512_set1_epi32(load<int32_t>(x + 4 * i));
    return left;
  }
  static Right fetch(const uint8_t* w) {
    const __m512i codes = load<__m512i>(w);
    if constexpr (kWords == 1) {
      return {codes};
    } else {
      const __m512i low = _mm512_set1_epi8(15);
      return {_mm512_and_si512(codes, low), _mm512_and_si512(_mm512_srli_epi16(codes, 4), low)};
    }
  }
  static void add_product(Ints& to, const Left& a, const Right& b) {
    __m512i sum = (__m512i)to;
    for (int i = 0; i < kWords; ++i) sum = _mm512_dpbusd_epi32(sum, b.words[i], a.words[i]);
    to = (Ints)sum;
  }
};
// What the sums of a row [count] are to begin with, so that in the end codes were multiplied and not
// what they lie as.
template <class Code>
inline int32_t minus_bias(const Digit* row, int64_t count) {
  __m512i total = _mm512_setzero_si512();
  int64_t i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes)
    total = _mm512_dpbusd_epi32(total, _mm512_set1_epi8(1), load<__m512i>(row + i));
  for (; i < count; i += kLanes)
    total = _mm512_add_epi32(total, _mm512_cvtepi8_epi32(load<__m128i>(row + i)));
  return -Code::kBias * _mm512_reduce_add_epi32(total);
}

#else
constexpr bool kHasIntegerProducts = false;
template <class Code>
int32_t minus_bias(const float*, int64_t) {  // numbers are multiplied, not codes
  return 0;
}
#endif

#if defined(__AVX512BF16__)
constexpr bool kHasBf16Products = true;
#else
constexpr bool kHasBf16Products = false;
#endif

// How codes are multiplied for a model that computes in T: with whole numbers where codes are such
// and the processor has instructions for them, and with T where that is what it has some for.
template <class T, class Code>
using ProductOf = CodeFormat<
    Code, std::conditional_t<
              kHasIntegerProducts && Code::kBias != 0, Digit,
              std::conditional_t<kHasBf16Products && std::is_same_v<T, bf16> && Code::kBias == 0,
                                 bf16, float>>>;

// Rows of the left-hand side of a product for each row of numbers.
template <class F>
constexpr int kRowsEach = std::is_same_v<typename F::Input, Digit> ? 2 : 1;

// The unit in which numbers are rounded to whole ones, and its inverse; 1 where they are not.
struct Steps {
  float step = 1.0f, inverse = 1.0f;
};
inline Steps steps_up_to(float most, float most_whole = kMostInDigits) {
  if (most < 1e-30f) return {0.0f, 0.0f};
  return {most / most_whole, most_whole / most};
}
// Of the magnitudes; NaN where a number is, which as digits would be a number like others.
inline float largest(const float* x, int64_t count) {
  Ints most = {};  // the bits of magnitudes are ordered as these are, those of NaN come last
  for (int64_t i = 0; i < count; i += kLanes) {
    const Ints some = load<Ints>(x + i) & 0x7fffffff;
    most = some > most ? some : most;
  }
  return bits<float>(max(most));
}

// Put some of a row of numbers into its rows of the left-hand side, `stride` apart. In digits they
// are rounded to whole numbers, and must be at most kMostInDigits.
inline void put(float* to, int64_t, Floats x) { store(to, x); }
inline void put(bf16* to, int64_t, Floats x) { narrow(to, x); }
inline void put(Digit* to, int64_t stride, Floats x) {
  const Ints whole = bits<Ints>(x + 12582912.0f);  // the number is in the low bits
  store_bytes(to, (whole + 128) >> 8);
  store_bytes(to + stride, whole);
}
// Two vectors of them, for which bfloat16 has one instruction.
inline void put(float* to, int64_t, Floats first, Floats second) {
  store(to, first);
  store(to + kLanes, second);
}
inline void put(bf16* to, int64_t, Floats first, Floats second) { narrow(to, first, second); }

// The sums of a row of numbers, of those of its rows of the left-hand side.
template <class Sum, int kWide>
inline Floats joined(const Sum (*rows)[kWide], int v) {
  if constexpr (std::is_same_v<Sum, Floats>)
    return rows[0][v];
  else
    return to_floats(rows[0][v]) * 256.0f + to_floats(rows[1][v]);
}

}  // namespace charonia
