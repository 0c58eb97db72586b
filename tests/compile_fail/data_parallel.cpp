// SPDX-License-Identifier: Apache-2.0
// DataParallel has to be able to make more models of the trainer's type.
#include <torch/nn/modules/linear.h>
#include <treadle/parallelism/data_parallel.hpp>
#include <treadle/treadle.hpp>

namespace td = treadle;

/// It has the clone() that every module inherits, which only throws.
struct PlainImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return x; }
};
TORCH_MODULE(Plain);

struct Objective {
  td::Loss operator()(auto& net, const td::Batch& batch) const {
    return td::mean_loss(net.forward(batch.data), batch.target);
  }
};
template <class Net, class P>
void train(const P& parallel) {
  td::Trainer trainer{Net(nullptr), Objective{}, td::optim::AdamW{}, td::policies(parallel)};
}

#if CASE == 0
inline void a() {
  train<torch::nn::Linear>(td::parallelism::DataParallel{});
  train<Plain>(td::parallelism::data_parallel({}, [] { return Plain(); }));
  train<Plain>(td::parallelism::data_parallel({}, [] { return std::make_shared<PlainImpl>(); }));
}
#elif CASE == 1
// expect: parallelism::DataParallel: this model type has no clone() to make replicas with
inline void a() {
  train<Plain>(td::parallelism::DataParallel{});
}
#elif CASE == 2
// expect: parallelism::data_parallel: the factory makes something else than the trainer's model
inline void a() {
  train<Plain>(td::parallelism::data_parallel({}, [] { return torch::nn::Linear(1, 1); }));
}
#elif CASE == 3
// expect: parallelism::data_parallel: the factory makes something else than the trainer's model
inline void a() {
  train<Plain>(td::parallelism::data_parallel({}, 1));
}
#endif
