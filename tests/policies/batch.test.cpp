// SPDX-License-Identifier: Apache-2.0
// Batches of any shape, loaders of any kind, and metrics by name.
#include "treadle/batch.hpp"

#include <forward_list>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "support/throws.hpp"
#include "support/tiny.hpp"

namespace {
namespace td = treadle;

at::Tensor ones(std::int64_t rows) {
  return at::ones({rows, 2});
}
template <class B>
std::vector<std::int64_t> visited(B& batch) {
  std::vector<std::int64_t> lengths;
  td::for_each_tensor(batch, [&](const at::Tensor& t) { lengths.push_back(t.defined() ? t.size(0) : -1); });
  return lengths;
}

struct Inner {
  at::Tensor a;
  int number = 0;
  at::Tensor b;
};
struct Nested {
  std::string name;
  Inner inner;
  std::vector<at::Tensor> list;
  std::optional<at::Tensor> maybe;
  std::pair<at::Tensor, double> pair;
  std::tuple<at::Tensor, std::vector<Inner>> tuple;
  std::vector<double> plain;
  const char* text = "";
};
struct Three {
  at::Tensor data, target, weight;
};
struct Two {
  at::Tensor target, data;  // the names count, not the order
};
class Private {
 public:
  explicit Private(at::Tensor t) : hidden_(std::move(t)) {}
  template <class F>
  void for_each_tensor(F&& f) {
    f(hidden_);
  }
  template <class F>
  void for_each_tensor(F&& f) const {
    f(hidden_);
  }
  std::int64_t rows() const { return 7; }
  Private slice_rows(std::int64_t begin, std::int64_t end) const {
    return Private(hidden_.narrow(0, begin, end - begin));
  }

 private:
  at::Tensor hidden_;
};
struct Derived : td::Batch {
  at::Tensor weight;
  template <class F>
  void for_each_tensor(F&& f) const {
    f(data), f(target), f(weight);
  }
};
}  // namespace

namespace elsewhere {
struct Free {
  at::Tensor values;
};
inline std::int64_t rows(const Free& batch) {
  return batch.values.size(0) / 2;
}
inline Free slice_rows(const Free& batch, std::int64_t begin, std::int64_t end) {
  return {batch.values.narrow(0, 2 * begin, 2 * (end - begin))};
}
template <class F>
void for_each_tensor(Free& batch, F&& f) {
  f(batch.values);
}
template <class F>
void for_each_tensor(const Free& batch, F&& f) {
  f(batch.values);
}
}  // namespace elsewhere

TEST_CASE("every tensor of an aggregate is visited in order, whatever it is wrapped in") {
  Nested batch{.name = "x",
               .inner = {ones(1), 5, ones(2)},
               .list = {ones(3), ones(4)},
               .maybe = ones(5),
               .pair = {ones(6), 0.5},
               .tuple = {ones(7), {{ones(8), 0, ones(9)}}},
               .plain = {1, 2}};
  CHECK(visited(batch) == std::vector<std::int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 9});
  batch.maybe.reset();
  CHECK(visited(std::as_const(batch)) == std::vector<std::int64_t>{1, 2, 3, 4, 6, 7, 8, 9});
  td::for_each_tensor(batch, [](at::Tensor& t) { t = t.mul(2); });  // by reference
  CHECK(std::get<1>(batch.tuple)[0].b[0][0].item<float>() == 2);
  std::vector<at::Tensor> list{ones(1), ones(2)};
  CHECK(visited(list) == std::vector<std::int64_t>{1, 2});
  at::Tensor bare = ones(4);
  CHECK(visited(bare) == std::vector<std::int64_t>{4});
}

TEST_CASE("the count of rows") {
  CHECK(td::rows(td::Batch{ones(3), ones(3)}) == 3);
  CHECK(td::rows(td::Batch{at::ones({}), at::ones({})}) == 1);
  CHECK(td::rows(Two{.target = ones(2), .data = ones(2)}) == 2);
  CHECK(td::rows(Three{ones(3), ones(1), ones(2)}) == 3);  // of the first; the others may be anything
  CHECK(td::rows(Private(ones(2))) == 7);
  CHECK(td::rows(elsewhere::Free{ones(8)}) == 4);
  CHECK(td::rows(ones(5)) == 5);
  CHECK_SAYS(td::DataError, "3 rows of data but 2 of target", td::rows(td::Batch{ones(3), ones(2)}));
}

TEST_CASE("which batches can be sliced, and how") {
  static_assert(td::sliceable_batch<td::Batch> && td::sliceable_batch<Two> && td::sliceable_batch<Private> &&
                td::sliceable_batch<elsewhere::Free>);
  static_assert(!td::sliceable_batch<Three>, "weight would be left whole");
  static_assert(!td::sliceable_batch<Derived>, "and so would a derived type's own tensor");
  static_assert(!td::sliceable_batch<Nested> && !td::sliceable_batch<at::Tensor>);
  const td::Batch whole{at::arange(6), at::arange(6)};
  const auto part = td::slice_rows(whole, 2, 5);
  CHECK(at::equal(part.data, at::arange(2, 5)));
  CHECK(at::equal(part.target, at::arange(2, 5)));
  CHECK(part.data.is_alias_of(whole.data));
  CHECK(td::rows(td::slice_rows(whole, 3, 3)) == 0);
  CHECK(td::rows(td::slice_rows(elsewhere::Free{ones(8)}, 1, 3)) == 2);
}

