// The bindings to Python of what computes. Must not know plans or files.
//
//   vectors.h    the processor's vectors, number formats, the inner loop of all products
//   tiles.h      the same by AMX
//   pool.h       threads
//   matrix.h     packed weights, in float32, bfloat16 and int8
//   attention.h  pages and attention over them
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
#include "guess.h"
#include "layer.h"
#include "matrix.h"
#include "pool.h"
#include "sampling.h"
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
  std::optional<pybind11::gil_scoped_release> released;
  if (work.is_long()) released.emplace();
  const auto turn = released ? std::unique_lock(one_at_a_time) : take_turn();
  with_type(type, f);
}

using MaybeTensor = std::optional<at::Tensor>;

// What `x` adds to the stream, or nothing where the stream begins.
template <class T>
const T* added(const MaybeTensor& x) {
  return x ? data<T>(*x) : nullptr;
}

// residual += x; return what attention contributes, in x's memory; all [tokens, hidden].
at::Tensor attend(const Attention& attention, const MaybeTensor& x, const at::Tensor& residual,
                  const Step& step, const PagesOfLayer& pages) {
  auto out = x ? *x : at::empty_like(residual);
  compute(attention.type(), {residual.size(0), attention.num_weights()}, [&](auto zero) {
    using T = decltype(zero);
    attention(added<T>(x), data<T>(residual), residual.size(0), step,
              Pages<T>(pages.first, pages.second), nullptr, data<T>(out));
  });
  return out;
}

// residual += x; return what the MLP contributes, in x's memory; all [tokens, hidden].
at::Tensor feed_forward(const Mlp& mlp, const MaybeTensor& x, const at::Tensor& residual) {
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
  auto out = at::empty_like(residual);
  const Work work = {residual.size(0), layers.num_weights(), layers.waits_for_ranks()};
  compute(residual.scalar_type(), work, [&](auto zero) {
    using T = decltype(zero);
    layers(data<T>(residual), residual.size(0), step, pages, data<T>(out));
  });
  return out;
}

// Logits [tokens, vocabulary] float32 of x + residual [tokens, hidden].
at::Tensor logits_of(const Head& head, const at::Tensor& x, const at::Tensor& residual) {
  const at::Tensor last = x.contiguous(), stream = residual.contiguous();
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
  std::vector<GuessOfRow> asked;
  int64_t count = 0, num_passes = 1;
  for (const Guess& one : guesses) {
    asked.push_back(std::make_from_tuple<GuessOfRow>(one));
    count += asked.back().count;
    num_passes = std::max(num_passes, asked.back().num_guesses);
  }
  const Work work = {count, num_passes * guesser.num_weights(), guesser.waits_for_ranks()};
  compute(guesser.type(), work, [&](auto zero) {
    guesser.run<decltype(zero)>(asked, {tokens, blocks, block_size}, pages);
  });
}

// x W^T + b, [rows, inputs] to [rows, outputs] of x's type or float32.
at::Tensor multiply_by(const Matrix& matrix, const at::Tensor& x, bool as_float32) {
  const at::Tensor from = x.contiguous();
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

// residual += x; return its norm; all [rows, size].
at::Tensor rms_norm(const MaybeTensor& x, const at::Tensor& residual, const at::Tensor& weight,
                    float eps) {
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
  auto out = at::empty_like(from);
  compute(query.scalar_type(), {query.size(0), 0}, [&](auto zero) {
    using T = decltype(zero);
    AttentionOverPages<T>(step, Pages<T>(pages.first, pages.second), data<T>(from),
                          query.size(1) * query.size(2), query.size(1), query.size(2),
                          data<T>(out))
        .run();
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
  module.def("set_threads", [](int num_threads, const std::vector<int>& helpers_cores) {
    const std::lock_guard guard(one_at_a_time);
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
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<Matrix>(module, "Matrix", py::module_local())
      .def(py::init<const at::Tensor&, const MaybeTensor&, bool, bool>(), Unlocked())
      .def("__call__", &multiply_by);
  py::class_<Norm>(module, "Norm", py::module_local()).def(py::init<at::Tensor, float>());
  py::class_<Mlp, std::shared_ptr<Mlp>>(module, "Mlp", py::module_local())
      .def(py::init<Norm, const at::Tensor&, const MaybeTensor&, const at::Tensor&,
                    const MaybeTensor&, bool>(),
           Unlocked())
      .def("__call__", &feed_forward);
  py::class_<Attention, std::shared_ptr<Attention>>(module, "Attention", py::module_local())
      .def(py::init<Norm, const at::Tensor&, const MaybeTensor&, const at::Tensor&,
                    const MaybeTensor&, std::optional<Norm>, std::optional<Norm>, int64_t, bool>(),
           Unlocked())
      .def("__call__", &attend);
  py::class_<Layers, std::shared_ptr<Layers>>(module, "Layers", py::module_local())
      .def(py::init<std::vector<Layers::Layer>, std::shared_ptr<Exchange>>())
      .def("__call__", &run_layers);
  py::class_<Head, std::shared_ptr<Head>>(module, "Head", py::module_local())
      .def(py::init<Norm, const at::Tensor&, const MaybeTensor&, bool>(), Unlocked())
      .def("__call__", &logits_of);
  py::class_<Guesser>(module, "Guesser", py::module_local())
      .def(py::init<at::Tensor, std::shared_ptr<Layers>, std::shared_ptr<Head>, at::Tensor,
                    at::Tensor>())
      .def("__call__", &guess);
}
