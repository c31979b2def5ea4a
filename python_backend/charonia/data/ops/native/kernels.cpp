// The two halves of a decoder layer on a CPU, and the bindings to Python. Must not know plans, files
// or sampling.
//
//   vectors.h    the processor's vectors, number formats, the inner loop of all products
//   pool.h       threads
//   matrix.h     packed weights, in float32, bfloat16 and int8
//   attention.h  pages and attention over them
//   sampling.cpp drawing tokens
//
// Rule of all of these files: what is computed for one token depends on nothing but that token and
// its context, bit for bit. Each output is one sum in one order, however many rows are computed
// with it and however many threads there are; a softmax is cut at fixed positions. So batching,
// chunking, caching, preemption and speculation cannot change a result, in bfloat16 neither.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "attention.h"
#include "matrix.h"
#include "pool.h"
#include "vectors.h"

namespace charonia {

// ------------------------------------------------------------------------------- row by row

// to = x / rms(x) * weight (Zhang, Sennrich 2019, arXiv 1910.07467) over `size` numbers.
template <class T>
void normalize(const T* x, const T* weight, float eps, int64_t size, T* to) {
  Floats squares = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Floats v = widen(x + i);
    squares += v * v;
  }
  float total = sum(squares);
  for (int64_t j = i; j < size; ++j) total += to_float(x[j]) * to_float(x[j]);
  const float factor = 1.0f / std::sqrt(total / static_cast<float>(size) + eps);
  for (i = 0; i + kLanes <= size; i += kLanes)
    narrow(to + i, widen(x + i) * factor * widen(weight + i));
  for (; i < size; ++i) to[i] = rounded<T>(to_float(x[i]) * factor * to_float(weight[i]));
}

template <class T>
void add(T* to, const T* x, int64_t size) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) narrow(to + i, widen(to + i) + widen(x + i));
  for (; i < size; ++i) to[i] = rounded<T>(to_float(to[i]) + to_float(x[i]));
}

// residual += x (where there is one), to = norm(residual); all [rows, size].
template <class T>
void add_and_normalize(T* residual, const T* x, const T* weight, float eps, int64_t rows,
                       int64_t size, T* to) {
  const Timed timed(Phase::kNorm);
  for_rows(rows, [&](int64_t row) {
    if (x) add(residual + row * size, x + row * size, size);
    normalize(residual + row * size, weight, eps, size, to + row * size);
  });
}

// Rotate a head in place, its first half against its second (Su et al. 2021, arXiv 2104.09864).
template <class T>
void rotate(T* head, const T* cos, const T* sin, int64_t half) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Floats a = widen(head + i), b = widen(head + half + i);
    const Floats c = widen(cos + i), s = widen(sin + i);
    narrow(head + i, a * c - b * s);
    narrow(head + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = to_float(head[i]), b = to_float(head[half + i]);
    const float c = to_float(cos[i]), s = to_float(sin[i]);
    head[i] = rounded<T>(a * c - b * s);
    head[half + i] = rounded<T>(b * c + a * s);
  }
}

// ----------------------------------------------------------------------------------- blocks

// Python's lock is let go for long operations alone: taking it back from a busy thread can cost
// more than a whole step of few tokens.
template <class F>
void exclusively(int64_t tokens, F&& f) {
  std::optional<pybind11::gil_scoped_release> released;
  if (tokens >= 64) released.emplace();
  const std::lock_guard guard(one_at_a_time);
  f();
}

template <class F>
void timed(Phase phase, F&& f) {
  const Timed timer(phase);
  f();
}

class Linear {
 public:
  Linear(const at::Tensor& weight, const std::optional<at::Tensor>& bias, bool is_int8)
      : matrix_(weight, bias, false, is_int8) {}

  // x [rows, inputs] to [rows, outputs], of x's type or float32.
  at::Tensor operator()(const at::Tensor& x, bool as_float32) const {
    const at::Tensor from = x.contiguous();
    const auto type = as_float32 ? at::kFloat : matrix_.type;
    auto y = at::empty({x.size(0), matrix_.outputs}, x.options().dtype(type));
    exclusively(x.size(0), [&] {
      const Timed timed(Phase::kHead);
      with_type(matrix_.type, [&](auto zero) {
        using T = decltype(zero);
        if (as_float32)
          matrix_.apply(data<T>(from), x.size(0), data<float>(y));
        else
          matrix_.apply(data<T>(from), x.size(0), data<T>(y));
      });
    });
    return y;
  }

