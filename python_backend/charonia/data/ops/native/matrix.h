// Packed weights and products with them. Must not know layers.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "check.h"
#include "choices.h"
#include "pool.h"
#include "tile_blocks.h"
#include "tiles.h"
#include "vectors.h"
#include "w8a8.h"
#include "weight_memory.h"
#include "widened.h"

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

// W [outputs, inputs], packed in panels of kColumns outputs that are read front to back:
//
//   panels   [panel][inputs / kStep][kVectors] units
//
// For W8A8 inputs are filled up with zeros; see Groups.
//
// A paired matrix has gate in the first vector of a panel and up in the second: its first half
// of outputs and its second half side by side.
class Matrix {
 public:
  // weight: [outputs, inputs]; bias: [outputs]. Raises where inputs is odd, or outputs of a pair.
  Matrix(const at::Tensor& weight, const std::optional<at::Tensor>& bias, bool is_paired,
         Quantization quantization)
      : outputs(checked(weight).size(0)), inputs(weight.size(1)), type(weight.scalar_type()),
        quantization(quantization), choice(chosen()), groups_(inputs) {
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
    if (quantization != Quantization::kNone) steps_.resize(num_panels * kColumns);
    with_type(type, [&](auto zero) {
      using T = decltype(zero);
      if (bias) bias_ = gather<T>(*bias);
      panels_ = WeightMemory::zeros(num_panels * kColumns * depth(), type_of_panels());
      const std::lock_guard guard(one_at_a_time);
      Pool::get().run(num_panels, [&](int64_t panel) { pack<T>(panel, data<T>(weight)); });
    });
  }

  int64_t num_weights() const { return outputs * inputs; }

  // Whether a panel's weights may be widened once for many rows.
  bool may_widen() const {
    bool result = false;
    with_format([&](auto format) { result = kIsWidenedOnce<decltype(format)>; });
    return result;
  }

  // Whether products may be by vectors where they usually are by tiles. Those of whole numbers may:
  // their sums are exact.
  bool may_do_without_tiles() const { return kHasTiles && quantization == Quantization::kW8a8; }

  // Where nothing was measured.
  Choice default_choice() const {
    Choice result = {kAheadBytes, kAheadBytes, std::nullopt};
    with_format([&](auto format) { result.widened_from = widened_once_from<decltype(format)>(); });
    return result;
  }

  // Call out(row, panel, sums) for every row of x [rows, inputs] and panel of outputs, with sums
  // an array of kVectors vectors that lacks scale and bias; see `finish`.
  template <class T, class Out>
  void multiply_rows(const T* x, int64_t rows, const Out& out) const {
    if (quantization == Quantization::kW8a8)
      multiply_wholes(x, rows, out);
    else if (quantization == Quantization::kInt8)
      multiply_numbers<Int8<T>>(x, rows, out);
    else
      multiply_numbers<Format<T>>(x, rows, out);
  }

