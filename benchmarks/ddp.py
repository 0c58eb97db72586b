#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Steps of DistributedDataParallel, Treadle's against PyTorch's with the fused AdamW, in interleaved blocks over the same ranks.

Usage: ddp.py PATH/TO/benchmark_ddp [--nproc N] [--device cuda] [--blocks N]

Starts two jobs of N ranks, each rank with one thread, that take turns: benchmark_ddp --serve and this program. PyTorch runs twice, with
its defaults and with gradient_as_bucket_view=True, which Treadle's default corresponds to. Prints a JSON line for each block and one
with the medians; "processor" is the processor time of rank 0, all its threads together. Needs a Python that imports torch.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

ROWS, CLASSES = 64, 10
STEPS = {"mlp": 100, "cnn": 8}
TARGETS = {"mlp": 0.90, "cnn": 1.00}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
                         nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, CLASSES))


class Contestant:
    def __init__(self, make, shape, device, views):
        self.device = device
        self.net = nn.parallel.DistributedDataParallel(make().to(device), gradient_as_bucket_view=views)
        self.rule = torch.optim.AdamW(self.net.parameters(), lr=1e-3, fused=True)
        self.batches = [(torch.randn(ROWS, *shape, device=device), torch.randint(CLASSES, (ROWS,), device=device)) for _ in range(8)]
        self.run(20)

    def run(self, steps: int) -> tuple[float, float]:
        dist.barrier()
        processor, begin = time.process_time(), time.perf_counter()
        for i in range(steps):
            x, y = self.batches[i % 8]
            loss = F.cross_entropy(self.net(x), y)
            loss.backward()
            self.rule.step()
            self.rule.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / steps, (time.process_time() - processor) / steps


def work(rank: int, ranks: int, store: str, device: torch.device) -> None:
    torch.set_num_threads(1)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    contestants = {(name, views): Contestant(make, shape, device, views)
                   for name, make, shape in (("mlp", mlp, (256,)), ("cnn", cnn, (1, 28, 28))) for views in (False, True)}
    names = list(contestants)
    if rank == 0:
        print("ready", flush=True)
    while True:
        order = torch.full((2,), -1, dtype=torch.long, device=device)
        if rank == 0:
            words = sys.stdin.readline().split()
            if words:
                order[0], order[1] = names.index((words[0], words[2] == "views")), int(words[1])
        dist.broadcast(order, 0)
        which, steps = order.tolist()
        if which < 0:
            break
        wall, processor = contestants[names[which]].run(steps)
        if rank == 0:
            print(wall, processor, flush=True)
    dist.destroy_process_group()


class Job:
    """Ranks of which the first is asked for blocks."""

    def __init__(self, commands, environment):
        self.processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE if i == 0 else None, text=True,
                                           env=environment) for i, command in enumerate(commands)]
        if self.processes[0].stdout.readline().strip() != "ready":
            raise SystemExit(f"ddp.py: {commands[0][0]} did not start")

    def block(self, line: str) -> tuple[float, float]:
        self.processes[0].stdin.write(line + "\n")
        self.processes[0].stdin.flush()
        wall, processor = self.processes[0].stdout.readline().split()
        return float(wall), float(processor)

    def end(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", nargs="?")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--blocks", type=int, default=41)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(options.rank, options.nproc, options.store, torch.device(options.device))
        return
    if not options.binary:
        parser.error("the path of benchmark_ddp is needed")

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    common = ["--nproc", str(options.nproc), "--device", options.device]
    with tempfile.TemporaryDirectory() as folder:
        jobs = {"treadle": Job([[options.binary, "--serve", *common]], environment)}
        jobs["python"] = Job([[sys.executable, __file__, *common, "--rank", str(rank), "--store", os.path.join(folder, "store")]
                              for rank in range(options.nproc)], environment)
        contestants = {"treadle": ("treadle", ""), "python": ("python", " plain"), "python_views": ("python", " views")}
        measured: dict[str, dict[str, list[tuple[float, float]]]] = {case: {name: [] for name in contestants} for case in STEPS}
        for block in range(options.blocks):
            turn = list(contestants.items())
            for case, steps in STEPS.items():
                for name, (job, suffix) in turn if block % 2 == 0 else reversed(turn):
                    measured[case][name].append(jobs[job].block(f"{case} {steps}{suffix}"))
                    wall, processor = measured[case][name][-1]
                    print(json.dumps({"block": block, "case": case, "name": name, "us_a_step": 1e6 * wall, "us_processor": 1e6 * processor}),
                          flush=True)
        for job in jobs.values():
            job.end()

    summary = {"device": torch.cuda.get_device_name() if options.device != "cpu" else "cpu", "ranks": options.nproc,
               "blocks": options.blocks, "steps": STEPS, "load_average": os.getloadavg()[0], "targets": TARGETS}
    for case, of_case in measured.items():
        for index, what in enumerate(("us_a_step", "us_processor")):
            summary[f"{case}_{what}"] = {name: round(1e6 * statistics.median(both[index] for both in values), 1)
                                         for name, values in of_case.items()}
            for name in ("python", "python_views"):
                summary[f"{case}_{what}_treadle_to_{name}"] = round(statistics.median(
                    ours[index] / theirs[index] for ours, theirs in zip(of_case["treadle"], of_case[name])), 4)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
