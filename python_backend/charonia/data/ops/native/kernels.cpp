// The bindings to Python of what computes. Must not know plans or files.
//
//   vectors.h    the processor's vectors, number formats, the inner loop of all products
//   tiles.h      the same by AMX; tile_blocks.h has sums that wait and blocks of inputs
//   check.h      what is accepted from Python
//   pool.h       threads, scratch memory; huge_pages.h asks for huge pages
//   choices.h    how products read weights, as measured
//   matrix.h     packed weights, in float32, bfloat16, int8 and W8A8; weight_memory.h is where
//                they lie
//   w8a8.h       rows rounded to int8, for products of whole numbers
//   widened.h    products in float32, where the processor has no others
//   codes.h      numbers in 8 or 4 bits: how they are rounded, and products with them
//   pages.h      how K and V lie in the pages
//   step.h       the tokens of a step and where their context lies
//   products.h   q K^T and p V of a chunk of keys; tile_products.h by AMX
//   attention.h  attention over pages
//   layer.h      the two halves of a decoder layer, all layers, the head
//   line.h       a line of logits and how a token is drawn from it
//   sampling.h   what a token is drawn with; sampling.cpp draws from many lines
//   guess.h      a draft model's passes
//   turn.h       whose turn it is to compute, and Python's lock
//   exchange.h   what ranks exchange through shared memory; exchange.cpp is how, with its binding
//
// Rule of all of these files: what is computed for one token depends on nothing but that token and
// its context, bit for bit. Each output is one sum in one order, however many rows are computed
// with it and however many threads there are; a softmax is cut at fixed positions. So batching,
// chunking, caching, preemption and speculation cannot change a result, in bfloat16 neither.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <pthread.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attention.h"
#include "check.h"
#include "choices.h"
#include "guess.h"
#include "layer.h"
#include "matrix.h"
#include "pool.h"
#include "pages.h"
#include "sampling.h"
#include "step.h"
#include "turn.h"
#include "vectors.h"

namespace charonia {

// How long an operation takes depends on these.
struct Work {
  int64_t tokens, weights;
  bool waits_for_ranks = false;

