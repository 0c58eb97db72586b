#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One AdamW step on the 148 tensors of GPT-2 124M: Treadle, torch::optim::AdamW and Python's fused AdamW, interleaved.

Usage: adamw.py PATH/TO/benchmark_adamw [--device cuda] [--blocks N] [--steps N]

Blocks alternate between this process and benchmark_adamw --serve, one at a time. Prints a JSON line for each block and one with the
medians. Needs a Python that imports torch.
"""
import argparse
import json
import statistics
import subprocess
import time

import torch


def gpt2_shapes() -> list[tuple[int, ...]]:
    d = 768
    block = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(50257, d), (1024, d)] + block * 12 + [(d,), (d,)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--blocks", type=int, default=11)
    parser.add_argument("--steps", type=int, default=0)
    options = parser.parse_args()
    device = torch.device(options.device)
    steps = options.steps or (50 if device.type == "cuda" else 2)

    torch.manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in gpt2_shapes()]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=1e-2, fused=True)

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def python_block() -> float:
        synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            optimizer.step()
        synchronize()
        return (time.perf_counter() - begin) / steps

    with subprocess.Popen([options.binary, "--serve", "--device", options.device], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as server:
        if server.stdout.readline().strip() != "ready":
            raise SystemExit(f"adamw.py: {options.binary} did not start")

        def served_block(name: str) -> float:
            server.stdin.write(f"{name} {steps}\n")
            server.stdin.flush()
            return float(server.stdout.readline())

        for _ in range(2):
            python_block()  # makes the state
        contestants = {"treadle": lambda: served_block("treadle"), "libtorch": lambda: served_block("libtorch"),
                       "python_fused": python_block}
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for block in range(options.blocks):
            for name, run in contestants.items():
                seconds[name].append(run())
                print(json.dumps({"block": block, "name": name, "ms_a_step": 1e3 * seconds[name][-1]}), flush=True)
        server.stdin.close()

    def ratio(first: str, second: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[first], seconds[second]))

    print(json.dumps({
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "tensors": len(parameters), "elements": sum(p.numel() for p in parameters), "blocks": options.blocks, "steps": steps,
        "median_ms_a_step": {name: 1e3 * statistics.median(values) for name, values in seconds.items()},
        "treadle_to_libtorch": ratio("treadle", "libtorch"), "treadle_to_python_fused": ratio("treadle", "python_fused"),
        "targets": {"treadle_to_libtorch": 0.20 if device.type == "cuda" else 0.45, "treadle_to_python_fused": 1.01}}))


if __name__ == "__main__":
    main()
