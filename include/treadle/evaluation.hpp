// SPDX-License-Identifier: Apache-2.0
// Evaluation and prediction: what runs between steps and must leave no trace in them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/mul.h>

#include <atomic>
#include <concepts>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/loader.hpp"
#include "treadle/loss.hpp"
#include "treadle/metrics.hpp"
#include "treadle/model.hpp"
#include "treadle/objective.hpp"
#include "treadle/observe/meter.hpp"
#include "treadle/ranks_in_step.hpp"
#include "treadle/runtime/placement.hpp"
#include "treadle/runtime/random.hpp"
#include "treadle/runtime/sum_dtype.hpp"
#include "treadle/step_context.hpp"

namespace treadle {
inline namespace v0_1 {

/// Options of `evaluate` and `predict`.
struct EvaluateOptions {
  bool use_average = true;  ///< with an averaging policy: the averaged weights instead of the current ones
  const std::atomic<bool>* interrupt = nullptr;  ///< once true it ends after the batch at hand, with what was counted
};

namespace detail {

/// `model.forward(batch.data)`.
struct ForwardData {
  template <class Model, class Batch>
  at::Tensor operator()(Model& model, const Batch& batch) const {
    constexpr bool works = requires {
      { model.forward(batch.data) } -> std::convertible_to<at::Tensor>;
    };
    static_assert(
        works,
        "treadle::Trainer::predict: model.forward(batch.data) gives no tensor with this model and batch type; say what "
        "to call, as in predict(loader, [](auto& model, const auto& batch) { return model.forward(batch.left); }).");
    if constexpr (works) return model.forward(batch.data);
  }
};

/// Evaluation mode, averaged weights and untouched generators for a scope, all put back whatever happens.
template <class Trainer>
class Evaluator {
 public:
  Evaluator(Trainer& trainer, const EvaluateOptions& options)
      : trainer_(trainer),
        averaged_(options.use_average && Trainer::Averaging::averages),
        generators_(trainer.device()),
        mode_(trainer.model()) {
    if (!averaged_) return;
    trainer_.averaging().use_average();
    trainer_.precision().publish();
  }
  ~Evaluator() {
    if (!averaged_) return;
    trainer_.averaging().use_weights();
    trainer_.precision().publish();
  }
  Evaluator(const Evaluator&) = delete;
  Evaluator& operator=(const Evaluator&) = delete;

 private:
  Trainer& trainer_;
  bool averaged_;
  GeneratorGuard generators_;
  EvaluationMode<std::remove_reference_t<decltype(std::declval<Trainer&>().model())>> mode_;
};

/// `f(objective, model, batch)` under the precision's guards, without gradients.
template <class Trainer, class B, class F>
void infer(Trainer& trainer, const B& batch, F&& f) {
  const at::NoGradGuard no_grad;
  const auto math = trainer.precision().math();
  placed<Trainer::Precision::casts_inputs>(batch, trainer.device(), trainer.precision(), [&](const auto& here) {
    [[maybe_unused]] const auto cast = trainer.precision().autocast();
    f(trainer.objective(), trainer.model(), here);
  });
}

inline constexpr auto no_clock = [](auto&& next) { return next(); };

template <class Trainer, class Range>
Metrics evaluate(Trainer& trainer, Range& range, const EvaluateOptions& options) try {
  RanksOf<Trainer> ranks(trainer.parallelism());
  ranks.begin_evaluation();
  const Evaluator<Trainer> scope(trainer, options);
  observe::Meter meter;
  bool any = false;
  for_each_batch<false>(
      range,
      [&](const auto& batch, bool) {
        infer(trainer, batch, [&](auto& objective, auto& model, const auto& here) {
          typename Trainer::Context context(trainer.checkpointing(), trainer.names());
          context.set_training(false);
          const std::int64_t rows = treadle::rows(here);
          any = true;
          if (rows == 0) return;
          const Loss loss = call_objective(objective, model, here, context);
          require_scalar(loss.value);
          if (loss.counts_nothing()) return meter.add(context.records());
          at::Tensor value(loss.value.tensor_data());
          if (is_narrow(value.scalar_type())) value = value.to(at::kFloat);
          const bool on_device = loss.device_count.defined();
          const auto sum = loss.is_mean ? at::mul(value, static_cast<double>(loss.count)) : value;
          meter.add("loss", sum.reshape({}), on_device ? 0.0 : static_cast<double>(loss.count), loss.device_count, {});
          meter.add(context.records());
        });
        return options.interrupt == nullptr || !options.interrupt->load(std::memory_order_relaxed);
      },
      no_clock);
  if (!ranks.any_evaluated(any))  // among several ranks one may well have none
    throw DataError("treadle::Trainer::evaluate: the loader gave no batch; evaluation needs at least one.");
  return ranks.gather_evaluation(meter.take()).means();
} catch (...) {
  RanksOf<Trainer>(trainer.parallelism()).leave_word();
  throw;
}

template <class Trainer, class Range, class Forward>
at::Tensor predict(Trainer& trainer, Range& range, Forward& forward, const EvaluateOptions& options) {
  const Evaluator<Trainer> scope(trainer, options);
  std::vector<at::Tensor> outputs;
  for_each_batch<false>(
      range,
      [&](const auto& batch, bool) {
        infer(trainer, batch, [&](auto&, auto& model, const auto& here) { outputs.push_back(forward(model, here)); });
        return true;
      },
      no_clock);
  if (outputs.empty())
    throw DataError("treadle::Trainer::predict: the loader gave no batch; prediction needs at least one.");
  return at::cat(outputs);
}

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
