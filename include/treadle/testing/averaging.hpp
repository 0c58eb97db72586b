// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>

#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "treadle/averaging/concept.hpp"
#include "treadle/testing/report.hpp"

namespace treadle {
inline namespace v0_1 {
namespace testing {

/// Checks at run time what `averaging_policy` promises and the compiler cannot see; one sentence a broken promise.
template <averaging_policy P>
Violations check_averaging_contract(const P& policy = {}, at::Device device = at::kCPU) {
  Report report("averaging");
  policy.check();
  const at::NoGradGuard no_grad;
  const auto parameters = detail::probe_parameters(device);
  typename P::State state(policy, parameters);
  const auto good = at::full({}, 0.0, at::TensorOptions().device(device).dtype(at::kFloat));
  const auto bad = at::full({}, 1.0, good.options());
  const auto weights = [&] {
    std::vector<at::Tensor> tensors;
    for (const auto& p : parameters) tensors.push_back(p.master.detach().clone());
    return tensors;
  };
  const auto move = [&](double by) {
    for (const auto& p : parameters)
      if (p.model.requires_grad()) p.master.detach().add_(by);
  };
  std::map<std::string, std::vector<std::int64_t>> shapes;
  for (const auto& p : parameters) shapes[p.name] = p.master.sizes().vec();
  std::vector<const void*> places;
  for (const auto& p : parameters) places.push_back(p.master.const_data_ptr());

  const auto first = detail::visited(state);
  report.require(P::averages || first.empty(), "averages is false, so for_each_state() must have nothing to visit.");
  report.require(!P::averages || !first.empty(), "averages is true, so for_each_state() must visit the averages.");
  std::set<std::string> seen;
  bool any = false;
  state.for_each_state([&](const std::string& name, at::Tensor& tensor) {
    report.require(tensor.defined(), "for_each_state() must visit defined tensors.");
    report.require(seen.insert(name).second, "for_each_state() must visit each name once.");
    const auto parameter = shapes.find(name);
    if (parameter == shapes.end()) return;  // more state, such as a counter
    any = true;
    report.require(tensor.defined() && tensor.sizes() == parameter->second,
                   "for_each_state() must visit under a parameter's name what has its shape.");
  });
  report.require(!P::averages || any, "for_each_state() must name an average as its parameter.");

  move(1.0);
  state.update(nullptr);
  const auto second = detail::visited(state);
  report.require(!P::averages || !detail::same_bits(first, second), "update() must take new weights in.");
  move(1.0);
  state.update(&good);
  const auto third = detail::visited(state);
  report.require(!P::averages || !detail::same_bits(second, third),
                 "update() must take new weights in where found_inf is 0.");

  // A skipped step: its weights are whatever a broken update left.
  const auto kept = weights();
  for (const auto& p : parameters) p.master.detach().fill_(std::numeric_limits<double>::quiet_NaN());
  state.update(&bad);
  report.require(detail::same_bits(detail::visited(state), third),
                 "update() must leave the average bitwise alone where found_inf is 1, even if a weight is NaN.");
  std::size_t i = 0;
  for (const auto& p : parameters) p.master.detach().copy_(kept[i++]);
  report.require(good.template item<float>() == 0 && bad.template item<float>() == 1,
                 "update() must not write into found_inf.");

  const auto before = weights();
  state.use_average();
  report.require(P::averages != detail::same_bits(weights(), before),
                 "use_average() must write the average into the weights, and nothing without one.");
  report.require(detail::same_bits(detail::visited(state), third), "use_average() must keep the average.");
  i = 0;
  for (const auto& p : parameters) {
    report.require(p.model.requires_grad() || detail::same_bits(p.master, before[i]),
                   "use_average() must leave frozen parameters bitwise alone.");
    ++i;
  }
  const auto averaged = weights();
  state.use_average();  // an evaluation within an evaluation
  report.require(detail::same_bits(weights(), averaged), "use_average() within use_average() must change nothing.");
  state.use_weights();
  report.require(detail::same_bits(weights(), averaged),
                 "use_weights() must restore the weights when it ends the outermost use_average(), no earlier.");
  state.use_weights();
  report.require(detail::same_bits(weights(), before),
                 "use_weights() after use_average() must restore every weight bitwise.");
  i = 0;
  for (const auto& p : parameters)
    report.require(p.master.const_data_ptr() == places[i++],
                   "use_average() and use_weights() must keep the address of every weight.");
  state.use_weights();
  report.require(detail::same_bits(weights(), before), "use_weights() must do nothing when it is called again.");
  return report.take();
}

}  // namespace testing
}  // namespace v0_1
}  // namespace treadle
