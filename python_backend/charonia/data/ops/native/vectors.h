// The processor's vectors, written once for AVX-512, AVX2 and anything else; how numbers lie in
// memory; and the inner loop of matrix products and of attention. Must not know tensors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace charonia {

using std::int32_t;
using std::int64_t;
using std::int8_t;
using std::uint16_t;
using std::uint32_t;
using std::uint8_t;

// ---------------------------------------------------------------------------------- vectors

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
#if defined(__AMX_BF16__)
constexpr const char* kIsa = "amx_bf16";
#elif defined(__AVX512BF16__)
constexpr const char* kIsa = "avx512_bf16";
#elif defined(__AVX512VNNI__)
constexpr const char* kIsa = "avx512_vnni";
#elif defined(__AVX512F__)
constexpr const char* kIsa = "avx512";
#elif defined(__AVX2__)
constexpr const char* kIsa = "avx2";
#else
constexpr const char* kIsa = "portable";
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Shorts __attribute__((vector_size(2 * kLanes)));
typedef int8_t Bytes __attribute__((vector_size(kLanes)));

template <class V>
inline V load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class V>
inline void store(void* to, V value) {
  std::memcpy(to, &value, sizeof value);
}

template <class To, class From>
inline To bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

inline Floats splat(float x) { return x - Floats{}; }

// x, rounded: the compiler must not fuse this product with a sum.
inline Floats alone(Floats x) {
#if defined(__x86_64__)
  asm("" : "+x"(x));
#else
  asm("" : "+m"(x));
#endif
  return x;
}

template <class F>
inline float reduce(Floats v, F&& join) {
  float result = v[0];
  for (int i = 1; i < kLanes; ++i) result = join(result, v[i]);
  return result;
}
// The sum and the largest of all lanes. AVX-512 takes halves, in four steps and not fifteen.
#if defined(__AVX512F__)
inline float sum(Floats v) { return _mm512_reduce_add_ps(v); }
inline float max(Floats v) { return _mm512_reduce_max_ps(v); }
inline int32_t max(Ints v) { return _mm512_reduce_max_epi32((__m512i)v); }
#else
inline float sum(Floats v) {
  return reduce(v, [](float a, float b) { return a + b; });
}
inline float max(Floats v) {
  return reduce(v, [](float a, float b) { return a > b ? a : b; });
}
inline int32_t max(Ints v) {
  int32_t most = v[0];
  for (int i = 1; i < kLanes; ++i) most = std::max<int32_t>(most, v[i]);
  return most;
}
#endif
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

// e^x to about 1e-7, exactly 0 below -87, infinite above 88, NaN of NaN: range reduction to |r| <= ln(2)/2 and a polynomial
// (Cephes' expf).
inline Floats exp(Floats x) {
  const Floats clamped = x > splat(88.0f) ? splat(88.0f) : x;
  const Floats shifted = clamped * 1.44269504f + 12582912.0f;  // the integer is in the low bits
  const Floats n = shifted - 12582912.0f;
  const Floats r = clamped - n * 0.693359375f - n * -2.12194440e-4f;
  Floats p = splat(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f})
    p = p * r + c;
  p = p * r * r + r + 1.0f;
  // As words, which wrap around where they overflow: for an x that is replaced below they may.
  const Floats result = bits<Floats>(bits<Words>(p) + (bits<Words>(shifted) << 23));
  const Floats bounded = x > splat(88.0f) ? splat(std::numeric_limits<float>::infinity()) : result;
  return x < splat(-87.0f) ? Floats{} : (x == x ? bounded : x);
}

// 2^x to about 2e-7, exactly 0 below -126, NaN of NaN; x is at most 127. By a polynomial of the
// least relative error for |r| <= 1/2.
inline Floats exp2(Floats x) {
  const Floats shifted = x + 12582912.0f;  // the integer is in the low bits
  const Floats n = shifted - 12582912.0f;
  const Floats r = x - n;
  Floats p = splat(1.326472731e-3f);
  for (float c : {9.671512991e-3f, 5.550733581e-2f, 2.402224243e-1f, 6.931470037e-1f, 1.0f})
    p = p * r + c;
#if defined(__AVX512F__)
  const __mmask16 is_some = _mm512_cmp_ps_mask(x, splat(-126.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(is_some, p, n);
#else
  const Floats result = bits<Floats>(bits<Words>(p) + (bits<Words>(shifted) << 23));
  return x < splat(-126.0f) ? Floats{} : (x == x ? result : x);
#endif
}

// ---------------------------------------------------------------------------------- formats

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return bits<float>(uint32_t{x.bits} << 16); }

// Numbers of 16 bits as words, and words of 16 bits as such; gcc 12 takes five instructions for each.
inline Words words(Shorts x) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu16_epi32((__m128i)x);
#else
  return __builtin_convertvector(x, Words);
#endif
}
inline Shorts shorts(Words x) {
#if defined(__AVX512F__)
  return (Shorts)_mm512_cvtepi32_epi16((__m512i)x);
#else
  return __builtin_convertvector(x, Shorts);
#endif
}

