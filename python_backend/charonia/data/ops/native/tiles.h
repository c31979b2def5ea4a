// Products by AMX: sixteen or thirty-two rows in the time of one. Must not know what is multiplied
// nor how work is shared out.
#pragma once

#include <algorithm>
#include <bit>
#include <type_traits>
#include <utility>

#include "vectors.h"

namespace charonia {

#if defined(__AMX_BF16__)
constexpr bool kHasTiles = true;

// The tile registers of the calling thread, from the first product to the end of this object. Up to
// sixteen rows are multiplied by four tiles of columns at once, or by two where there are no more;
// up to thirty-two rows by two:
//
//   0 to 3   sums      [rows, kLanes] float32; with two tiles of rows 0 and 1 are the first's
//   4, 5     rows      [rows, 2 kLanes] bfloat16
//   6, 7     columns   [kLanes pairs of k, kLanes, 2] bfloat16
//
// Or sums are int32, rows bytes, and columns four bytes where there are two numbers: twice as much
// of k.
//
// An instruction adds up the products of its step of k before it adds them to a sum, whatever
// the number of rows and columns, so a sum does not depend on these. It takes sixteen cycles, and
// its result as many again and more: so four sums take turns.
class Tiles {
 public:
  static constexpr int64_t kRows = 16;  // of a tile

  // Numbers of type N of k in one instruction: a step.
  template <class N>
  static constexpr int64_t kDepth = 4 * kLanes / sizeof(N);

  // Part of a right-hand side as a register takes it, its units of k so many numbers apart.
  template <class N>
  struct Right {
    const N* first;
    int64_t unit;
  };

  Tiles() = default;
  Tiles(const Tiles&) = delete;
  ~Tiles() {
    if (first_ || second_) _tile_release();
  }

  // Which side of a product is not needed soon again: it leaves the first-level cache to the other.
  enum class Passing { kNeither, kRows, kColumns };

  // sums [rows][sum_stride], kLanes columns for each i < count, = x [rows][x_stride] times
  // tile(i, step) over all steps of k, or = begun + that, where begun [rows][sum_stride] is not null;
  // rows <= 2 kRows. Some i are multiplied together; before they are in a step,
  // before(i, end, step) has its turn, and after each of their products meanwhile().
  template <Passing kPassing = Passing::kNeither, class N, class Sum, class Get, class Before,
            class Meanwhile>
  void multiply(int64_t rows, const N* x, int64_t x_stride, int64_t steps, int64_t count,
                const Get& tile, const Sum* begun, Sum* sums, int64_t sum_stride,
                const Before& before, const Meanwhile& meanwhile) {
    const int64_t more = std::max<int64_t>(rows - kRows, 0);
    shape(rows - more, more);
    const Left<N> left = {x, x + kRows * x_stride, x_stride};
    const Sums<Sum> to = {begun, sums, sum_stride};
    if (more)
      multiply<kPassing, 2, 2>(left, steps, count, tile, to, before, meanwhile);
    else if (count == 2)
      multiply<kPassing, 1, 2>(left, steps, count, tile, to, before, meanwhile);
    else
      multiply<kPassing, 1, 4>(left, steps, count, tile, to, before, meanwhile);
  }

 private:
  static_assert(kVectors == 2 && kLanes == 16);

  struct alignas(64) Shape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };

  template <class N>
  struct Left {
    const N *first, *second;
    int64_t stride;
  };
  template <class Sum>
  struct Sums {
    const Sum* begun;
    Sum* ended;
    int64_t stride;
  };