 private:
  Matrix matrix_;
};

// RMSNorm: its weight [size] and epsilon.
struct Norm {
  at::Tensor weight;
  float eps;
};

// `x` as memory to write a block's contribution to: itself, or anew where the stream begins.
at::Tensor output_for(const std::optional<at::Tensor>& x, const at::Tensor& residual) {
  return x ? *x : at::empty_like(residual);
}

class Mlp {
 public:
  Mlp(Norm norm, const at::Tensor& gate_up, const std::optional<at::Tensor>& bias,
      const at::Tensor& down, const std::optional<at::Tensor>& down_bias, bool is_int8)
      : norm_(std::move(norm)), gate_up_(gate_up, bias, true, is_int8),
        down_(down, down_bias, false, is_int8) {}

  // residual += x; return down(silu(gate) * up) of its norm, in x's memory; all [tokens, hidden].
  at::Tensor operator()(const std::optional<at::Tensor>& x, const at::Tensor& residual) const {
    auto out = output_for(x, residual);
    const int64_t rows = residual.size(0);
    exclusively(rows, [&] {
      with_type(gate_up_.type, [&](auto zero) {
        using T = decltype(zero);
        T* normed = scratch.normed.get<T>(rows * gate_up_.inputs);
        T* inner = scratch.inner.get<T>(rows * down_.inputs);
        add_and_normalize<T>(data<T>(residual), x ? data<T>(*x) : nullptr, data<T>(norm_.weight),
                             norm_.eps, rows, gate_up_.inputs, normed);
        timed(Phase::kGateUp, [&] { gate_and_multiply(normed, rows, inner); });
        timed(Phase::kDown, [&] { down_.apply(inner, rows, data<T>(out)); });
      });
    });
    return out;
  }

 private:
  // to [rows, inner size] = silu(gate) * up of x [rows, hidden].
  template <class T>
  void gate_and_multiply(const T* x, int64_t rows, T* to) const {
    const int64_t size = down_.inputs;
    gate_up_.multiply_rows(x, rows, [&](int64_t row, int64_t panel, const Floats* sums) {
      const Floats gate = gate_up_.finish(sums[0], panel, 0);
      const Floats up = gate_up_.finish(sums[1], panel, 1);
      const int64_t column = panel * kLanes;
      narrow_some(to + row * size + column, gate / (exp(-gate) + 1.0f) * up, size - column);
    });
  }

  Norm norm_;
  Matrix gate_up_, down_;
};

class Attention {
 public:
  Attention(Norm norm, const at::Tensor& qkv, const std::optional<at::Tensor>& qkv_bias,
            const at::Tensor& output, const std::optional<at::Tensor>& output_bias,
            std::optional<Norm> query_norm, std::optional<Norm> key_norm, int64_t head_dim,
            bool is_int8)
      : norm_(std::move(norm)), qkv_(qkv, qkv_bias, false, is_int8),
        output_(output, output_bias, false, is_int8), query_norm_(std::move(query_norm)),
        key_norm_(std::move(key_norm)), head_dim_(head_dim) {}

  // residual += x; store K and V of its norm, attend; in x's memory; all [tokens, hidden].
  at::Tensor operator()(const std::optional<at::Tensor>& x, const at::Tensor& residual,
                        const Step& step, const at::Tensor& keys, const at::Tensor& values) const {
    auto out = output_for(x, residual);
    const int64_t rows = residual.size(0);
    exclusively(rows, [&] {
      with_type(qkv_.type, [&](auto zero) {
        using T = decltype(zero);
        T* normed = scratch.normed.get<T>(rows * std::max(qkv_.inputs, output_.inputs));
        T* qkv = scratch.wide.get<T>(rows * qkv_.outputs);
        add_and_normalize<T>(data<T>(residual), x ? data<T>(*x) : nullptr, data<T>(norm_.weight),
                             norm_.eps, rows, qkv_.inputs, normed);
        timed(Phase::kQkv, [&] { qkv_.apply(normed, rows, qkv); });
        const Pages<T> pages(keys, values);
        timed(Phase::kRope, [&] { rotate_and_write<T>(qkv, rows, step, pages); });
        const int64_t heads = output_.inputs / head_dim_;
        timed(Phase::kAttention, [&] {
          AttentionOverPages<T>(step, pages, qkv, qkv_.outputs, heads, head_dim_, normed).run();
        });
        timed(Phase::kOutput, [&] { output_.apply(normed, rows, data<T>(out)); });
      });
    });
    return out;
  }

