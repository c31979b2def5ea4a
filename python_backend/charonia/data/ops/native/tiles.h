// Matrix products by AMX: sixteen rows of x in the time of one. Must not know how work is shared out.
#pragma once

#include <bit>

#include "vectors.h"

namespace charonia {

#if defined(__AMX_BF16__)
constexpr bool kHasTiles = true;

// The tile registers of the calling thread, from the first product to the end of this object:
//
//   0, 1   sums     [rows, kLanes] float32, one for each vector of a panel
//   2      x        [rows, 2 kLanes] bfloat16
//   3, 4   weights  [kLanes pairs of k, kLanes columns, 2] bfloat16, as they are packed
class Tiles {
 public:
  static constexpr int kRows = 16;
  static constexpr int kDepth = 2 * kLanes;  // of k in one instruction

  Tiles() = default;
  Tiles(const Tiles&) = delete;
  ~Tiles() {
    if (rows_) _tile_release();
  }

  // sums[r][v] = x[r] W[v] over the first k rounded down to kDepth; see vectors.h's `multiply`.
  // The units of W follow each other; rows <= kRows. Before a step of kDepth is needed, its turn in
  // `bring(step)` comes; steps past the end are brought as well.
  template <class Bring>
  void multiply(Floats (&sums)[kRows][kVectors], const bf16* x, int64_t x_stride, int rows,
                const bf16* w, int64_t k, const Bring& bring) {
    constexpr int kUnit = 2 * kLanes, kStride = kVectors * kUnit;
    shape(rows);
    _tile_zero(0);
    _tile_zero(1);
    bring(0);
    for (int64_t step = 0; step < k / kDepth; ++step) {
      bring(step + 1);
      asm volatile("" ::: "memory");  // what was brought is written before it is loaded
      const bf16* units = w + step * kLanes * kStride;
      _tile_loadd(2, x + step * kDepth, x_stride * sizeof(bf16));
      _tile_loadd(3, units, kStride * sizeof(bf16));
      _tile_dpbf16ps(0, 2, 3);
      _tile_loadd(4, units + kUnit, kStride * sizeof(bf16));
      _tile_dpbf16ps(1, 2, 4);
    }
    _tile_stored(0, &sums[0][0], sizeof sums[0]);
    _tile_stored(1, &sums[0][1], sizeof sums[0]);
  }

 private:
  static_assert(kVectors == 2 && kLanes == 16);

  struct alignas(64) Shape {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };

  void shape(int rows) {
    if (rows == rows_) return;
    Shape shape;
    for (int tile = 0; tile < 5; ++tile) {
      shape.row_bytes[tile] = 64;
      shape.rows[tile] = static_cast<uint8_t>(tile < 3 ? rows : kLanes);
    }
    // Not _tile_loadconfig, of which GCC 12 believes that it reads eight bytes.
    asm volatile("ldtilecfg %0" ::"m"(shape));
    rows_ = rows;
  }

  int rows_ = 0;
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
