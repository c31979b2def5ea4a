// A decoder layer's two halves, the layers one after the other, and the head. Must not know Python,
// where tokens come from or what becomes of logits.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "attention.h"
#include "check.h"
#include "exchange.h"
#include "matrix.h"
#include "pool.h"
#include "vectors.h"

namespace charonia {

// ------------------------------------------------------------------------------- row by row

// residual += x, where there is one; to = residual / rms(residual) * weight (Zhang, Sennrich 2019,
// arXiv 1910.07467); all over `size` numbers. Squares are added up in four chains, so that they
// wait less for each other.
template <bool kAdds, class T>
[[gnu::noinline]] void normalize_row(T* residual, const T* x, const T* weight, float eps,
                                     int64_t size, T* to) {
  constexpr int kChains = 4;
  Floats squares[kChains] = {};
  const auto take = [&](int64_t i, Floats& chain) {
    if constexpr (kAdds) narrow(residual + i, widen(residual + i) + widen(x + i));
    const Floats v = widen(residual + i);
    chain += v * v;
  };
  int64_t i = 0;
  for (; i + kChains * kLanes <= size; i += kChains * kLanes)
    for (int chain = 0; chain < kChains; ++chain) take(i + chain * kLanes, squares[chain]);
  for (; i + kLanes <= size; i += kLanes) take(i, squares[0]);
  float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  for (; i < size; ++i) {
    if constexpr (kAdds) residual[i] = rounded<T>(to_float(residual[i]) + to_float(x[i]));
    total += to_float(residual[i]) * to_float(residual[i]);
  }
  const float factor = 1.0f / std::sqrt(total / static_cast<float>(size) + eps);
  for (i = 0; i + kLanes <= size; i += kLanes)
    narrow(to + i, widen(residual + i) * factor * widen(weight + i));
  for (; i < size; ++i) to[i] = rounded<T>(to_float(residual[i]) * factor * to_float(weight[i]));
}

// residual += x (where there is one), to = norm(residual); all [rows, size].
template <class T>
void add_and_normalize(T* residual, const T* x, const T* weight, float eps, int64_t rows,
                       int64_t size, T* to) {
  const Timed timed(Phase::kNorm);
  for_rows(rows, [&](int64_t row) {
    T* const its = residual + row * size;
    if (x)
      normalize_row<true>(its, x + row * size, weight, eps, size, to + row * size);
    else
      normalize_row<false>(its, x, weight, eps, size, to + row * size);
  });
}

// Rotate a head in place, its first half against its second (Su et al. 2021, arXiv 2104.09864).
template <class T>
[[gnu::noinline]] void rotate_head(T* head, const T* cos, const T* sin, int64_t half) {
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

template <class F>
void timed(Phase phase, F&& f) {
  const Timed timer(phase);
  f();
}

// to [rows, outputs] = x W^T + b. Where ranks have a part of the inputs each, all of them have the
// sum of their products: in float32, in the order of ranks, rounded once.
template <class T>
void multiply_and_sum(const Matrix& matrix, Phase phase, const T* x, int64_t rows,
                      Exchange* exchange, T* to) {
  if (!exchange) {
    timed(phase, [&] { matrix.apply(x, rows, to); });
    return;
  }
  const int64_t count = rows * matrix.outputs;
  float* part = exchange->place(count);
  if (!part) part = scratch.partial.get<float>(count);
  timed(phase, [&] { matrix.apply(x, rows, part); });
  timed(Phase::kExchange, [&] { exchange->sum(part, count, to); });
}

// RMSNorm: its weight [size] and epsilon.
struct Norm {
  at::Tensor weight;
  float eps;

  void require_fit(const char* name, at::ScalarType type, int64_t size) const {
    require_tensor(weight, name, type, {size});
  }
};

class Mlp {
 public:
  Mlp(Norm norm, const at::Tensor& gate_up, const std::optional<at::Tensor>& bias,
      const at::Tensor& down, const std::optional<at::Tensor>& down_bias, Quantization quantization)
      : norm_(std::move(norm)), gate_up_(gate_up, bias, true, quantization),
        down_(down, down_bias, false, quantization) {
    norm_.require_fit("norm", type(), hidden());
    require(down_.type == type() && down_.outputs == hidden() &&
                gate_up_.outputs == 2 * down_.inputs,
            "gate and up of ", gate_up.sizes(), " ", type(), " do not fit down of ", down.sizes(),
            " ", down_.type);
  }

  // residual += x; out = down(silu(gate) * up) of its norm, the sum of all ranks' where there is an
  // exchange; all [rows, hidden].
  template <class T>
  void operator()(const T* x, T* residual, int64_t rows, Exchange* exchange, T* out) const {
    T* normed = scratch.normed.get<T>(rows * gate_up_.inputs);
    T* inner = scratch.inner.get<T>(rows * down_.inputs);
    add_and_normalize<T>(residual, x, data<T>(norm_.weight), norm_.eps, rows, gate_up_.inputs,
                         normed);
    timed(Phase::kGateUp, [&] { gate_and_multiply(normed, rows, inner); });
    multiply_and_sum<T>(down_, Phase::kDown, inner, rows, exchange, out);
  }

  at::ScalarType type() const { return gate_up_.type; }
  int64_t hidden() const { return gate_up_.inputs; }
  int64_t num_weights() const { return gate_up_.num_weights() + down_.num_weights(); }

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
            Quantization quantization)
      : norm_(std::move(norm)), qkv_(qkv, qkv_bias, false, quantization),
        output_(output, output_bias, false, quantization), query_norm_(std::move(query_norm)),
        key_norm_(std::move(key_norm)), shape_(shape_of(qkv_, output_, head_dim)) {
    norm_.require_fit("norm", type(), hidden());
    if (query_norm_) query_norm_->require_fit("query_norm", type(), head_dim);
    if (key_norm_) key_norm_->require_fit("key_norm", type(), head_dim);
  }

  // There are so many tokens in this step, and it and these pages are for such heads.
  void require_fit(int64_t rows, const Step& step, const PagesOfLayer& pages) const {
    require(rows == step.num_tokens(), "residual has ", rows, " tokens, and the step ",
            step.num_tokens());
    step.require_fit(type(), shape_, pages);
  }

  // residual += x; store K and V of its norm; out = what is attended to, by all ranks where there
  // is an exchange; all [rows, hidden].
  template <class T>
  void operator()(const T* x, T* residual, int64_t rows, const Step& step,
                  const PagesOfLayer& pages, Exchange* exchange, T* out) const {
    T* normed = scratch.normed.get<T>(rows * std::max(qkv_.inputs, output_.inputs));
    T* qkv = scratch.wide.get<T>(rows * qkv_.outputs);
    add_and_normalize<T>(residual, x, data<T>(norm_.weight), norm_.eps, rows, qkv_.inputs, normed);
    timed(Phase::kQkv, [&] { qkv_.apply(normed, rows, qkv); });
    with_pages<T>(pages, shape_, [&](const auto& typed) {
      timed(Phase::kRope, [&] { rotate_and_write(qkv, step, typed); });
      timed(Phase::kAttention, [&] {
        attend_over_pages<T>(step, typed, qkv, qkv_.outputs, shape_.heads, shape_.head_dim, normed);
      });
    });
    multiply_and_sum<T>(output_, Phase::kOutput, normed, rows, exchange, out);
  }

  at::ScalarType type() const { return qkv_.type; }
  int64_t hidden() const { return qkv_.inputs; }
  int64_t num_weights() const { return qkv_.num_weights() + output_.num_weights(); }

 private:
  static HeadShape shape_of(const Matrix& qkv, const Matrix& output, int64_t head_dim) {
    require(head_dim > 0, "head_dim must be positive, not ", head_dim);
    const int64_t heads = output.inputs / head_dim;
    const HeadShape shape = {heads, (qkv.outputs / head_dim - heads) / 2, head_dim};
    shape.require_sound();
    require(qkv.type == output.type && qkv.inputs == output.outputs &&
                output.inputs == heads * head_dim &&
                qkv.outputs == (heads + 2 * shape.kv_heads) * head_dim,
            "qkv of [", qkv.outputs, ", ", qkv.inputs, "] ", qkv.type, " does not fit output of [",
            output.outputs, ", ", output.inputs, "] ", output.type, " with heads of ", head_dim);
    return shape;
  }

  // Rotate queries and keys in place, and write keys and values to the pages. Tokens of a block may
  // share bytes there, so one thread writes them all.
  template <class T, class P>
  void rotate_and_write(T* qkv, const Step& step, const P& pages) const {
    constexpr int64_t kFew = 8;  // blocks, which are not worth another thread
    const std::vector<int64_t>& ends = step.ends_of_blocks(pages.block_size);
    const auto count = static_cast<int64_t>(ends.size());
    const auto some = [&](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) {
        const int64_t begin = block ? ends[block - 1] : 0, end = ends[block];
        for (int64_t row = begin; row < end; ++row)
          rotate(qkv + row * qkv_.outputs, data<int64_t>(step.positions)[row], step);
        const int64_t* const slots = data<int64_t>(step.slots) + begin;
        write(qkv + begin * qkv_.outputs, end - begin, slots, pages);
      }
    };
    if (count < kFew) {
      if (count) some(0, count);
    } else {
      Pool::get().run_ranges(count, some);
    }
  }