 private:
  template <class T>
  void rotate_and_write(T* qkv, int64_t rows, const Step& step, const Pages<T>& pages) const {
    const int64_t half = head_dim_ / 2, heads = output_.inputs / head_dim_;
    for_rows(rows, [&](int64_t row) {
      const int64_t position = data<int64_t>(step.positions)[row];
      const T* cos = data<T>(step.cos) + position * half;
      const T* sin = data<T>(step.sin) + position * half;
      T* const first = qkv + row * qkv_.outputs;
      for (int64_t head = 0; head < heads + pages.kv_heads; ++head) {
        T* const at = first + head * head_dim_;
        const auto& norm = head < heads ? query_norm_ : key_norm_;
        if (norm) normalize(at, data<T>(norm->weight), norm->eps, head_dim_, at);
        rotate(at, cos, sin, half);
      }
      const int64_t slot = data<int64_t>(step.slots)[row];
      for (int64_t head = 0; head < pages.kv_heads; ++head) {
        const T* key = first + (heads + head) * head_dim_;
        pages.write(slot, head, key, key + pages.kv_heads * head_dim_, head_dim_);
      }
    });
  }

  Norm norm_;
  Matrix qkv_, output_;
  std::optional<Norm> query_norm_, key_norm_;
  int64_t head_dim_;
};

// residual += x; return its norm; all [rows, size].
at::Tensor rms_norm(const std::optional<at::Tensor>& x, const at::Tensor& residual,
                    const at::Tensor& weight, float eps) {
  auto out = at::empty_like(residual);
  exclusively(residual.size(0), [&] {
    with_type(residual.scalar_type(), [&](auto zero) {
      using T = decltype(zero);
      add_and_normalize<T>(data<T>(residual), x ? data<T>(*x) : nullptr, data<T>(weight), eps,
                           residual.size(0), residual.size(1), data<T>(out));
    });
  });
  return out;
}

// query [tokens, heads, head_dim] to the same, over what is in the pages.
at::Tensor paged_attention(const at::Tensor& query, const Step& step, const at::Tensor& keys,
                           const at::Tensor& values) {
  const at::Tensor from = query.contiguous();
  auto out = at::empty_like(from);
  exclusively(query.size(0), [&] {
    with_type(query.scalar_type(), [&](auto zero) {
      using T = decltype(zero);
      AttentionOverPages<T>(step, Pages<T>(keys, values), data<T>(from),
                            query.size(1) * query.size(2), query.size(1), query.size(2),
                            data<T>(out))
          .run();
    });
  });
  return out;
}

void bind_sampling(pybind11::module_& module);  // sampling.cpp

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
  module.def("rms_norm", &rms_norm);
  module.def("paged_attention", &paged_attention);
  py::class_<Step>(module, "Step", py::module_local())
      .def(py::init<at::Tensor, at::Tensor, std::vector<int64_t>, std::vector<int64_t>, at::Tensor,
                    at::Tensor, at::Tensor>());
  py::class_<Norm>(module, "Norm", py::module_local()).def(py::init<at::Tensor, float>());
  py::class_<Linear>(module, "Linear", py::module_local())
      .def(py::init<const at::Tensor&, const std::optional<at::Tensor>&, bool>())
      .def("__call__", &Linear::operator());
  py::class_<Mlp>(module, "Mlp", py::module_local())
      .def(py::init<Norm, const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&,
                    const std::optional<at::Tensor>&, bool>())
      .def("__call__", &Mlp::operator());
  py::class_<Attention>(module, "Attention", py::module_local())
      .def(py::init<Norm, const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&,
                    const std::optional<at::Tensor>&, std::optional<Norm>, std::optional<Norm>,
                    int64_t, bool>())
      .def("__call__", &Attention::operator());
}