TEST_CASE("a derived batch brings its own visit") {
  const Derived batch{{ones(1), ones(1)}, ones(1)};
  CHECK(visited(batch) == std::vector<std::int64_t>{1, 1, 1});
}

TEST_CASE("precision casts inputs, not targets") {
  std::vector<std::int64_t> seen;
  const auto note = [&](const at::Tensor& t) { seen.push_back(t.size(0)); };
  td::Batch batch{ones(1), ones(2)};
  td::for_each_input(batch, note);
  CHECK(seen == std::vector<std::int64_t>{1});
  Three three{ones(3), ones(4), ones(5)};
  td::for_each_input(three, note);
  CHECK(seen == std::vector<std::int64_t>{1, 3, 4, 5});
}

namespace {
struct Counting {
  struct Iterator {
    const Counting* owner;
    int at;
    const td::Batch& operator*() const { return owner->batch; }
    Iterator& operator++() { return ++at, *this; }
    bool operator!=(int end) const { return at != end; }
  };
  Iterator begin() { return {this, 0}; }
  int end() const { return count; }
  td::Batch batch;
  int count = 0;
};
struct Reseeded : Counting {
  void set_epoch(std::int64_t) {}
};
struct MoveOnly {
  at::Tensor data;
  std::unique_ptr<int> mine;
};
}  // namespace

TEST_CASE("what is a loader") {
  static_assert(td::loader<std::vector<td::Batch>> && td::loader<const std::vector<td::Batch>&>);
  static_assert(td::loader<std::unique_ptr<std::vector<td::Batch>>> && td::loader<std::list<td::Batch>*>);
  static_assert(td::loader<Counting> && td::loader<td::Batch(&)[3]>);
  static_assert(!td::loader<int> && !td::loader<td::Batch> && !td::loader<at::Tensor*>);
  static_assert(td::sized_loader<std::vector<td::Batch>> && !td::sized_loader<Counting> &&
                !td::sized_loader<std::forward_list<td::Batch>>);
  static_assert(td::reseedable_loader<Reseeded> && !td::reseedable_loader<Counting>);
  CHECK(td::detail::batches_of(std::vector<int>(3)) == 3);
  CHECK(td::detail::batches_of(std::forward_list<int>(3)) == -1);
}

TEST_CASE("the last batch is known as the last, once, and a loop can be left") {
  const auto plain = [](auto&& next) { return next(); };
  for (const int count : {0, 1, 2, 5}) {
    CAPTURE(count);
    std::vector<int> list;
    for (int i = 0; i < count; ++i) list.push_back(i);
    std::vector<int> seen;
    int lasts = 0;
    td::detail::for_each_batch<true>(
        list,
        [&](int value, bool last) {
          seen.push_back(value);
          lasts += last;
          if (last) CHECK(value == count - 1);
          return true;
        },
        plain);
    CHECK(seen == list);
    CHECK(lasts == (count > 0));
  }
  std::vector<int> list{1, 2, 3};
  int calls = 0;
  td::detail::for_each_batch<true>(
      list, [&](int, bool) { return ++calls < 2; }, plain);
  CHECK(calls == 2);
  int early = 0;
  td::detail::for_each_batch<false>(
      list, [&](int, bool last) { return early += last, ++calls < 4; }, plain);
  CHECK(early == 0);  // nobody looked ahead
  CHECK(calls == 4);
}

TEST_CASE("batches that cannot be copied are moved along") {
  std::vector<MoveOnly> list;
  for (int i = 0; i < 3; ++i) list.push_back({ones(i + 1), std::make_unique<int>(i)});
  int sum = 0;
  td::detail::for_each_batch<true>(
      list, [&](const MoveOnly& batch, bool) { return sum += *batch.mine, true; }, [](auto&& next) { return next(); });
  CHECK(sum == 3);
}

TEST_CASE("metrics keep their order, take new values and name what there is") {
  td::Metrics metrics;
  CHECK(metrics.empty());
  CHECK_SAYS(td::ConfigError, "there is no metric 'loss'; there is none", metrics["loss"]);
  metrics.set("loss", 2);
  metrics.set("accuracy", 0.5);
  metrics.set("loss", 1);
  CHECK(metrics.size() == 2);
  CHECK(metrics["loss"] == 1);
  CHECK(metrics.begin()->first == "loss");
  CHECK(metrics.find("f1") == std::nullopt);
  CHECK_SAYS(td::ConfigError, "there is no metric 'f1'; there is loss, accuracy", metrics["f1"]);
}
