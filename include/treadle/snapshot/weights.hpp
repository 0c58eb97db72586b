// SPDX-License-Identifier: Apache-2.0
// The weights of a model in a file: parameters and buffers by PyTorch's names, without the rest of a run.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "treadle/error.hpp"
#include "treadle/model.hpp"
#include "treadle/runtime/glob.hpp"
#include "treadle/runtime/parameters.hpp"
#include "treadle/snapshot/pt_file.hpp"
#include "treadle/snapshot/safetensors.hpp"

namespace treadle {
inline namespace v0_1 {

/// What `load_weights` takes from a file, and under which names.
struct LoadOptions {
  /// Whether anything missing, unexpected or mismatched is an error.
  bool strict = true;
  /// Names of the file and what the model calls them. A pair of prefixes that end in '.', or of which one is empty,
  /// changes the beginning of names: `{"module.", ""}`. The first pair that fits is applied.
  std::vector<std::pair<std::string, std::string>> rename{};
  /// Names of the model, patterns with `*` and `?`, or prefixes that end in '.'; only what one of them fits is looked
  /// at.
  std::vector<std::string> only{};
};

/// What became of each name; the model's names, but for `unexpected`, which are the file's.
struct LoadReport {
  std::vector<std::string> loaded{};
  std::vector<std::string> missing{};     ///< in the model and not in the file
  std::vector<std::string> unexpected{};  ///< in the file and not in the model
  std::vector<std::string> mismatched{};  ///< of another shape or kind of dtype, with a word on what differs

  bool complete() const { return missing.empty() && unexpected.empty() && mismatched.empty(); }
  /// On one line: "loaded 3; missing 1: 'a.weight'; ...", at most 20 names of a kind.
  std::string text() const {
    std::string said = "loaded " + std::to_string(loaded.size());
    for (const auto& [kind, names] :
         {std::pair{"missing", &missing}, {"unexpected", &unexpected}, {"mismatched", &mismatched}}) {
      if (names->empty()) continue;
      (said += std::string("; ") + kind) += " " + std::to_string(names->size()) + ": ";
      const std::size_t shown = std::min<std::size_t>(names->size(), 20);
      for (std::size_t i = 0; i < shown; ++i)
        (said += i == 0 ? "" : ", ") += names == &mismatched ? (*names)[i] : detail::shown((*names)[i]);
      if (shown < names->size()) said += " and " + std::to_string(names->size() - shown) + " more";
    }
    return said;
  }
  /// A line a name, all of them; of what was loaded the number.
  std::string table() const {
    std::string lines = "loaded      " + std::to_string(loaded.size()) + "\n";
    for (const auto& name : missing) lines += "missing     " + detail::shown(name) + "\n";
    for (const auto& name : unexpected) lines += "unexpected  " + detail::shown(name) + "\n";
    for (const auto& what : mismatched) lines += "mismatched  " + what + "\n";
    return lines;
  }
};

namespace detail {

template <class T>
concept weights_of_trainer = requires(T& trainer) {
  trainer.model();
  trainer.parameters();
  trainer.buffers();
  trainer.precision();
  trainer.reset_window();
};

/// Parameters and buffers under all their names, a tied one under several; of a parameter with a master the master.
template <class Source>
NamedTensors list_weights(Source& source) {
  NamedTensors weights;
  const auto add = [&](auto& model, const auto& masters) {
    const auto each = [&](const auto& items) {
      for (const auto& item : items) {
        at::Tensor tensor = item_tensor(item);
        if (!tensor.defined()) continue;
        const auto master = masters.find(tensor.unsafeGetTensorImpl());
        weights.emplace_back(item_name(item), master == masters.end() ? tensor : master->second);
      }
    };
    each(model.named_parameters());
    each(model.named_buffers());
  };
  std::unordered_map<const void*, at::Tensor> masters;
  if constexpr (weights_of_trainer<Source>) {
    for (const auto& parameter : source.parameters())
      masters.emplace(parameter.model.unsafeGetTensorImpl(), parameter.master);
    add(source.model(), masters);
  } else {
    add(*share_model(source), masters);
  }
  return weights;
}

/// The model's name for the file's `name`.
inline std::string renamed(const std::string& name, const LoadOptions& options) {
  for (const auto& [from, to] : options.rename) {
    if (name == from) return to;
    const bool is_prefix = (from.empty() || from.back() == '.') && (to.empty() || to.back() == '.');
    if (is_prefix && name.starts_with(from)) return to + name.substr(from.size());
  }
  return name;
}
inline bool is_wanted(std::string_view name, const LoadOptions& options) {
  const auto fits = [&](const std::string& pattern) {
    return glob_match(pattern, name) || (pattern.ends_with('.') && name.starts_with(pattern));
  };
  return options.only.empty() || std::ranges::any_of(options.only, fits);
}

/// Where each tensor of the file goes: pairs of the file's name and what it is written into.
inline NamedTensors match_weights(const SafetensorsFile& file, const NamedTensors& weights, const LoadOptions& options,
                                  LoadReport& report) {
  const auto text = [](at::IntArrayRef sizes) {
    std::string said = "[";
    for (const auto size : sizes) (said += said.size() > 1 ? ", " : "") += std::to_string(size);
    return said + "]";
  };
  std::unordered_map<std::string_view, const at::Tensor*> targets;
  for (const auto& [name, tensor] : weights) targets.emplace(name, &tensor);
  for (const auto& pattern : options.only)
    if (std::ranges::none_of(weights, [&](const auto& one) { return is_wanted(one.first, {.only = {pattern}}); }))
      throw ConfigError("treadle::load_weights: LoadOptions::only has '" + pattern +
                        "', which fits no parameter or buffer of the model; use its names, patterns with *, or "
                        "prefixes that end in '.'.");
  NamedTensors writes;
  std::unordered_map<std::string, std::string> sources;  // by the model's name
  std::unordered_map<const void*, std::string> found;    // the first name of each tensor that the file has
  for (const auto& name : file.names()) {
    const std::string own = renamed(name, options);
    if (!is_wanted(own, options)) continue;
    if (const auto [other, is_new] = sources.emplace(own, name); !is_new)
      throw SnapshotError("'" + file.path().string() + "' cannot be loaded: its tensors " + shown(other->second) +
                          " and " + shown(name) + " both become " + shown(own) + "; rename one of them only.");
    const auto target = targets.find(own);
    if (target == targets.end()) {
      report.unexpected.push_back(name);
      continue;
    }
    const auto& tensor = *target->second;
    found.emplace(tensor.unsafeGetTensorImpl(), own);
    const auto info = file.info(name);
    const bool converts = at::isFloatingType(info.dtype) && at::isFloatingType(tensor.scalar_type());
    if (tensor.sizes() != at::IntArrayRef(info.shape))
      report.mismatched.push_back(shown(own) + " (" + text(info.shape) + " in the file, " + text(tensor.sizes()) +
                                  " in the model)");
    else if (info.dtype != tensor.scalar_type() && !converts)
      report.mismatched.push_back(shown(own) + " (" + c10::toString(info.dtype) + " in the file, " +
                                  c10::toString(tensor.scalar_type()) + " in the model)");
    else {
      report.loaded.push_back(own);
      writes.emplace_back(name, tensor);
    }
  }
  // One name of a tied tensor is enough.
  for (const auto& [name, tensor] : weights)
    if (is_wanted(name, options) && found.emplace(tensor.unsafeGetTensorImpl(), name).second)
      report.missing.push_back(name);
  return writes;
}

}  // namespace detail

/// Writes parameters and buffers of a trainer (fp32 masters where it has them) or of a model (holder, `shared_ptr` or
/// lvalue) under PyTorch's names; a tied tensor once, under its first name.
///
/// A path that ends in `.pt` or `.pth` gets what Python's `torch.load(path, weights_only=True)` reads as a dict, any
/// other a safetensors file. It takes an older file's place in one piece. Throws `SnapshotError` if that fails.
template <class Source>
void save_weights(Source&& source, const std::filesystem::path& path) {
  NamedTensors weights;
  std::unordered_set<const void*> seen;
  for (auto& one : detail::list_weights(source))
    if (seen.insert(one.second.unsafeGetTensorImpl()).second) weights.push_back(std::move(one));
  if (path.extension() == ".pt" || path.extension() == ".pth")
    detail::save_pt(path, weights);
  else
    save_safetensors(path, weights, {{"format", "pt"}});  // what Python's readers ask for
}

/// Reads a safetensors file into the tensors of a trainer or a model, in place and on their devices. Shapes must be
/// equal; floating dtypes are converted, others must be equal.
///
/// All is compared first: with `strict`, anything missing, unexpected or mismatched throws a `SnapshotError` that lists
/// it, and nothing was changed; without, what fits is loaded. A trainer loses its open window, and keeps the state of
/// its rule; an average of a loaded weight begins anew from it.
template <class Source>
LoadReport load_weights(Source&& source, const std::filesystem::path& path, const LoadOptions& options = {}) {
  const SafetensorsFile file(path);
  const auto weights = detail::list_weights(source);
  LoadReport report;
  const auto writes = detail::match_weights(file, weights, options, report);
  if (options.strict && !report.complete())
    throw SnapshotError("'" + path.string() + "' does not fit the model: " + report.text() +
                        "; rename or choose with LoadOptions, or set strict = false to load what fits.");
  const at::NoGradGuard no_grad;
  NamedTensors read;  // so that a tensor that cannot be read is known before the first is changed
  for (const auto& [name, target] : writes) read.emplace_back(name, file.tensor(name));
  if constexpr (detail::weights_of_trainer<Source>) source.reset_window();
  std::unordered_set<const void*> written;
  for (std::size_t i = 0; i < writes.size(); ++i) {
    writes[i].second.detach().copy_(read[i].second);
    written.insert(writes[i].second.unsafeGetTensorImpl());
  }
  if constexpr (detail::weights_of_trainer<Source>) {
    source.precision().publish();
    std::unordered_map<std::string_view, const at::Tensor*> by_name;
    for (const auto& [name, tensor] : weights)
      if (written.contains(tensor.unsafeGetTensorImpl())) by_name.emplace(name, &tensor);
    if constexpr (requires { source.averaging().for_each_state([](const auto&, at::Tensor&) {}); })
      source.averaging().for_each_state([&](const auto& name, at::Tensor& average) {
        const auto weight = by_name.find(std::string_view(name));
        if (weight != by_name.end() && weight->second->sizes() == average.sizes()) average.copy_(*weight->second);
      });
  }
  return report;
}

}  // namespace v0_1
}  // namespace treadle