inline Floats widen(const float* from) { return load<Floats>(from); }
inline Floats widen(const bf16* from) { return bits<Floats>(words(load<Shorts>(from)) << 16); }
inline Floats widen(const int8_t* from) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  return __builtin_convertvector(load<Bytes>(from), Floats);
#endif
}

inline void narrow(float* to, Floats x) { store(to, x); }
inline void narrow(float* to, Floats first, Floats second) {
  store(to, first);
  store(to + kLanes, second);
}
inline void narrow(bf16* to, Floats x) {  // to nearest, ties to even; NaN stays NaN
#if defined(__AVX512BF16__)
  store(to, _mm512_cvtneps_pbh(x));
#else
  const Words raw = bits<Words>(x);
  const Words rounded = (raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16;
  const Words nan = (raw >> 16) | 0x40u;
  store(to, shorts(x == x ? rounded : nan));
#endif
}
inline void narrow(bf16* to, Floats first, Floats second) {
#if defined(__AVX512BF16__)
  store(to, _mm512_cvtne2ps_pbh(second, first));
#else
  narrow(to, first);
  narrow(to + kLanes, second);
#endif
}
// Of the first `count` lanes alone, if there are not as many as a vector has.
template <class T>
inline void narrow_some(T* to, Floats x, int64_t count) {
  if (count >= kLanes) {
    narrow(to, x);
  } else if (count > 0) {
    T lanes[kLanes];
    narrow(lanes, x);
    std::memcpy(to, lanes, count * sizeof(T));
  }
}
template <class T>
inline T rounded(float x) {
  T lanes[kLanes];
  narrow(lanes, splat(x));
  return lanes[0];
}

// Whether the next two are there.
template <class T>
constexpr bool kHasTransposition = std::is_same_v<T, bf16> && kLanes == 16;

#if defined(__AVX512F__)
// to [kLanes pairs][kLanes] pairs of numbers, to_stride apart, = x [kLanes][kLanes] pairs, x_stride
// apart, transposed.
inline void transpose_pairs(const bf16* x, int64_t x_stride, bf16* to, int64_t to_stride) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = load<__m512i>(x + i * x_stride);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + 2 + j]);
      a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + 2 + j]);
    }
  // a[4 i + j] has in its fourth l the pairs 4 l + j of rows 4 i to 4 i + 3.
  for (int j = 0; j < 4; ++j) {
    const __m512i low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x44);
    const __m512i high = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xee);
    const __m512i next_low = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x44);
    const __m512i next_high = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xee);
    store(to + j * to_stride, _mm512_shuffle_i32x4(low, next_low, 0x88));
    store(to + (4 + j) * to_stride, _mm512_shuffle_i32x4(low, next_low, 0xdd));
    store(to + (8 + j) * to_stride, _mm512_shuffle_i32x4(high, next_high, 0x88));
    store(to + (12 + j) * to_stride, _mm512_shuffle_i32x4(high, next_high, 0xdd));
  }
}

// to [kLanes][2] = pairs of first [kLanes] and second [kLanes].
inline void interleave(const bf16* first, const bf16* second, bf16* to) {
  store(to, words(load<Shorts>(first)) | words(load<Shorts>(second)) << 16);
}
#endif

// A format says how the right-hand side of a product is stored and multiplied. It is stored in
// units of one vector: kLanes columns, of kStep consecutive k each,
//
//   unit   [column 0: k, k+1] [column 1: k, k+1] ... [column kLanes-1: k, k+1]      (kStep = 2)
//
// which is what the bfloat16 dot product instruction of AVX-512 wants. So many numbers are kStored
// elements of type Stored.
template <class T>
struct Format;

template <>
struct Format<float> {
  using Input = float;
  using Stored = float;
  using Sum = Floats;
  static constexpr int kStep = 1, kStored = 1;
  using Left = Floats;
  using Right = Floats;
  static Left broadcast(const float* x) { return splat(*x); }
  static Right fetch(const float* w) { return load<Floats>(w); }
  static void add_product(Floats& to, Left a, Right b) { to += a * b; }
};

