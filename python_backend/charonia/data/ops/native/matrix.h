// Packed weights and products with them. Must not know layers.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "pool.h"
#include "tiles.h"
#include "vectors.h"

namespace charonia {

template <class T>
T* data(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

// Call f with a value of the element type.
template <class F>
void with_type(at::ScalarType type, F&& f) {
  if (type == at::kFloat)
    f(float{});
  else if (type == at::kBFloat16)
    f(bf16{});
  else
    throw std::invalid_argument(std::string("the CPU kernels compute in float32 and bfloat16, not ") +
                                c10::toString(type));
}

// Memory for weights: zeros in huge pages, which are faster to read and far faster to come by. It is
// taken in chunks, as a matrix is smaller than a few huge pages; a chunk is let go with the last
// tensor in it.
class WeightMemory {
 public:
  static at::Tensor zeros(int64_t count, at::ScalarType type) {
    const int64_t bytes = (count * static_cast<int64_t>(at::elementSize(type)) + 63) / 64 * 64;
    static std::shared_ptr<Chunk> current;
    static std::mutex lock;
    const std::lock_guard guard(lock);
    if (!current || current->used + bytes > current->size)
      current = std::make_shared<Chunk>(std::max(kChunkBytes, bytes));
    void* const at = current->memory + current->used;
    current->used += bytes;
    return at::from_blob(at, {count}, [chunk = current](void*) {}, at::TensorOptions(type));
  }

 private:
  static constexpr int64_t kHugePage = 2 << 20, kChunkBytes = 32 * kHugePage;

  struct Chunk {
    explicit Chunk(int64_t bytes) : size((bytes + kHugePage - 1) / kHugePage * kHugePage) {
      // As much again as a huge page, so that one can begin where it must.
      void* const got = mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (got == MAP_FAILED) throw std::bad_alloc();
      mapped = static_cast<char*>(got);
      const auto address = reinterpret_cast<uintptr_t>(mapped);
      memory = mapped + (kHugePage - address % kHugePage) % kHugePage;
      madvise(memory, size, MADV_HUGEPAGE);  // a wish: without it pages are small
    }
    ~Chunk() { munmap(mapped, size + kHugePage); }
    Chunk(const Chunk&) = delete;

    const int64_t size;
    int64_t used = 0;
    char* mapped;
    char* memory;
  };
};

// W [outputs, inputs], packed in panels of kColumns outputs that are read front to back:
//
//   panels   [panel][inputs / kStep][kVectors] units
//
// A paired matrix has gate in the first vector of a panel and up in the second: its first half
// of outputs and its second half side by side.
class Matrix {
 public:
  // weight: [outputs, inputs]; bias: [outputs]. Raises where inputs is odd, or outputs of a pair.
  Matrix(const at::Tensor& weight, const std::optional<at::Tensor>& bias, bool is_paired,
         bool is_int8)
      : outputs(checked(weight).size(0)), inputs(weight.size(1)), type(weight.scalar_type()),
        is_int8(is_int8) {
    require(inputs % 2 == 0, "a matrix with an odd number of inputs, ", inputs);
    require(!is_paired || outputs % 2 == 0, "gate and up have ", outputs, " outputs together");
    if (bias) require_tensor(*bias, "bias", type, {outputs});
    const int64_t per_panel = is_paired ? kLanes : kColumns;
    const int64_t columns = is_paired ? outputs / 2 : outputs;
    num_panels = (columns + per_panel - 1) / per_panel;
    sources_.resize(num_panels * kColumns);
    for (int64_t i = 0; i < num_panels * kColumns; ++i) {
      const int64_t panel = i / kColumns, column = i % kColumns;
      const bool is_second = is_paired && column >= kLanes;
      const int64_t source = panel * per_panel + column - (is_second ? kLanes : 0);
      sources_[i] = source >= columns ? -1 : source + (is_second ? columns : 0);
    }
    if (is_int8) steps_.resize(num_panels * kColumns);
    with_type(type, [&](auto zero) {
      using T = decltype(zero);
      if (bias) bias_ = gather<T>(*bias);
      panels_ = WeightMemory::zeros(num_panels * kColumns * inputs, is_int8 ? at::kChar : type);
      const std::lock_guard guard(one_at_a_time);
      Pool::get().run(num_panels, [&](int64_t panel) { pack<T>(panel, data<T>(weight)); });
    });
  }

  int64_t num_weights() const { return outputs * inputs; }

  // Call out(row, panel, sums) for every row of x [rows, inputs] and panel of outputs, with sums
  // an array of kVectors vectors that lacks scale and bias; see `finish`.
  template <class T, class Out>
  void multiply_rows(const T* x, int64_t rows, const Out& out) const {
    if (is_int8)
      multiply_rows<Int8<T>, T>(data<int8_t>(panels_), x, rows, out);
    else
      multiply_rows<Format<T>, T>(data<T>(panels_), x, rows, out);
  }

  // Apply scale and bias to vector v of a panel's sums.
  Floats finish(Floats sums, int64_t panel, int v) const {
    const int64_t column = panel * kColumns + v * kLanes;
    if (is_int8) sums *= load<Floats>(steps_.data() + column);
    if (!bias_.empty()) sums += load<Floats>(bias_.data() + column);
    return sums;
  }

  static_assert(kVectors == 2);

  // y [rows, outputs] = x W^T + b, in T or in float32.
  template <class T, class Y>
  void apply(const T* x, int64_t rows, Y* y) const {
    multiply_rows(x, rows, [&](int64_t row, int64_t panel, const Floats* sums) {
      const int64_t column = panel * kColumns;
      const Floats first = finish(sums[0], panel, 0), second = finish(sums[1], panel, 1);
      Y* const to = y + row * outputs + column;
      if (column + kColumns <= outputs) {
        narrow(to, first, second);
      } else {
        narrow_some(to, first, outputs - column);
        narrow_some(to + kLanes, second, outputs - column - kLanes);
      }
    });
  }

  const int64_t outputs, inputs;
  const at::ScalarType type;
  const bool is_int8;
  int64_t num_panels;

 private:
  static const at::Tensor& checked(const at::Tensor& weight) {
    with_type(weight.scalar_type(), [](auto) {});
    require_tensor(weight, "weight", weight.scalar_type(), {kAnySize, kAnySize});
    require(weight.numel() > 0, "weight must not be empty, and is ", weight.sizes());
    return weight;
  }

  static constexpr int64_t kRowsAtOnce = 192;  // of x, so that they stay in the cache

  // The same with AMX: so many bytes of x, half of the second-level cache, but some tiles at least.
  static constexpr int64_t kBytesAtOnce = 1 << 20, kTileRows = 32;

  int64_t tile_rows_at_once() const {
    const int64_t rows = kBytesAtOnce / (inputs * static_cast<int64_t>(sizeof(bf16)));
    return std::max<int64_t>(rows / kTileRows, 4) * kTileRows;
  }

  // Sums of some rows and a panel that were not handed out yet.
  template <class Out>
  class WaitingSums {
   public:
    explicit WaitingSums(const Out& out) : out_(out) {}

    // Where those of the next rows go.
    float* next() { return reinterpret_cast<float*>(sums_[side_ ^ 1]); }
    Floats (&row(int64_t r))[kVectors] { return sums_[side_ ^ 1][r]; }

    // They are there; all before them were handed out.
    void wait(int64_t first_row, int64_t count, int64_t panel) {
      side_ ^= 1;
      first_row_ = first_row;
      panel_ = panel;
      count_ = count;
      given_ = 0;
    }

    // How many are to be handed out in each of so many steps.
    int64_t share(int64_t steps) const { return steps ? (count_ + steps - 1) / steps : 0; }

    void hand_out(int64_t count) {
      const int64_t end = std::min(count_, given_ + count);
      for (; given_ < end; ++given_) out_(first_row_ + given_, panel_, sums_[side_][given_]);
    }
    void hand_out_all() { hand_out(count_); }

   private:
    const Out& out_;
    alignas(64) Floats sums_[2][kTileRows][kVectors];
    int side_ = 0;
    int64_t first_row_ = 0, panel_ = 0, count_ = 0, given_ = 0;
  };

  // Some rows of x, and a panel of weights.
  template <class T, class Stored>
  struct Part {
    const T* x;
    int64_t first_row, num_rows, panel;
    const Stored* weights;
  };

  template <class F, class T, class Out>
  void multiply_rows(const typename F::Stored* panels, const T* x, int64_t rows,
                     const Out& out) const {
    constexpr bool is_by_tiles = kHasTiles && std::is_same_v<T, bf16>;
    const int64_t at_once = is_by_tiles ? tile_rows_at_once() : kRowsAtOnce;
    const int64_t parts = (rows + at_once - 1) / at_once;
    Pool::get().run_ranges(parts * num_panels, [&](int64_t first_task, int64_t last_task) {
      const auto each_part = [&](auto&& multiply_part) {
        for (int64_t task = first_task; task < last_task; ++task) {
          const int64_t index = task / num_panels, panel = task % num_panels;
          const int64_t begin = index * rows / parts, end = (index + 1) * rows / parts;
          multiply_part(Part<T, typename F::Stored>{x + begin * inputs, begin, end - begin, panel,
                                                    panels + panel * kColumns * inputs});
        }
      };
      if constexpr (is_by_tiles) {
        Tiles tiles;
        WaitingSums<Out> waiting(out);
        each_part([&](const auto& part) { multiply_by_tiles<F>(tiles, part, waiting); });
        waiting.hand_out_all();
      } else {
        each_part([&](const auto& part) { multiply_by_vectors<F>(part, out); });
      }
    });
  }

  template <class F, class T, class Out>
  void multiply_by_vectors(const Part<T, typename F::Stored>& part, const Out& out) const {
    const auto* w = part.weights;
    const auto* next = w + kColumns * inputs;
    int half = 0;
    constexpr int kUnit = kLanes * F::kStep;
    in_tiles<kVectors>(part.num_rows, [&](int64_t first, auto rows_here) {
      constexpr int height = decltype(rows_here)::value;
      Floats sums[height][kVectors] = {};
      const typename F::Stored* units[kVectors];
      // The first tile fetches its own panel ahead, the second and third the next one, half each.
      const typename F::Stored* ahead[kVectors];
      const bool is_first = first == 0;
      for (int v = 0; v < kVectors; ++v) {
        units[v] = w + v * kUnit;
        ahead[v] = is_first ? units[v] + kAheadBytes / sizeof *w : next + half * kUnit;
      }
      half += !is_first;
      multiply<F>(sums, part.x + first * inputs, inputs, units, kVectors * kUnit, inputs, ahead);
      for (int r = 0; r < height; ++r) out(part.first_row + first + r, part.panel, sums[r]);
    });
  }

  // The same with AMX. Sums are handed out late, some rows at each step of the next products, so that
  // the vectors work while the tiles do. Meanwhile what is multiplied next is brought near: with few
  // rows the panel that is read, else the next one, some of it at each step of all rows. Int8
  // weights are widened by the first rows on their way.
  template <class F, class T, class Registers, class Waiting>
  void multiply_by_tiles(Registers& tiles, const Part<T, typename F::Stored>& part,
                         Waiting& waiting) const {
    constexpr bool is_wide = std::is_same_v<typename F::Stored, T>;
    constexpr int64_t kStep = kColumns * Registers::kDepth;  // weights
    const auto* const stored = part.weights;
    const int64_t size = kColumns * inputs;
    T* wide = nullptr;
    const T* w;
    if constexpr (is_wide) {
      w = stored;
    } else {
      thread_local Scratch memory;
      w = wide = memory.get<T>(size);
    }
    constexpr int64_t kUnit = 2 * kLanes;
    const int64_t num_tiles = (part.num_rows + kTileRows - 1) / kTileRows;
    const int64_t rest = inputs % Registers::kDepth, whole = inputs - rest;
    const int64_t steps = whole / Registers::kDepth;
    constexpr int64_t kLine = 64 / sizeof *stored;
    const bool is_few = num_tiles == 1;
    const int64_t distance = is_few ? kAheadBytes / sizeof *stored : size;
    for (int64_t tile = 0, first = 0; tile < num_tiles; ++tile) {
      const int64_t height = (part.num_rows - first) / (num_tiles - tile);
      const T* x = part.x + first * inputs;
      const auto widen_step = [&](int64_t step) {
        if constexpr (!is_wide) {
          const int64_t begin = step * kStep, end = std::min(begin + kStep, size);
          for (int64_t i = begin; i < end; i += 64) widen_64(stored + i, wide + i);
        }
      };
      // This tile's part of what lies `distance` ahead, and of the sums that wait.
      const int64_t share = (size / num_tiles + kLine - 1) / kLine * kLine;
      const int64_t per_step = steps ? (share + steps * kLine - 1) / (steps * kLine) * kLine : 0;
      const auto* ahead = stored + distance + tile * share;
      const int64_t rows_per_step = waiting.share(steps);
      tiles.multiply(
          height, x, inputs, steps, kVectors,
          [&](int64_t v, int64_t step) -> Registers::Right {
            return {w + step * kStep + v * kUnit, kVectors * kUnit};
          },
          waiting.next(), kColumns,
          [&](int64_t, int64_t, int64_t step) {
            for (const auto* end = ahead + per_step; ahead < end; ahead += kLine)
              is_few ? __builtin_prefetch(ahead, 0, 3) : __builtin_prefetch(ahead, 0, 2);
            if (tile == 0) {
              if (step == 0) widen_step(0);
              widen_step(step + 1);
            }
            waiting.hand_out(rows_per_step);
          });
      if (steps == 0 && tile == 0) widen_step(0);
      waiting.hand_out_all();
      if (rest)
        for (int64_t r = 0; r < height; ++r)
          add_rest(waiting.row(r), x + r * inputs + whole, w + kColumns * whole, rest);
      waiting.wait(part.first_row + first, height, part.panel);
      first += height;
    }
  }

  // sums[v] += x W[v] over the last k.
  template <class T>
  static void add_rest(Floats (&sums)[kVectors], const T* x, const T* w, int64_t k) {
    constexpr int kUnit = kLanes * Format<T>::kStep;
    Floats row[1][kVectors];
    const T* units[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      row[0][v] = sums[v];
      units[v] = w + v * kUnit;
    }
    multiply<Format<T>>(row, x, 0, units, kVectors * kUnit, k, units);
    for (int v = 0; v < kVectors; ++v) sums[v] = row[0][v];
  }

  template <class T>
  std::vector<float> gather(const at::Tensor& values) const {
    std::vector<float> result(num_panels * kColumns);
    for (size_t i = 0; i < sources_.size(); ++i)
      if (sources_[i] >= 0) result[i] = to_float(data<T>(values)[sources_[i]]);
    return result;
  }

  // Fill a panel, one column of it, i.e. one output's weights, after the other.
  template <class T>
  void pack(int64_t panel, const T* weight) {
    for (int column = 0; column < kColumns; ++column) {
      const int64_t source = sources_[panel * kColumns + column];
      if (source < 0) continue;  // stays zero
      const T* row = weight + source * inputs;
      const int64_t first = panel * kColumns * inputs + column * Format<T>::kStep;
      if (!is_int8) {
        spread(row, data<T>(panels_) + first, [](T x) { return x; });
        continue;
      }
      float largest = 0.0f;
      for (int64_t k = 0; k < inputs; ++k)
        largest = std::max(largest, std::fabs(to_float(row[k])));
      const float step = largest / 127.0f;
      steps_[panel * kColumns + column] = step;
      spread(row, data<int8_t>(panels_) + first, [step](T x) {
        return static_cast<int8_t>(step > 0 ? std::lrint(to_float(x) / step) : 0);
      });
    }
  }

  template <class T, class Stored, class F>
  void spread(const T* row, Stored* to, F&& convert) const {
    constexpr int kStep = Format<T>::kStep;
    for (int64_t k = 0; k < inputs; k += kStep, to += kColumns * kStep)
      for (int i = 0; i < kStep; ++i) to[i] = convert(row[k + i]);
  }

  std::vector<int64_t> sources_;  // of each packed column, or -1
  at::Tensor panels_;                 // where `w` of a product lies
  std::vector<float> steps_, bias_;  // of each packed column; steps are int8's, and a bias may lack
};

}  // namespace charonia
