// SPDX-License-Identifier: Apache-2.0
// treadle-test: LIBRARIES treadle::distributed TIMEOUT 900
// DistributedDataParallel over NCCL: all ranks on the first GPU, which NCCL allows where each calls itself another
// host.
#include "support/skip.hpp"
#define REQUIRE_DEVICE() TREADLE_REQUIRE_CUDA()
#include "distributed/failures.hpp"
#include "distributed/training.hpp"

namespace {
const bool hosts_differ = [] {
  const char* rank = std::getenv("RANK");
  if (rank != nullptr) {
    ::setenv("NCCL_HOSTID", rank, 1);
    ::setenv("NCCL_SOCKET_IFNAME", "lo", 0);
  }
  if (torch::cuda::is_available()) chosen_device() = at::Device(at::kCUDA, 0);
  return true;
}();
}  // namespace

namespace {
const Role stays_role("stays", [](const td::World& world) {
  const auto mine = dealt(ragged(), world);
  std::string said;
  const double taken = seconds_of([&] {
    said = told(world, "", seconds(60), [&](auto& trainer) {
      try {
        trainer.fit(BrokenLoader{{&mine}, world.rank == 1}, {.epochs = 1});
      } catch (const td::DataError&) {
        std::this_thread::sleep_for(seconds(20));  // and the trainer lives on
        throw;
      }
    });
  });
  CAPTURE(said);
  if (world.rank == 0) {
    CHECK(said.find("rank 1: the file ends in the middle") != said.npos);
    CHECK(taken < 15);
  }
});
}  // namespace

TEST_CASE("a throw between steps is told through the store, while the one who threw lives on") {
  REQUIRE_DEVICE();
  CHECK(run_ranks(2, "stays", seconds(40)) == 0);
}