  // Sums in register kTo += rows in register kLeft times columns in register kRight. Numbers of
  // bfloat16, or rows of signed bytes and columns of unsigned ones.
  template <class N, int kTo, int kLeft, int kRight>
  [[gnu::always_inline]] static void add_products() {
    if constexpr (std::is_same_v<N, bf16>)
      asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kTo), "i"(kLeft), "i"(kRight));
    else
      asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kTo), "i"(kLeft), "i"(kRight));
  }

  template <bool kIsPassing, int kRegister, class N>
  [[gnu::always_inline]] static void load_tile(const N* from, int64_t stride) {
    const int64_t bytes = stride * static_cast<int64_t>(sizeof(N));
    if constexpr (kIsPassing)
      asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(bytes), "i"(kRegister));
    else
      asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(bytes), "i"(kRegister));
  }

  // Call f with each register of so many sums, 0, 1, … as constants. Register r has those of tile
  // r / kWide of rows and tile r % kWide of columns.
  template <int kCount, class F>
  [[gnu::always_inline]] static void for_sums(const F& f) {
    [&]<int... kRegisters>(std::integer_sequence<int, kRegisters...>)
        __attribute__((always_inline)) {
      (f(std::integral_constant<int, kRegisters>()), ...);
    }
    (std::make_integer_sequence<int, kCount>());
  }

  // From those begun, or from zero where there are none.
  template <int kRegister, class Sum>
  [[gnu::always_inline]] static void begin_sum(const Sum* begun, int64_t at, int64_t stride) {
    if (begun)
      load_tile<false, kRegister>(begun + at, stride);
    else
      asm volatile("tilezero %%tmm%c0" ::"i"(kRegister));
  }

  template <int kRegister, class Sum>
  [[gnu::always_inline]] static void store_sum(Sum* to, int64_t stride) {
    const int64_t bytes = stride * static_cast<int64_t>(sizeof(Sum));
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kRegister), "r"(to), "r"(bytes)
                 : "memory");
  }

  template <Passing kPassing, int kTall, int kWide, class N, class Sum, class Get, class Before,
            class Meanwhile>
  void multiply(const Left<N>& left, int64_t steps, int64_t count, const Get& tile,
                const Sums<Sum>& sums, const Before& before, const Meanwhile& meanwhile) {
    constexpr bool kRowsPass = kPassing == Passing::kRows;
    constexpr bool kColumnsPass = kPassing == Passing::kColumns;
    static_assert(kTall * kWide <= 4, "or they take the registers of rows");
    const int64_t below = kRows * sums.stride;
    for (int64_t i = 0; i < count; i += kWide) {
      const int64_t end = std::min<int64_t>(i + kWide, count);
      const auto load_6 = [&](int64_t j, int64_t step) {
        const auto right = tile(std::min(j, count - 1), step);  // past the end is not stored
        load_tile<kColumnsPass, 6>(right.first, right.unit);
      };
      const auto load_7 = [&](int64_t j, int64_t step) {
        const auto right = tile(std::min(j, count - 1), step);
        load_tile<kColumnsPass, 7>(right.first, right.unit);
      };
      for_sums<kTall * kWide>([&](auto sum) {
        const int64_t j = std::min(i + sum % kWide, count - 1);
        begin_sum<sum>(sums.begun, sum / kWide * below + j * kLanes, sums.stride);
      });
      for (int64_t step = 0; step < steps; ++step) {
        before(i, end, step);
        asm volatile("" ::: "memory");  // rows and columns are written before they are loaded
        load_tile<kRowsPass, 4>(left.first + step * kDepth<N>, left.stride);
        load_6(i, step);
        add_products<N, 0, 4, 6>();
        meanwhile();
        load_7(i + 1, step);
        add_products<N, 1, 4, 7>();
        meanwhile();
        if constexpr (kTall == 2) {
          load_tile<kRowsPass, 5>(left.second + step * kDepth<N>, left.stride);
          add_products<N, 2, 5, 6>();
          meanwhile();
          add_products<N, 3, 5, 7>();
          meanwhile();
        } else if constexpr (kWide == 4) {
          load_6(i + 2, step);
          add_products<N, 2, 4, 6>();
          meanwhile();
          load_7(i + 3, step);
          add_products<N, 3, 4, 7>();
          meanwhile();
        }
      }
      for_sums<kTall * kWide>([&](auto sum) {
        const int64_t j = i + sum % kWide;
        if (j < end) store_sum<sum>(sums.ended + sum / kWide * below + j * kLanes, sums.stride);
      });
    }
  }

  // Rows of the first and of the second tile; with none in the second all sums are the first's.
  void shape(int64_t first, int64_t second) {
    if (first == first_ && second == second_) return;
    Shape shape;
    const int64_t other = second ? second : first;
    const int64_t rows[] = {first, first, other, other, first, other, kLanes, kLanes};
    for (int tile = 0; tile < 8; ++tile) {
      shape.row_bytes[tile] = 64;
      shape.rows[tile] = static_cast<uint8_t>(rows[tile]);
    }
    // Not _tile_loadconfig, of which GCC 12 believes that it reads eight bytes.
    asm volatile("ldtilecfg %0" ::"m"(shape));
    first_ = first;
    second_ = second;
  }

  int64_t first_ = 0, second_ = 0;
};

// The bytes of 0 to 127 as bfloat16.
struct ByteTables {
  constexpr ByteTables() {
    for (int i = 0; i < 128; ++i) {
      const auto bits = std::bit_cast<uint32_t>(static_cast<float>(i));
      low[i] = static_cast<uint8_t>(bits >> 16);
      high[i] = static_cast<uint8_t>(bits >> 24);
    }
  }
  alignas(64) uint8_t low[128] = {}, high[128] = {};
};
inline constexpr ByteTables kBytes;

// to[i] = from[i] for 64 numbers from -127 to 127: both bytes are looked up by the magnitude.
inline void widen_64(const int8_t* from, bf16* to) {
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // what unpacking undoes
  const __m512i x = _mm512_permutexvar_epi64(order, load<__m512i>(from));
  const __m512i magnitude = _mm512_abs_epi8(x);
  const auto look_up = [magnitude](const uint8_t* table) {
    return _mm512_permutex2var_epi8(load<__m512i>(table), magnitude, load<__m512i>(table + 64));
  };
  const __m512i low = look_up(kBytes.low);
  const __m512i sign = _mm512_and_si512(x, _mm512_set1_epi8(-128));
  const __m512i high = _mm512_or_si512(look_up(kBytes.high), sign);
  store(to, _mm512_unpacklo_epi8(low, high));
  store(to + 32, _mm512_unpackhi_epi8(low, high));
}

#else
constexpr bool kHasTiles = false;
struct Tiles {};
#endif

}  // namespace charonia
