// SPDX-License-Identifier: Apache-2.0
// What a trainer is made of: model, objective, rule, policies, observers, each in its place.
#include <torch/nn/modules/linear.h>
#include <treadle/treadle.hpp>

#include <memory>
#include <vector>

namespace td = treadle;
using Net = torch::nn::LinearImpl;

struct Objective {
  td::Loss operator()(Net& net, const td::Batch& batch) const {
    return td::mean_loss(net.forward(batch.data), batch.target);
  }
};
inline td::Loss plain(Net& net, const td::Batch& batch) {
  return Objective{}(net, batch);
}
struct Seen {
  void on_step(const td::observe::StepEvent&) {}
};
template <class O, class B = td::Batch>
void train(Net& net, O objective, const B& batch) {
  td::Trainer trainer{net, objective, td::optim::AdamW{}};
  trainer.accumulate(batch);
}

#if CASE == 0
inline void control(Net& net, torch::nn::Linear holder, std::shared_ptr<Net> shared) {
  td::Trainer a{net, Objective{}, td::optim::AdamW{}};
  td::Trainer b{holder, td::fn<plain>{}, td::optim::Sgd{}, td::policies(td::precision::Bf16{})};
  td::Trainer c{shared, Objective{}, td::optim::Adam{}, td::policies(), td::observers(Seen{})};
  train(net, Objective{}, td::Batch{});
  train(
      net, [](auto& n, const auto& b, auto& step) { return step.record("x", 1.0, 1), n.forward(b.data).mean(); },
      td::Batch{});
}
#elif CASE == 1
// expect: treadle::Trainer: the model is a temporary, which would be gone before the first step
inline auto trainer() {
  return sizeof(td::Trainer{Net(2, 2), Objective{}, td::optim::AdamW{}});
}
// expect: treadle::Trainer: the model is const; training changes it
inline auto trainer(const Net& net) {
  return sizeof(td::Trainer{net, Objective{}, td::optim::AdamW{}});
}
// expect: treadle::Trainer: the objective is a bare function pointer
inline auto pointer(Net& net) {
  return sizeof(td::Trainer{net, plain, td::optim::AdamW{}});
}
// expect: treadle::Trainer: the third argument is not an update rule
inline auto rule(Net& net) {
  return sizeof(td::Trainer{net, Objective{}, 1e-3});
}
// expect: treadle::Trainer: the fourth argument must be a set of policies
inline auto one_policy(Net& net) {
  return sizeof(td::Trainer{net, Objective{}, td::optim::AdamW{}, td::precision::Bf16{}});
}
// expect: treadle::Trainer: the fifth argument must be a set of observers
inline auto one_observer(Net& net) {
  return sizeof(td::Trainer{net, Objective{}, td::optim::AdamW{}, td::policies(), Seen{}});
}
// expect: treadle::Trainer: the model lacks something that training needs
struct NoMode : Net {
  using Net::Net;
  bool is_training() const = delete;
};
inline auto model(NoMode& net) {
  return sizeof(td::Trainer{net, Objective{}, td::optim::AdamW{}});
}
#elif CASE == 2
// Arguments in another order: two sentences, of which clang gives the first.
// expect: treadle::Trainer: the fourth argument must be a set of policies
inline auto swapped(Net& net) {
  return sizeof(td::Trainer{net, Objective{}, td::policies(td::precision::Bf16{}), td::optim::AdamW{}});
}
// expect: treadle::Trainer: the model lacks something that training needs
inline auto no_model(td::Batch& net) {
  return sizeof(td::Trainer{net, Objective{}, td::optim::AdamW{}});
}
#elif CASE == 3
// A rule that lacks one call.
// expect: treadle::Trainer: the third argument is not an update rule
struct NoRelease : td::optim::AdamW {
  struct State : td::optim::FusedState<td::optim::AdamW> {
    using FusedState::FusedState;
    void release() = delete;
  };
};
inline auto rule(Net& net) {
  return sizeof(td::Trainer{net, Objective{}, NoRelease{}});
}
#elif CASE == 9
// A rule without the rest, and a model that can be told to train but not to stop.
// expect: treadle::Trainer: the third argument is not an update rule
struct NoCollect : td::optim::AdamW {
  struct State : td::optim::FusedState<td::optim::AdamW> {
    using FusedState::FusedState;
    template <class P>
    at::TensorList collect(P&) = delete;
  };
};
inline auto collect(Net& net) {
  return sizeof(td::Trainer{net, Objective{}, NoCollect{}});
}
// expect: treadle::Trainer: the model lacks something that training needs
struct OneWay : Net {
  using Net::Net;
  void train() {}
};
inline auto one_way(OneWay& net) {
  return sizeof(td::Trainer{net, Objective{}, td::optim::AdamW{}});
}
#elif CASE == 4
// expect: treadle::Trainer: the objective cannot be called as objective(model, batch)
inline void arity(Net& net) {
  train(
      net, [](Net& n) { return n.weight.sum(); }, td::Batch{});
}
// expect: treadle::Trainer: the objective must return a treadle::Loss
inline void result(Net& net) {
  train(
      net, [](Net&, const td::Batch&) { return 1.0; }, td::Batch{});
}
#elif CASE == 5
// expect: treadle::Trainer: the objective cannot be called as objective(model, batch)
inline void four(Net& net) {
  train(
      net, [](Net& n, const td::Batch&, auto&, int) { return n.weight.sum(); }, td::Batch{});
}
// expect: treadle::Trainer: the objective must return a treadle::Loss
inline void nothing(Net& net) {
  train(
      net, [](Net&, const td::Batch&, auto& step) { step.record("x", 1.0, 1); }, td::Batch{});
}
#elif CASE == 6
// A batch that the objective would change; one of another type; a step context that would be copied.
// expect: treadle::Trainer: the objective takes the batch by non-const reference
inline void changes(Net& net) {
  train(
      net, [](Net& n, td::Batch& b) { return n.forward(b.data).sum(); }, td::Batch{});
}
// expect: treadle::Trainer: the objective takes another type of batch than the loader gives
inline void other_batch(Net& net) {
  train(
      net, [](Net& n, const std::vector<at::Tensor>& b, auto&) { return n.forward(b[0]).sum(); }, td::Batch{});
}
// expect: treadle::Trainer: the objective takes the step context by value
inline void copies(Net& net) {
  train(
      net, [](auto& n, const auto& b, auto step) { return step.record("x", 1.0, 1), n.forward(b.data).sum(); },
      td::Batch{});
}
// expect: treadle::Trainer: the objective must return a treadle::Loss
inline void list(Net& net) {
  train(
      net, [](Net& n, const td::Batch& b) { return std::vector<at::Tensor>{n.forward(b.data).sum()}; }, td::Batch{});
}
#elif CASE == 7
// Another model's objective, and one for the holder of the right model.
// expect: treadle::Trainer: the objective takes another type of model than the trainer has
inline void other(Net& net) {
  train(
      net, [](torch::nn::BilinearImpl& n, const td::Batch&) { return n.weight.sum(); }, td::Batch{});
}
#elif CASE == 10
// expect: treadle::Trainer: the objective takes another type of model than the trainer has
struct ForHolder {
  td::Loss operator()(torch::nn::Linear& net, const td::Batch& batch, auto& step) const {
    step.record("rows", 1.0, 1);
    return td::mean_loss(net->forward(batch.data), batch.target);
  }
};
inline void holder(Net& net) {
  train(net, ForHolder{}, td::Batch{});
}
#elif CASE == 11
// What is no loader, and a batch type without data.
template <class T>
void use(Net& net, const T& given) {
  td::Trainer trainer{net, Objective{}, td::optim::AdamW{}};
  trainer.fit(given);
}
// expect: treadle::Trainer: what was given is no loader
inline void one_batch(Net& net) {
  use(net, td::Batch{});
}
// expect: treadle::Trainer::predict: model.forward(batch.data) gives no tensor
struct Pair {
  at::Tensor left, right;
};
inline void pairs(Net& net, std::vector<Pair>& loader) {
  td::Trainer trainer{net, Objective{}, td::optim::AdamW{}};
  trainer.predict(loader);
}
#elif CASE == 12
// expect: treadle::Trainer: what was given is no loader
inline void options_in_braces(Net& net, td::Batch& batch) {
  td::Trainer trainer{net, Objective{}, td::optim::AdamW{}};
  trainer.fit(batch, {.epochs = 2});
}
#elif CASE == 13
// expect: treadle::Trainer: what was given is no loader
inline void second(Net& net, std::vector<td::Batch>& loader, td::Batch& batch) {
  td::Trainer trainer{net, Objective{}, td::optim::AdamW{}};
  trainer.fit(batch, loader, {.epochs = 2});
}
#elif CASE == 14
// expect: treadle::Trainer: what was given is no loader
inline void elsewhere(Net& net, td::Batch& batch) {
  td::Trainer trainer{net, Objective{}, td::optim::AdamW{}};
  trainer.evaluate(batch, {.use_average = false});
}
#elif CASE == 15
// expect: treadle::Trainer: what was given is no loader
inline void predicted(Net& net, at::Tensor& batch) {
  td::Trainer trainer{net, Objective{}, td::optim::AdamW{}};
  trainer.predict(batch, [](Net& n, const td::Batch& b) { return n.forward(b.data); });
}
#elif CASE == 8
// expect: treadle: a batch type has more than 12 fields
struct Wide {
  at::Tensor a, b, c, d, e, f, g, h, i, j, k, l, m;
};
inline void wide(Net& net) {
  train(
      net, [](Net& n, const Wide& w) { return n.forward(w.a).sum(); }, Wide{});
}
// expect: treadle: a batch type, or a field of one, derives from another type
struct Weighted : td::Batch {
  at::Tensor weight;
};
inline void derived(Net& net) {
  train(
      net, [](Net& n, const Weighted& w) { return n.forward(w.data).sum(); }, Weighted{});
}
// expect: treadle: a checkpointed block must be callable with its inputs
inline void block(Net& net) {
  train(
      net,
      [](Net& n, const td::Batch& b, auto& step) {
        return step.checkpoint([](int*) { return at::Tensor(); }, b.data, n);
      },
      td::Batch{});
}
#endif
