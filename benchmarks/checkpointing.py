#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own ways to keep fewer activations, on the model of checkpointing.cpp and in the same form.

Usage: checkpointing.py [--blocks N] [--steps N] [--only NAME] [--compile] [--small]

GPT of the 350M class: 24 blocks, width 1024, 16 heads, 1024 tokens, batch 8, bfloat16 autocast, fused AdamW. "above_gib" is the
allocator's peak above weights and moments, "ratio" the time against "plain" (with --compile, of the compiled rows against "compile plain").
Eager rows are timed in interleaved blocks; a compiled row is made, timed and freed before the next one is set up, since the compiler's
settings hold for the process. Needs a Python that imports torch, and a GPU unless --small.
"""
import argparse
import functools
import json
import math
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

KEPT = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default, torch.ops.aten._scaled_dot_product_cudnn_attention.default]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.attention_in(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self, vocabulary: int, context: int, blocks: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, 0.02)

    def forward(self, x: torch.Tensor, target: torch.Tensor, way: str) -> torch.Tensor:
        y = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        if way == "sqrt n":
            n = math.ceil(math.sqrt(len(self.blocks)))
            for i in range(0, len(self.blocks), n):
                part = self.blocks[i:i + n]
                y = checkpoint(lambda z, part=part: functools.reduce(lambda a, block: block(a), part, z), y, use_reentrant=False)
        else:
            for block in self.blocks:
                if way == "every block":
                    y = checkpoint(block, y, use_reentrant=False)
                elif way == "selective":
                    def policy(context, op, *args, **kwargs):
                        return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
                    y = checkpoint(block, y, use_reentrant=False,
                                   context_fn=functools.partial(create_selective_checkpoint_contexts, policy))
                else:
                    y = block(y)
        logits = F.linear(self.norm(y), self.tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


class Row:
    def __init__(self, name: str, sizes: dict, batch, device: str, way: str, compiled: bool = False, budget: float = 1.0) -> None:
        torch.manual_seed(1)
        self.name, self.batch, self.device, self.way, self.times = name, batch, device, way, []
        with torch.device(device):
            self.model = Model(**sizes)
        self.rule = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.call = self.model
        if compiled:
            torch._dynamo.reset()
            torch._functorch.config.activation_memory_budget = budget
            self.call = torch.compile(self.model)
        for _ in range(4):
            self.step()
        self.above = self.measure()

    def step(self) -> None:
        hooks = torch.autograd.graph.save_on_cpu(pin_memory=self.device == "cuda") if self.way == "save_on_cpu" else None
        with torch.autocast(self.device, dtype=torch.bfloat16):
            if hooks:
                with hooks:
                    loss = self.call(*self.batch, self.way)
            else:
                loss = self.call(*self.batch, self.way)
        loss.backward()
        self.rule.step()
        self.rule.zero_grad(set_to_none=True)

    def measure(self) -> float:
        if self.device != "cuda":
            return 0.0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            self.step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = (dict(vocabulary=512, context=64, blocks=4, width=64, heads=4) if arguments.small else
             dict(vocabulary=50304, context=1024, blocks=24, width=1024, heads=16))
    tokens = torch.randint(sizes["vocabulary"], (2 if arguments.small else 8, sizes["context"] + 1), device=device)
    batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    wanted = [("plain", "plain", False, 1.0), ("every block", "every block", False, 1.0), ("sqrt n", "sqrt n", False, 1.0),
              ("selective", "selective", False, 1.0), ("save_on_cpu", "save_on_cpu", False, 1.0)]
    if arguments.compile:
        wanted += [("compile plain", "plain", True, 1.0), ("compile budget 0.5", "plain", True, 0.5),
                   ("compile every block", "every block", True, 1.0)]
    wanted = [row for row in wanted if not arguments.only or row[0] in (arguments.only, "plain", "compile plain")]

    def time_one(row: Row) -> None:
        row.step()
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(arguments.steps):
            row.step()
        if device == "cuda":
            torch.cuda.synchronize()
        row.times.append((time.perf_counter() - began) * 1e3 / arguments.steps)

    def print_row(row: Row, plain: list) -> None:
        ratios = [mine / theirs for mine, theirs in zip(row.times, plain)]
        print(json.dumps({"name": row.name, "above_gib": round(row.above, 3), "ms": round(statistics.median(row.times), 2),
                          "ratio": round(statistics.median(ratios), 3), "ratio_least": round(min(ratios), 3),
                          "ratio_largest": round(max(ratios), 3), "torch": torch.__version__}), flush=True)

    eager = [Row(name, sizes, batch, device, way) for name, way, compiled, _ in wanted if not compiled]
    for _ in range(arguments.blocks):
        for row in eager:
            time_one(row)
    for row in eager:
        print_row(row, eager[0].times)
    del row, eager
    plain = []
    for name, way, compiled, budget in wanted:
        if not compiled:
            continue
        row = Row(name, sizes, batch, device, way, compiled, budget)
        for _ in range(arguments.blocks):
            time_one(row)
        plain = plain or row.times
        print_row(row, plain)
        del row


if __name__ == "__main__":
    main()
