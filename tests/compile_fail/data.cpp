// SPDX-License-Identifier: Apache-2.0
// What is no data set, no sampler and no function of samples.
#include <treadle/data/loader.hpp>
#include <treadle/data/map.hpp>
#include <treadle/data/tensor_loader.hpp>

#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace td = treadle;

struct Set {
  std::int64_t size() const { return 1; }
  td::data::Example get(std::int64_t) const { return {}; }
};
struct NotConst {
  std::int64_t size() const { return 1; }
  td::data::Example get(std::int64_t) { return {}; }
};
struct Score {
  at::Tensor data;
  double score = 0;
};
struct Scored {
  std::int64_t size() const { return 1; }
  Score get(std::int64_t) const { return {}; }
};
struct Deep {
  std::vector<std::pair<at::Tensor, std::optional<at::Tensor>>> pairs;
  td::Batch batch;
};
struct Nested {
  std::int64_t size() const { return 1; }
  Deep get(std::int64_t) const { return {}; }
};
struct HalfSampler {
  std::int64_t draws(std::int64_t rows) const { return rows; }
};

#if CASE == 0
inline void a() {
  td::data::Loader loader{Set{}, {.workers = 1}, td::data::EveryRow{}};
  for (const td::Batch& batch : loader) static_cast<void>(batch);
  td::data::Loader mapped{td::data::map(Set{}, [](const at::Tensor& data) { return data; })};
  for (const td::Batch& batch : mapped) static_cast<void>(batch);
}
inline void b() {
  td::data::Loader own{Scored{}, {}, td::data::EveryRow{}, [](std::span<const Score> all, const td::data::Placement&) {
                         return td::Batch{all[0].data, all[0].data};
                       }};
  for (const td::Batch& batch : own) static_cast<void>(batch);
  td::data::Loader nested{Nested{}};
  for (const Deep& batch : nested) static_cast<void>(batch);
}
#elif CASE == 1
// expect: treadle::data::Loader: what was given is no data set
inline void a() {
  td::data::Loader loader{NotConst{}};
}
#elif CASE == 2
// expect: treadle::data::Loader: what was given is no sampler
inline void a() {
  td::data::Loader loader{Set{}, {}, HalfSampler{}};
}
#elif CASE == 3
// expect: treadle::data::map: a function takes neither the sample (or batch) nor its data
inline void a() {
  td::data::Loader loader{td::data::map(Set{}, [](const std::string& text) { return text; })};
  for (const auto& batch : loader) static_cast<void>(batch);
}
#elif CASE == 4
// expect: treadle::data::Collate: a sample has a field that is no tensor
inline void a() {
  td::data::Loader loader{Scored{}};
  for (const auto& batch : loader) static_cast<void>(batch);
}
#endif