  // Queries and keys of a token.
  template <class T>
  void rotate(T* qkv, int64_t position, const Step& step) const {
    const int64_t head_dim = shape_.head_dim, half = head_dim / 2;
    const T* cos = data<T>(step.cos) + position * half;
    const T* sin = data<T>(step.sin) + position * half;
    for (int64_t head = 0; head < shape_.heads + shape_.kv_heads; ++head) {
      T* const at = qkv + head * head_dim;
      const auto& norm = head < shape_.heads ? query_norm_ : key_norm_;
      if (norm)
        normalize_row<false, T>(at, nullptr, data<T>(norm->weight), norm->eps, head_dim, at);
      rotate_head(at, cos, sin, half);
    }
  }

  // Keys and values of `count` tokens of one block.
  template <class T, class P>
  void write(const T* qkv, int64_t count, const int64_t* slots, const P& pages) const {
    const int64_t head_dim = shape_.head_dim;
    const T* key = qkv + shape_.heads * head_dim;
    const int64_t stride = qkv_.outputs, to_value = shape_.kv_heads * head_dim;
    for (int64_t head = 0; head < shape_.kv_heads; ++head, key += head_dim)
      pages.write(slots, count, head, key, key + to_value, stride, head_dim);
  }

  Norm norm_;
  Matrix qkv_, output_;
  std::optional<Norm> query_norm_, key_norm_;
  HeadShape shape_;
};