  bool is_long() const {
    return tokens >= 64 || weights >= int64_t{1} << 26 || waits_for_ranks;
  }
};

// Call f with T{} of the element type, alone. Python's lock is let go for long operations alone:
// taking it back from a busy thread can cost more than a whole step of a small model.
template <class F>
void compute(at::ScalarType type, const Work& work, F&& f) {
  if (work.is_long()) {
    const Unlocked unlocked;
    const auto turn = await_turn();
    with_type(type, f);
  } else {
    const auto turn = take_turn();
    with_type(type, f);
  }
}

using MaybeTensor = std::optional<at::Tensor>;

// What `x` adds to the stream, or nothing where the stream begins.
template <class T>
const T* added(const MaybeTensor& x) {
  return x ? data<T>(*x) : nullptr;
}

// x, where there is one, and residual are [rows, size] of a type.
void require_stream(const MaybeTensor& x, const at::Tensor& residual, at::ScalarType type,
                    int64_t size) {
  require_tensor(residual, "residual", type, {kAnySize, size});
  if (x) require_tensor(*x, "x", type, {residual.size(0), size});
}

// residual += x; return what attention contributes, in x's memory; all [tokens, hidden].
at::Tensor attend(const Attention& attention, const MaybeTensor& x, const at::Tensor& residual,
                  const Step& step, const PagesOfLayer& pages) {
  require_stream(x, residual, attention.type(), attention.hidden());
  attention.require_fit(residual.size(0), step, pages);
  auto out = x ? *x : at::empty_like(residual);
  compute(attention.type(), {residual.size(0), attention.num_weights()}, [&](auto zero) {
    using T = decltype(zero);
    attention(added<T>(x), data<T>(residual), residual.size(0), step, pages, nullptr,
              data<T>(out));
  });
  return out;
}

// residual += x; return what the MLP contributes, in x's memory; all [tokens, hidden]. As every
// sublayer it is given the step and the layer's pages, but needs neither.
at::Tensor feed_forward(const Mlp& mlp, const MaybeTensor& x, const at::Tensor& residual,
                        const pybind11::object& /*step*/, const pybind11::object& /*pages*/) {
  require_stream(x, residual, mlp.type(), mlp.hidden());
  auto out = x ? *x : at::empty_like(residual);
  compute(mlp.type(), {residual.size(0), mlp.num_weights()}, [&](auto zero) {
    using T = decltype(zero);
    mlp(added<T>(x), data<T>(residual), residual.size(0), nullptr, data<T>(out));
  });
  return out;
}

// residual += all that layers contribute but the last contribution, which is returned. Ranks wait for
// each other holding the kernels' lock, so each has a process of its own.
at::Tensor run_layers(const Layers& layers, const at::Tensor& residual, const Step& step,
                      const std::vector<PagesOfLayer>& pages) {
  at::Tensor out;
  layers.for_all_ranks([&] {
    require_tensor(residual, "residual", layers.type(), {kAnySize, layers.hidden()});
    layers.require_fit(residual.size(0), step, pages);
    out = at::empty_like(residual);
    const Work work = {residual.size(0), layers.num_weights(), layers.waits_for_ranks()};
    compute(layers.type(), work, [&](auto zero) {
      using T = decltype(zero);
      layers(data<T>(residual), residual.size(0), step, pages, data<T>(out));
    });
  });
  return out;
}

// Logits [tokens, vocabulary] float32 of x + residual [tokens, hidden].
at::Tensor logits_of(const Head& head, const at::Tensor& x, const at::Tensor& residual) {
  const at::Tensor last = x.contiguous(), stream = residual.contiguous();
  require_stream(last, stream, head.type(), head.hidden());
  auto logits = at::empty({x.size(0), head.vocabulary()}, x.options().dtype(at::kFloat));
  compute(head.type(), {x.size(0), head.num_weights()}, [&](auto zero) {
    using T = decltype(zero);
    head(static_cast<const T*>(data<T>(last)), static_cast<const T*>(data<T>(stream)), x.size(0),
         data<float>(logits));
  });
  return logits;
}

// The fields of a GuessOfRow.
using Guess = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, const Sampling*>;

void guess(const Guesser& guesser, const std::vector<Guess>& guesses, const at::Tensor& tokens,
           const at::Tensor& blocks, int64_t block_size, const std::vector<PagesOfLayer>& pages) {
  const RowTables tables = {tokens, blocks, block_size};
  std::vector<GuessOfRow> asked;
  int64_t count = 0, num_passes = 1;
  for (const Guess& one : guesses) {
    asked.push_back(std::make_from_tuple<GuessOfRow>(one));
    tables.require_fit(asked.back());
    count += asked.back().count;
    num_passes = std::max(num_passes, asked.back().num_guesses);
  }
  const Work work = {count, num_passes * guesser.num_weights(), guesser.waits_for_ranks()};
  compute(guesser.type(), work, [&](auto zero) {
    guesser.run<decltype(zero)>(asked, tables, pages);
  });
}

// x W^T + b, [rows, inputs] to [rows, outputs] of x's type or float32.
at::Tensor multiply_by(const Matrix& matrix, const at::Tensor& x, bool as_float32) {
  const at::Tensor from = x.contiguous();
  require_tensor(from, "x", matrix.type, {kAnySize, matrix.inputs});
  const auto type = as_float32 ? at::kFloat : matrix.type;
  auto y = at::empty({x.size(0), matrix.outputs}, x.options().dtype(type));
  compute(matrix.type, {x.size(0), matrix.num_weights()}, [&](auto zero) {
    using T = decltype(zero);
    if (as_float32)
      matrix.apply(data<T>(from), x.size(0), data<float>(y));
    else
      matrix.apply(data<T>(from), x.size(0), data<T>(y));
  });
  return y;
}

// The fields of a Choice.
using ChoiceFields = std::tuple<int64_t, int64_t, std::optional<int64_t>, int64_t>;

ChoiceFields fields_of(const Choice& choice) {
  return {choice.ahead_of_one, choice.ahead_of_several, choice.widened_from, choice.tiles_from};
}

void set_choice(Matrix& matrix, const ChoiceFields& fields) {
  const auto choice = std::make_from_tuple<Choice>(fields);
  choice.require_sound();
  const auto turn = take_turn();  // products read it in theirs
  matrix.choice = choice;
}

// For matrices of such weights that will be made.
void choose(at::ScalarType type, Quantization quantization, int64_t inputs,
            const ChoiceFields& fields) {
  Choices::get().set(type, quantization, inputs, std::make_from_tuple<Choice>(fields));
}

// residual += x; return its norm; all [rows, size].
at::Tensor rms_norm(const MaybeTensor& x, const at::Tensor& residual, const at::Tensor& weight,
                    float eps) {
  require(residual.dim() == 2, "residual must be [rows, size], not ", residual.sizes());
  require_stream(x, residual, residual.scalar_type(), residual.size(1));
  require_tensor(weight, "weight", residual.scalar_type(), {residual.size(1)});
  auto out = at::empty_like(residual);
  compute(residual.scalar_type(), {residual.size(0), 0}, [&](auto zero) {
    using T = decltype(zero);
    add_and_normalize<T>(data<T>(residual), added<T>(x), data<T>(weight), eps, residual.size(0),
                         residual.size(1), data<T>(out));
  });
  return out;
}

// query [tokens, heads, head_dim] to the same, over what is in the pages.
at::Tensor paged_attention(const at::Tensor& query, const Step& step, const PagesOfLayer& pages) {
  const at::Tensor from = query.contiguous();
  require(from.dim() == 3, "query must be [tokens, heads, head_dim], not ", query.sizes());
  require_tensor(from, "query", query.scalar_type(), {step.num_tokens(), kAnySize, kAnySize});
  require(pages.first.dim() > 1, "keys must be [blocks, kv_heads, ...], not ", pages.first.sizes());
  const HeadShape heads = {query.size(1), pages.first.size(1), query.size(2)};
  heads.require_sound();
  step.require_fit(query.scalar_type(), heads, pages);
  auto out = at::empty_like(from);
  compute(query.scalar_type(), {query.size(0), 0}, [&](auto zero) {
    using T = decltype(zero);
    with_pages<T>(pages, heads, [&](const auto& typed) {
      attend_over_pages<T>(step, typed, data<T>(from), query.size(1) * query.size(2),
                           query.size(1), query.size(2), data<T>(out));
    });
  });
  return out;
}

void bind_sampling(pybind11::module_& module);  // sampling.cpp
void bind_exchange(pybind11::module_& module);  // exchange.cpp

}  // namespace charonia