#if defined(__AVX512BF16__)
template <>
struct Format<bf16> {
  using Input = bf16;
  using Stored = bf16;
  using Sum = Floats;
  static constexpr int kStep = 2, kStored = 2;
  using Left = __m512bh;
  using Right = __m512bh;
  static Left broadcast(const bf16* x) { return (__m512bh)_mm512_set1_epi32(load<int32_t>(x)); }
  static Right fetch(const bf16* w) { return load<__m512bh>(w); }
  static void add_product(Floats& to, Left a, Right b) { to = _mm512_dpbf16_ps(to, a, b); }
};
#else
template <>
struct Format<bf16> {
  using Input = float;  // widened beforehand, not by each product again
  using Stored = bf16;
  using Sum = Floats;
  static constexpr int kStep = 2, kStored = 2;
  struct Left {
    Floats even, odd;
  };
  using Right = Left;
  static Left broadcast(const float* x) { return {splat(x[0]), splat(x[1])}; }
  static Right fetch(const bf16* w) {
    const Words pairs = load<Words>(w);
    return {bits<Floats>(pairs << 16), bits<Floats>(pairs & 0xffff0000u)};
  }
  static Floats number(const Right& w, int k) { return k ? w.odd : w.even; }
  static void add_product(Floats& to, Left a, Right b) {
    to += a.even * b.even;
    to += a.odd * b.odd;
  }
};
#endif

// Weights as int8: whole numbers up to 127 are exact in float32 and in bfloat16, so a sum is the
// same whether they are widened on the fly or before. The scale is applied to the sum.
template <class T>
struct Int8;

template <>
struct Int8<float> : Format<float> {
  using Stored = int8_t;
  static Right fetch(const int8_t* w) { return widen(w); }
  static Floats number(Right w, int) { return w; }
};

template <>
struct Int8<bf16> : Format<bf16> {
  using Stored = int8_t;
  static Right fetch(const int8_t* w) {
#if defined(__AVX512BF16__)
    return _mm512_cvtne2ps_pbh(widen(w + kLanes), widen(w));
#else
    const Ints pairs = (Ints)words(load<Shorts>(w));
    return {__builtin_convertvector((pairs << 24) >> 24, Floats),
            __builtin_convertvector((pairs << 16) >> 24, Floats)};
#endif
  }
};

// --------------------------------------------------------------------------------- multiply

constexpr int kVectors = 2;  // of the right-hand side, side by side
constexpr int kColumns = kVectors * kLanes;
#if defined(__AVX512F__)
constexpr int kSums = 24, kFloatSums = 24;  // of the 32 registers
constexpr int kAheadBytes = 4096;
#else
constexpr int kSums = 8, kFloatSums = 12;  // of the 16 registers
constexpr int kAheadBytes = 2048;
#endif
// Sums side by side; more if the right-hand side is float32, a register for each vector.
template <class F>
constexpr int kSumsOf = std::is_same_v<F, Format<float>> ? kFloatSums : kSums;

// sums[r][v] += x[r] W[v], where x is [kRows, k] with rows `x_stride` apart and W[v] are the k /
// kStep units that begin at w[v] and are `w_stride` elements apart. Every sum runs over k in
// order, whatever kRows is. Meanwhile, what lies at `ahead` in the same way is brought near, if
// kFetches.
template <class F, bool kFetches = true, int kRows, int kWide>
[[gnu::always_inline]] inline void multiply(typename F::Sum (&sums)[kRows][kWide],
                                            const typename F::Input* x, int64_t x_stride,
                                            const typename F::Stored* const (&w)[kWide],
                                            int64_t w_stride, int64_t k,
                                            const typename F::Stored* const (&ahead)[kWide]) {
  for (int64_t step = 0; step < k / F::kStep; ++step) {
    typename F::Right right[kWide];
#pragma GCC unroll 4
    for (int v = 0; v < kWide; ++v) {
      right[v] = F::fetch(w[v] + step * w_stride);
      if constexpr (kFetches) __builtin_prefetch(ahead[v] + step * w_stride);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const typename F::Left left = F::broadcast(x + r * x_stride + step * F::kStep);
#pragma GCC unroll 4
      for (int v = 0; v < kWide; ++v) F::add_product(sums[r][v], left, right[v]);
    }
  }
}

// Call f with a compile-time number of rows: f(Rows<n>).
template <int n>
using Rows = std::integral_constant<int, n>;

template <int n, class F>
inline void with_rows(int64_t rows, F&& f) {
  if constexpr (n > 0) {
    if (rows == n)
      f(Rows<n>{});
    else
      with_rows<n - 1>(rows, f);
  }
}

// Cut `rows` into tiles of about the same height, kTallest at most. Each height is code of its own.
template <int kTallest, class F>
inline void in_tiles(int64_t rows, F&& f) {
  const int64_t tiles = (rows + kTallest - 1) / kTallest;
  for (int64_t tile = 0, first = 0; tile < tiles; ++tile) {
    const int64_t height = (rows - first) / (tiles - tile);
    with_rows<kTallest>(height, [&](auto n) { f(first, n); });
    first += height;
  }
}

}  // namespace charonia