  // Apply scale and bias to vector v of a panel's sums.
  Floats finish(Floats sums, int64_t panel, int v) const {
    const int64_t column = panel * kColumns + v * kLanes;
    if (quantization != Quantization::kNone) sums = alone(sums * load<Floats>(steps_.data() + column));
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
  const Quantization quantization;
  Choice choice;
  int64_t num_panels;

 private:
  static const at::Tensor& checked(const at::Tensor& weight) {
    with_type(weight.scalar_type(), [](auto) {});
    require_tensor(weight, "weight", weight.scalar_type(), {kAnySize, kAnySize});
    require(weight.numel() > 0, "weight must not be empty, and is ", weight.sizes());
    return weight;
  }

  static constexpr int64_t kRowsAtOnce = 192;  // of x, so that they stay in the cache
  static constexpr int64_t kWideRows = 4 * kRowsAtOnce;  // rows of x that are widened at a time
  static constexpr int64_t kWideDepth = 1024;  // inputs whose weights are widened at a time
  static constexpr int64_t kNeverWidened = std::numeric_limits<int64_t>::max();  // rows

  // With AMX: so many bytes of x, half of the second-level cache. Where these are few rows, because
  // they are long, more rows and some panels take turns with a block of the inputs.
  static constexpr int64_t kBytesAtOnce = 1 << 20;
  static constexpr int64_t kFewestRowsAtOnce = 256, kRowsOfLong = 384, kPanelsOfLong = 16;
  static constexpr int64_t kInputsOfBlock = 640;  // their weights stay in the first-level cache

  // Call f with a value of the format of weights.
  template <class F>
  void with_format(F&& f) const {
    with_type(type, [&](auto zero) {
      using T = decltype(zero);
      if (quantization == Quantization::kW8a8)
        f(WholeFormat{});
      else if (quantization == Quantization::kInt8)
        f(Int8<T>{});
      else
        f(Format<T>{});
    });
  }

  // What was chosen for such matrices.
  Choice chosen() const {
    if (num_weights() >= Choices::kLeastWeights)
      if (const auto known = Choices::get().of(type, quantization, inputs)) return *known;
    return default_choice();
  }

  // Weights stored of each output.
  int64_t depth() const {
    return quantization == Quantization::kW8a8 ? groups_.filled() : inputs;
  }

  at::ScalarType type_of_panels() const {
    return quantization == Quantization::kW8a8   ? at::kByte
           : quantization == Quantization::kInt8 ? at::kChar
                                                 : type;
  }

  // Some rows of x [num_rows][depth], and some panels of weights.
  template <class F>
  struct Part {
    const typename F::Input* x;
    int64_t first_row, num_rows, panel, num_panels;
    const typename F::Stored* weights;
  };

  // How inputs are cut for products of format F: into one group, known at compile time, or several.
  template <class F>
  int64_t num_groups() const {
    if constexpr (std::is_same_v<F, WholeFormat>)
      return groups_.count;
    else
      return 1;
  }
  template <class F>
  int64_t begin_of(int64_t group) const {
    if constexpr (std::is_same_v<F, WholeFormat>)
      return groups_.begin(group);
    else
      return group ? inputs : 0;
  }

  // out(row, panel, sums) for every row of x [rows, inputs] and panel.
  template <class F, class T, class Out>
  void multiply_numbers(const T* x, int64_t rows, const Out& out) const {
    if constexpr (std::is_same_v<T, typename F::Input>) {
      multiply_from<F>(0, x, rows, out);
    } else {
      const int64_t blocks = (rows + kWideRows - 1) / kWideRows;
      for (int64_t i = 0; i < blocks; ++i) {
        const int64_t first = i * rows / blocks, count = (i + 1) * rows / blocks - first;
        multiply_from<F>(first, widened_rows(x + first * inputs, count), count, out);
      }
    }
  }

  // The same for x [count, inputs], rows from `first` on.
  template <class F, class Out>
  void multiply_from(int64_t first, const typename F::Input* x, int64_t count,
                     const Out& out) const {
    const auto take = [first, &out](int64_t row, int64_t panel, int64_t, const Floats* sums) {
      out(first + row, panel, sums);
    };
    multiply_parts<F>(x, count, [&](const auto& f) { f(take); });
  }

  // The same by whole numbers. Those of a group are summed up exactly, the groups in order.
  template <class T, class Out>
  void multiply_wholes(const T* x, int64_t rows, const Out& out) const {
    using Sum = WholeFormat::Sum;
    const WholeRows wholes = rounded_rows(x, rows);
    const auto add_up = [&](const auto& f) {
      // At least as many as are multiplied before their next group.
      constexpr uint64_t kTotals = kIsWidenedOnce<WholeFormat> ? 256 : kTileRows;
      static_assert(kTotals >= (kIsWidenedOnce<WholeFormat> ? kRowsAtOnce : kSums / kVectors));
      Floats totals[kTotals][kVectors];
      f([&](int64_t row, int64_t panel, int64_t group,
            const Sum* sums) __attribute__((always_inline)) {
        Floats(&total)[kVectors] = totals[static_cast<uint64_t>(row) % kTotals];
        const int64_t at = row * groups_.count + group;
        for (int v = 0; v < kVectors; ++v) {
          const Floats added = alone(of_numbers(sums[v], wholes.less[at]) * wholes.steps[at]);
          total[v] = group ? total[v] + added : added;
        }
        if (group + 1 == groups_.count) out(row, panel, total);
      });
    };
    multiply_parts<WholeFormat>(wholes.numbers, rows, add_up);
  }

  // x [rows, inputs] in float32.
  const float* widened_rows(const bf16* x, int64_t rows) const {
    float* const wide = scratch.rows.get<float>(rows * inputs);
    for_rows(rows, [&](int64_t row) { widen_all(x + row * inputs, inputs, wide + row * inputs); });
    return wide;
  }

  template <class T>
  WholeRows rounded_rows(const T* x, int64_t rows) const {
    const int64_t groups = rows * groups_.count;
    const WholeRows wholes = {scratch.numbers.get<WholeFormat::Input>(rows * groups_.filled()),
                              scratch.steps.get<float>(groups), scratch.less.get<int32_t>(groups)};
    const auto some = [&](int64_t row, int64_t end) {
      for (; row < end; ++row)
        round_row(x + row * inputs, inputs, groups_, wholes.from(row, groups_));
    };
    if (is_worth_sharing(groups))
      Pool::get().run_ranges(rows, some);
    else
      some(0, rows);
    return wholes;
  }

  // Cut rows of x and panels into parts, and share these out. Each thread calls begin(f), which calls
  // f(out), and gives out(row, panel, group, sums) for its parts; a row's groups are in order.
  template <class F, class Begin>
  void multiply_parts(const typename F::Input* x, int64_t rows, const Begin& begin) const {
    using Input = typename F::Input;
    constexpr bool is_by_tiles =
        kHasTiles && (std::is_same_v<Input, bf16> || std::is_same_v<Input, Digit>);
    const int64_t depth = this->depth();
    constexpr bool is_whole = std::is_same_v<F, WholeFormat>;
    const bool by_tiles = is_by_tiles && (!is_whole || rows >= choice.tiles_from);
    const auto [at_once, together] = by_tiles ? tiles_at_once<F>() : AtOnce{kRowsAtOnce, 1};
    const int64_t parts = (rows + at_once - 1) / at_once;
    const auto* const panels = data<typename F::Stored>(panels_);
    Pool::get().run_ranges(parts * num_panels, [&](int64_t first_task, int64_t last_task) {
      const auto each_part = [&](auto&& multiply_part) {
        for (int64_t task = first_task, count = 0; task < last_task; task += count) {
          const int64_t index = task / num_panels, panel = task % num_panels;
          const int64_t first = index * rows / parts, end = (index + 1) * rows / parts;
          count = end - first > kTileRows ? std::min(together, num_panels - panel) : 1;
          count = std::min(count, last_task - task);
          multiply_part(Part<F>{x + first * depth, first, end - first, panel, count,
                                panels + panel * kColumns * depth});
        }
      };
      begin([&](const auto& out) {
        if constexpr (is_by_tiles)
          if (by_tiles) {
            Tiles tiles;
            WaitingSums<typename F::Sum, std::decay_t<decltype(out)>> waiting(out);
            each_part([&](const auto& part) { multiply_by_tiles<F>(tiles, part, waiting); });
            return waiting.hand_out_all();
          }
        if constexpr (!is_by_tiles || is_whole)
          each_part([&](const auto& part) {
            if constexpr (kIsWidenedOnce<F>)
              if (part.num_rows >= choice.widened_from.value_or(kNeverWidened))
                return multiply_widened<F>(part, out);
            multiply_by_vectors<F>(part, out);
          });
      });
    });
  }

  struct AtOnce {
    int64_t rows, panels;
  };
  template <class F>
  AtOnce tiles_at_once() const {
    constexpr int64_t kBytes = sizeof(typename F::Input);
    const int64_t rows = kBytesAtOnce / (depth() * kBytes) / kTileRows * kTileRows;
    // Whole numbers are cut into groups, and not into blocks, too.
    constexpr bool is_whole = std::is_same_v<F, WholeFormat>;
    if (rows < kFewestRowsAtOnce && !is_whole) return {kRowsOfLong, kPanelsOfLong};
    return {std::max(rows, 4 * kTileRows), 1};
  }

  template <class F, class Out>
  void multiply_by_vectors(const Part<F>& part, const Out& out) const {
    const auto* w = part.weights;
    const int64_t depth = this->depth();
    const auto* next = w + kColumns * depth;
    const int64_t distance = choice.ahead(part.num_rows) / static_cast<int64_t>(sizeof *w);
    int half = 0;
    constexpr int kUnit = kLanes * F::kStored;
    in_tiles<kSumsOf<F> / kVectors>(part.num_rows, [&](int64_t first, auto rows_here) {
      constexpr int height = decltype(rows_here)::value;
      const typename F::Stored* units[kVectors];
      // The first tile fetches its own panel ahead, the second and third the next one, half each.
      const typename F::Stored* ahead[kVectors];
      const bool is_first = first == 0;
      for (int v = 0; v < kVectors; ++v) {
        units[v] = w + v * kUnit;
        ahead[v] = is_first ? units[v] + distance : next + half * kUnit;
      }
      half += !is_first;
      for (int64_t group = 0; group < num_groups<F>(); ++group) {
        const int64_t k = begin_of<F>(group), size = begin_of<F>(group + 1) - k;
        typename F::Sum sums[height][kVectors] = {};
        multiply<F>(sums, part.x + first * depth + k, depth, units, kVectors * kUnit, size, ahead);
        for (int v = 0; v < kVectors; ++v) {
          units[v] += kColumns * size;
          ahead[v] += kColumns * size;
        }
        for (int r = 0; r < height; ++r)
          out(part.first_row + first + r, part.panel, group, sums[r]);
      }
    });
  }

  // The same with weights that are widened once for all rows, some inputs after the others.
  template <class F, class Out>
  void multiply_widened(const Part<F>& part, const Out& out) const {
    const int64_t depth = this->depth();
    float* const wide = widened_memory.panel.get<float>(kWideDepth * kColumns);
    auto* const sums = reinterpret_cast<Floats(*)[kVectors]>(
        widened_memory.sums.get<float>(part.num_rows * kColumns));
    for (int64_t group = 0; group < num_groups<F>(); ++group) {
      const int64_t begin = begin_of<F>(group), end = begin_of<F>(group + 1);
      for (int64_t k = begin; k < end; k += kWideDepth) {
        const int64_t size = std::min(kWideDepth, end - k);
        widen_panel<F>(part.weights + k * kColumns, size, wide);
        in_tiles<kFloatSums / kVectors>(part.num_rows, [&](int64_t first, auto rows_here) {
          multiply_floats<decltype(rows_here)::value>(
              sums + first, k == begin, part.x + first * depth + k, depth, wide, size);
        });
      }
      for (int64_t r = 0; r < part.num_rows; ++r)
        out(part.first_row + r, part.panel, group, sums[r]);
    }
  }

  // The same with AMX, and with several panels. Sums are handed out late, some rows at each step of
  // the next products, so that the vectors work while the tiles do. Meanwhile what is multiplied
  // next is brought near.
  //
  // Up to sixteen rows wait for memory, and all goes to the first-level cache. Of up to thirty-two,
  // rows stay in it, and weights pass it. Of more, a panel's weights stay in it as far as they can,
  // and rows pass it. Where too few rows stay in the second-level cache, all of them are multiplied
  // with a block of inputs before the next block, and sums are kept meanwhile.
  template <class F, class Registers, class Waiting>
  void multiply_by_tiles(Registers& tiles, const Part<F>& part, Waiting& waiting) const {
    static_assert(kTileRows == 2 * Registers::kRows);
    using Passing = typename Registers::Passing;
    if (part.num_rows <= kTileRows / 2)
      return multiply_block<F, Passing::kNeither>(tiles, part, waiting, InputBlock{});
    if (part.num_rows <= kTileRows)
      return multiply_block<F, Passing::kColumns>(tiles, part, waiting, InputBlock{});
    InputBlock block;
    if (tiles_at_once<F>().panels > 1) block.count = (inputs + kInputsOfBlock - 1) / kInputsOfBlock;
    for (; block.index < block.count; ++block.index)
      for (block.panel = 0; block.panel < part.num_panels; ++block.panel)
        multiply_block<F, Passing::kRows>(tiles, part, waiting, block);
  }

  // Int8 weights that are to be widened are so by the first rows on their way.
  template <class F, auto kPassing, class Registers, class Waiting>
  void multiply_block(Registers& tiles, const Part<F>& part, Waiting& waiting,
                      const InputBlock& block) const {
    using Input = typename F::Input;
    using Stored = typename F::Stored;
    constexpr bool is_many = kPassing == Registers::Passing::kRows;
    constexpr int kCache = kPassing == Registers::Passing::kNeither ? 3 : 2;  // or of which level
    constexpr bool is_widened = std::is_same_v<Stored, int8_t>;
    constexpr auto kPass = !is_many && is_widened ? Registers::Passing::kNeither : kPassing;
    using Weight = std::conditional_t<is_widened, Input, Stored>;
    constexpr int64_t kDepth = Registers::template kDepth<Input>;
    constexpr int64_t kStep = kColumns * kDepth;  // weights
    constexpr int64_t kUnit = kLanes * F::kStored;
    const int64_t depth = this->depth(), panel_size = kColumns * depth;
    const int64_t rest = depth % kDepth, whole = depth - rest, all_steps = whole / kDepth;
    const int64_t begin = block.begin(all_steps), end = block.end(all_steps);
    const int64_t size_of_sums = part.num_rows * kColumns;
    const Stored* const stored = part.weights + block.panel * panel_size;
    Input* wide = nullptr;
    const Weight* w;
    if constexpr (is_widened) {
      w = wide = tile_memory.wide.get<Input>(panel_size);
    } else {
      w = stored;
    }
    const auto widen_step = [&](int64_t step) {
      if constexpr (is_widened) {
        const int64_t from = step * kStep, to = std::min(from + kStep, panel_size);
        for (int64_t i = from; i < to; i += 64) widen_64(stored + i, wide + i);
      }
    };
    typename Waiting::Number* kept = nullptr;  // of the rows of this panel
    if (block.count > 1)
      kept = tile_memory.sums.get<typename Waiting::Number>(part.num_panels * size_of_sums) +
             block.panel * size_of_sums;

    const int64_t num_tiles = (part.num_rows + kTileRows - 1) / kTileRows;
    const Stored* ahead;
    if (!is_many)
      ahead = stored + choice.ahead(part.num_rows) / static_cast<int64_t>(sizeof *stored);
    else if (block.panel + 1 < part.num_panels)
      ahead = stored + panel_size + begin * kStep;
    else  // the next block of the first panel, or the panel behind the last
      ahead = block.is_last() ? stored + panel_size : part.weights + end * kStep;
    // With few rows some before a step's products, which wait for memory; with many beside each.
    Bringing bringing(ahead, (end - begin) * kStep, num_tiles * (end - begin) * (is_many ? 4 : 1));
    for (int64_t tile = 0, first = 0; tile < num_tiles; ++tile) {
      const int64_t height = (part.num_rows - first) / (num_tiles - tile);
      for (int64_t group = 0; group < num_groups<F>(); ++group) {
        const int64_t k = begin_of<F>(group), size = begin_of<F>(group + 1) - k;
        const int64_t from = block.count > 1 ? begin : 0;
        const int64_t steps = block.count > 1 ? end - begin : size / kDepth;
        const int64_t rows_per_step = waiting.share(steps);
        const Input* const x = part.x + first * depth + k;
        const Weight* const its = w + kColumns * k;
        auto* const own = kept ? kept + first * kColumns : nullptr;
        tiles.template multiply<kPass>(
            height, x + from * kDepth, depth, steps, kVectors,
            [&](int64_t v, int64_t step) -> typename Registers::template Right<Weight> {
              return {its + (from + step) * kStep + v * kUnit, kVectors * kUnit};
            },
            block.index ? own : nullptr, block.is_last() ? waiting.next() : own, kColumns,
            [&](int64_t, int64_t, int64_t step) {
              if (tile == 0) {
                if (step == 0) widen_step(from);
                if (step + 1 < steps) widen_step(from + step + 1);
              }
              if constexpr (!is_many) bringing.template some<kCache>();
              waiting.hand_out(rows_per_step);
            },
            [&] {
              if constexpr (is_many) bringing.template some<kCache>();
            });
        if (!block.is_last()) continue;
        if constexpr (is_widened)
          if (rest && tile == 0) widen_step(all_steps);
        waiting.hand_out_all();
        if constexpr (std::is_same_v<Input, Weight>)
          if (rest)
            for (int64_t r = 0; r < height; ++r)
              add_rest(waiting.row(r), x + r * depth + whole, its + kColumns * whole, rest);
        waiting.wait(part.first_row + first, height, part.panel + block.panel, group);
      }
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
      const int64_t first = panel * kColumns * depth();
      constexpr int kStep = Format<T>::kStep;
      if (quantization == Quantization::kNone) {
        spread<kStep>(row, data<T>(panels_) + first, column, [](T x) { return x; });
        continue;
      }
      float largest = 0.0f;  // NaN where a weight is, which would be a whole number like others
      for (int64_t k = 0; k < inputs; ++k) {
        const float size = std::fabs(to_float(row[k]));
        if (size > largest || std::isnan(size)) largest = size;
      }
      const float step = largest / 127.0f;
      steps_[panel * kColumns + column] = step;
      const auto whole = [step](T x) -> int64_t {
        return step > 0 ? std::lrint(to_float(x) / step) : 0;
      };
      if (quantization == Quantization::kInt8)
        spread<kStep>(row, data<int8_t>(panels_) + first, column,
                      [&](T x) { return static_cast<int8_t>(whole(x)); });
      else
        spread<WholeFormat::kStep>(
            row, data<uint8_t>(panels_) + first, column,
            [&](T x) { return static_cast<uint8_t>(whole(x) + Int8Code::kBias); });
    }
  }

  // Put an output's weights into its column of a panel, kStep of them side by side.
  template <int kStep, class T, class Stored, class F>
  void spread(const T* row, Stored* panel, int column, F&& convert) const {
    Stored* to = panel + column * kStep;
    for (int64_t k = 0; k < inputs; k += kStep, to += kColumns * kStep)
      for (int64_t i = 0; i < std::min<int64_t>(kStep, inputs - k); ++i)
        to[i] = convert(row[k + i]);
  }

  const Groups groups_;              // of inputs, for W8A8
  std::vector<int64_t> sources_;     // of each packed column, or -1
  at::Tensor panels_;                // where `w` of a product lies
  std::vector<float> steps_, bias_;  // of each packed column, or none
};

}  // namespace charonia