PYBIND11_MODULE(charonia_kernels, module) {
  namespace py = pybind11;
  using namespace charonia;
  module.attr("ISA") = kIsa;
  pthread_atfork(nullptr, nullptr, begin_anew_in_child);
  py::module_::import("atexit").attr("register")(py::cpp_function(take_last_turns));
  module.def("set_threads", [](int num_threads, const std::vector<int>& helpers_cores) {
    require(num_threads > 0, "num_threads must be positive, not ", num_threads);
    const auto turn = take_turn();
    Pool::get().resize(num_threads, helpers_cores);
  });
  module.def("phase_seconds", [] {
    std::map<std::string, double> seconds;
    for (int i = 0; i < static_cast<int>(Phase::kCount); ++i)
      seconds[kPhaseNames[i]] = phase_seconds[i];
    return seconds;
  });
  module.def("num_threads", [] { return Pool::get().num_threads(); });
  bind_sampling(module);
  bind_exchange(module);
  module.def("rms_norm", &rms_norm);
  module.def("paged_attention", &paged_attention);
  py::class_<Step>(module, "Step", py::module_local())
      .def(py::init<at::Tensor, at::Tensor, std::vector<int64_t>, std::vector<int64_t>, at::Tensor,
                    at::Tensor, at::Tensor>());
  // Packing takes seconds, in which a rank must be able to say that it lives.
  using WithoutLock = py::call_guard<Unlocked>;
  py::enum_<Quantization>(module, "Quantization", py::module_local())
      .value("none", Quantization::kNone)
      .value("int8", Quantization::kInt8)
      .value("w8a8", Quantization::kW8a8);
  const auto as_it_is = py::arg("quantization") = Quantization::kNone;
  py::class_<Matrix>(module, "Matrix", py::module_local())
      .def(py::init<const at::Tensor&, const MaybeTensor&, bool, Quantization>(), WithoutLock(),
           py::arg("weight"), py::arg("bias"), py::arg("is_paired") = false, as_it_is)
      .def_property(
          "choice", [](const Matrix& matrix) { return fields_of(matrix.choice); }, &set_choice)
      .def_property_readonly(
          "default_choice", [](const Matrix& matrix) { return fields_of(matrix.default_choice()); })
      .def_property_readonly("may_widen", &Matrix::may_widen)
      .def_property_readonly("may_do_without_tiles", &Matrix::may_do_without_tiles)
      .def("__call__", &multiply_by);
  module.attr("LEAST_WEIGHTS_TO_CHOOSE") = Choices::kLeastWeights;
  module.def("choose", &choose);
  py::class_<Norm>(module, "Norm", py::module_local()).def(py::init<at::Tensor, float>());
  py::class_<Mlp, std::shared_ptr<Mlp>>(module, "Mlp", py::module_local())
      .def(py::init<Norm, const at::Tensor&, const MaybeTensor&, const at::Tensor&,
                    const MaybeTensor&, Quantization>(),
           WithoutLock(), py::arg("norm"), py::arg("gate_up"), py::arg("gate_up_bias"),
           py::arg("down"), py::arg("down_bias"), as_it_is)
      .def("__call__", &feed_forward);
  py::class_<Attention, std::shared_ptr<Attention>>(module, "Attention", py::module_local())
      .def(py::init<Norm, const at::Tensor&, const MaybeTensor&, const at::Tensor&,
                    const MaybeTensor&, std::optional<Norm>, std::optional<Norm>, int64_t,
                    Quantization>(),
           WithoutLock(), py::arg("norm"), py::arg("qkv"), py::arg("qkv_bias"), py::arg("output"),
           py::arg("output_bias"), py::arg("query_norm"), py::arg("key_norm"),
           py::arg("head_dim"), as_it_is)
      .def("__call__", &attend);
  py::class_<Layers, std::shared_ptr<Layers>>(module, "Layers", py::module_local())
      .def(py::init<std::vector<Layers::Layer>, std::shared_ptr<Exchange>>())
      .def("__call__", &run_layers);
  py::class_<Head, std::shared_ptr<Head>>(module, "Head", py::module_local())
      .def(py::init<Norm, const at::Tensor&, const MaybeTensor&, Quantization>(), WithoutLock(),
           py::arg("norm"), py::arg("weight"), py::arg("bias"), as_it_is)
      .def("__call__", &logits_of);
  py::class_<Guesser>(module, "Guesser", py::module_local())
      .def(py::init<at::Tensor, std::shared_ptr<Layers>, std::shared_ptr<Head>, at::Tensor,
                    at::Tensor>())
      .def("__call__", &guess);
}