// All decoder layers. With an exchange each rank has some heads and a part of the MLP in every
// layer, and the ranks add up what each half of a layer contributes.
class Layers {
 public:
  using Layer = std::pair<std::shared_ptr<Attention>, std::shared_ptr<Mlp>>;

  Layers(std::vector<Layer> layers, std::shared_ptr<Exchange> exchange)
      : layers_(std::move(layers)), exchange_(std::move(exchange)) {
    require(!layers_.empty(), "a model has layers");
    for (const auto& [attention, mlp] : layers_) {
      require(attention && mlp, "a layer has both of its halves");
      for (const auto& [its_type, its_hidden] : {std::pair(attention->type(), attention->hidden()),
                                                 std::pair(mlp->type(), mlp->hidden())})
        require(its_type == type() && its_hidden == hidden(), "halves of layers of ", its_hidden,
                " ", its_type, " and of ", hidden(), " ", type(), " do not fit");
    }
  }

  at::ScalarType type() const { return layers_.front().first->type(); }
  int64_t hidden() const { return layers_.front().first->hidden(); }

  int64_t num_weights() const {
    int64_t count = 0;
    for (const auto& [attention, mlp] : layers_) count += attention->num_weights() + mlp->num_weights();
    return count;
  }

  bool waits_for_ranks() const { return exchange_ != nullptr; }

  // There are so many tokens in this step, and it and these pages are for these layers.
  void require_fit(int64_t rows, const Step& step, const std::vector<PagesOfLayer>& pages) const {
    require(pages.size() == layers_.size(), pages.size(), " layers' pages for ", layers_.size(),
            " layers");
    for (size_t i = 0; i < layers_.size(); ++i) layers_[i].first->require_fit(rows, step, pages[i]);
  }

  // Call f, which computes these layers. If it throws, no other rank waits for what will not come.
  template <class F>
  void for_all_ranks(F&& f) const {
    try {
      f();
    } catch (...) {
      if (exchange_) exchange_->fail();
      throw;
    }
  }

  // residual += all contributions but the last, which is `out`; both [rows, hidden].
  template <class T>
  void operator()(T* residual, int64_t rows, const Step& step,
                  const std::vector<PagesOfLayer>& pages, T* out) const {
    const T* x = nullptr;
    for (size_t i = 0; i < layers_.size(); ++i) {
      const auto& [attention, mlp] = layers_[i];
      (*attention)(x, residual, rows, step, pages[i], exchange_.get(), out);
      (*mlp)(static_cast<const T*>(out), residual, rows, exchange_.get(), out);
      x = out;
    }
  }

 private:
  std::vector<Layer> layers_;
  std::shared_ptr<Exchange> exchange_;  // or none
};

// The last norm and the language model's head.
class Head {
 public:
  Head(Norm norm, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
       Quantization quantization)
      : norm_(std::move(norm)), matrix_(weight, bias, false, quantization) {
    norm_.require_fit("norm", type(), hidden());
  }

  // logits [rows, vocabulary] of x + residual [rows, hidden].
  template <class T>
  void operator()(const T* x, const T* residual, int64_t rows, float* logits) const {
    const int64_t size = matrix_.inputs;
    T* total = scratch.wide.get<T>(rows * size);
    std::copy(residual, residual + rows * size, total);
    T* normed = scratch.normed.get<T>(rows * size);
    add_and_normalize<T>(total, x, data<T>(norm_.weight), norm_.eps, rows, size, normed);
    timed(Phase::kHead, [&] { matrix_.apply(static_cast<const T*>(normed), rows, logits); });
  }

  at::ScalarType type() const { return matrix_.type; }
  int64_t num_weights() const { return matrix_.num_weights(); }
  int64_t hidden() const { return matrix_.inputs; }
  int64_t vocabulary() const { return matrix_.outputs; }

 private:
  Norm norm_;
  Matrix matrix_;
};

}  // namespace charonia
