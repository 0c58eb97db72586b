// SPDX-License-Identifier: Apache-2.0
// The umbrella: the trainer, every policy, rule and schedule that needs nothing but LibTorch. Observers and
// data sets have headers of their own, treadle/observe/ and treadle/data/.
#pragma once

#include "treadle/accumulation/accumulate_over.hpp"
#include "treadle/accumulation/no_accumulation.hpp"
#include "treadle/accumulation/split_batch.hpp"
#include "treadle/averaging/exponential_average.hpp"
#include "treadle/averaging/no_averaging.hpp"
#include "treadle/checkpointing/no_checkpointing.hpp"
#include "treadle/clipping/clip_norm.hpp"
#include "treadle/clipping/clip_value.hpp"
#include "treadle/clipping/no_clipping.hpp"
#include "treadle/execution/eager.hpp"
#include "treadle/nonfinite/ignore.hpp"
#include "treadle/nonfinite/skip.hpp"
#include "treadle/nonfinite/stop.hpp"
#include "treadle/optim/adam.hpp"
#include "treadle/optim/adamw.hpp"
#include "treadle/optim/adapter.hpp"
#include "treadle/optim/sgd.hpp"
#include "treadle/parallelism/single_device.hpp"
#include "treadle/precision/bf16.hpp"
#include "treadle/precision/bf16_weights.hpp"
#include "treadle/precision/fp16.hpp"
#include "treadle/precision/fp32.hpp"
#include "treadle/precision/tf32.hpp"
#include "treadle/trainer.hpp"
