# SPDX-License-Identifier: Apache-2.0
"""Trains small models over two Gloo ranks with PyTorch's DistributedDataParallel and writes down what happened, step by step.

    python3 ddp.py --out <file>

writes a dictionary of tensors with torch.save, which LibTorch reads with torch::pickle_load. Keys are <case>/init/<name>,
<case>/<rank>/{x,y}/<micro-batch> and, for each step, <case>/<step>/param/<name>, <case>/<rank>/<step>/loss and
<case>/<rank>/<step>/buffer/<name>. A rank's loss is the mean over its own window.

All ranks have batches of the same size: DistributedDataParallel averages the ranks' means, which is the mean over everything only then.
"""
import argparse
import contextlib
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from reference import CLASSES, ROWS, Mlp

RANKS = 2
STEPS = 8


class Convolutional(nn.Module):
    """Without a bias before the norm: its gradient is 0 but for rounding, and AdamW would make steps of full size out of that."""
    shape = (2, 6, 6)

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 4 * 4, CLASSES)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).flatten(1))


CASES = {"mlp": (Mlp, 1), "mlp_window": (Mlp, 3), "cnn": (Convolutional, 1), "cnn_window": (Convolutional, 3)}


def every_rank(tensor):
    parts = [torch.empty_like(tensor) for _ in range(RANKS)]
    dist.all_gather(parts, tensor)
    return parts


def run(written, rank, name, model, window, seed=3):
    torch.manual_seed(seed + rank)  # DistributedDataParallel makes rank 0's weights everyone's
    net = model()
    if rank == 0:
        for key, value in net.state_dict().items():
            written[f"{name}/init/{key}"] = value.clone()
    torch.manual_seed(seed + 10)
    batches = [[(torch.randn(ROWS, *model.shape), torch.randint(CLASSES, (ROWS,))) for _ in range(STEPS * window)]
               for _ in range(RANKS)]
    for r, own in enumerate(batches):
        for k, (x, y) in enumerate(own):
            written[f"{name}/{r}/x/{k}"] = x
            written[f"{name}/{r}/y/{k}"] = y
    parallel = DistributedDataParallel(net)
    # An fp32 tensor, so that both sides compute with the same bits.
    rule = torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-2), weight_decay=0.05, fused=True)
    for step in range(STEPS):
        reported = torch.zeros(())
        for k in range(window):
            x, y = batches[rank][step * window + k]
            with parallel.no_sync() if k + 1 < window else contextlib.nullcontext():
                loss = F.cross_entropy(parallel(x), y) / window
                loss.backward()
            reported = reported + loss.detach()
        rule.step()
        rule.zero_grad(set_to_none=True)
        for key, value in net.named_parameters():
            written[f"{name}/{step}/param/{key}"] = value.detach().clone()
        for r, value in enumerate(every_rank(reported)):
            written[f"{name}/{r}/{step}/loss"] = value
        for key, value in net.named_buffers():
            for r, of_rank in enumerate(every_rank(value)):
                written[f"{name}/{r}/{step}/buffer/{key}"] = of_rank


def work(rank, store, out):
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    written = {}
    for name, (model, window) in CASES.items():
        run(written, rank, name, model, window)
    if rank == 0:
        torch.save(written, out)
    dist.barrier()
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (os.path.join(folder, "store"), options.out), nprocs=RANKS)


if __name__ == "__main__":
    main()
