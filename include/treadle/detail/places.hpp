// SPDX-License-Identifier: Apache-2.0
// Where a trainer's parameters and buffers were when it was made: state, graphs and buckets refer to those addresses.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/runtime/parameters.hpp"

namespace treadle {
inline namespace v0_1 {
namespace detail {

/// Remembers places and throws `ConfigError` naming the first tensor that has left its own.
class Places {
 public:
  /// `fixed_set`: whether a parameter that was frozen at first can no longer be trained.
  Places(const ParameterList& parameters, BufferList buffers, bool fixed_set)
      : parameters_(parameters), buffers_(std::move(buffers)), fixed_set_(fixed_set) {
    for (const auto& parameter : parameters_) places_.emplace_back(parameter.model);
    for (const auto& buffer : buffers_) places_.emplace_back(buffer.tensor);
  }

  /// Whether the first parameter has moved, and then most likely all have: cheap enough for every window.
  [[gnu::always_inline]] bool moved() const { return address_of(parameters_[0].model) != places_[0].address; }

  void check() const {
    std::size_t i = 0;
    for (const auto& parameter : parameters_) check("parameter", parameter.name, parameter.model, places_[i++]);
    for (const auto& buffer : buffers_) check("buffer", buffer.name, buffer.tensor, places_[i++]);
    if (!fixed_set_) return;
    for (i = 0; i < parameters_.size(); ++i)
      if (const auto& parameter = parameters_[i]; parameter.model.requires_grad() && !places_[i].trained)
        throw ConfigError("treadle::Trainer: parameter '" + parameter.name +
                          "' was frozen when the trainer was made and requires a gradient now, but its policies have "
                          "no master, average or state for it; unfreeze parameters first, and freeze them after the "
                          "trainer is made.");
  }

 private:
  struct Place {
    explicit Place(const at::Tensor& tensor)
        : device(tensor.device()),
          dtype(tensor.scalar_type()),
          trained(tensor.requires_grad()),
          address(address_of(tensor)) {}
    at::Device device;
    at::ScalarType dtype;
    bool trained;
    const void* address;
  };

  [[gnu::always_inline]] static const void* address_of(const at::Tensor& tensor) {
    const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();  // has_storage() is a call through memory
    return storage ? storage.data() : nullptr;
  }
  static void check(const char* kind, const std::string& name, const at::Tensor& tensor, const Place& place) {
    const std::string subject = std::string("treadle::Trainer: ") + kind + " '" + name + "' ";
    if (tensor.device() != place.device || tensor.scalar_type() != place.dtype)
      throw ConfigError(subject + "was " + c10::toString(place.dtype) + " on " + place.device.str() +
                        " when the trainer was made and is now " + c10::toString(tensor.scalar_type()) + " on " +
                        tensor.device().str() +
                        "; choose device and precision by policies instead of moving the model afterwards.");
    if (address_of(tensor) != place.address)
      throw ConfigError(subject +
                        "was given other memory after the trainer was made (torch::load, to() and set_data() do that); "
                        "load the model before making the trainer, or copy the values in with copy_().");
  }

  const ParameterList& parameters_;
  BufferList buffers_;
  bool fixed_set_;
  std::vector<Place> places_;
};

}  // namespace detail
}  // namespace v0_1
}  // namespace treadle
