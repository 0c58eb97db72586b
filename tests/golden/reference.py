# SPDX-License-Identifier: Apache-2.0
"""Trains small models with PyTorch's own tools and writes down what happened, step by step.

    python3 reference.py --device cpu --out <folder>

writes <folder>/index.txt, one line `<name> <dtype> <offset> <dims...>` a tensor, and <folder>/data.bin, the tensors one after the
other, little-endian. Names are <case>/init/<parameter>, <case>/x/<micro-batch>, <case>/y/<micro-batch> and, for each step,
<case>/<step>/{loss,rate,skipped,scale,norm,param/<name>,buffer/<name>,average/<name>}. Beside torch nothing is imported, numpy least of all.

Learning rates reach the fused optimizers as fp32 tensors, so that both sides compute with the same bits; what moves them is a real scheduler
on a second optimizer. The cases named *_float_rate hand PyTorch's usual Python float to the optimizer and its scheduler.
"""
import argparse
import array
import os
import sys

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what td::Determinism sets, and read once

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import (CosineAnnealingLR, ConstantLR, LambdaLR, LinearLR, MultiStepLR, OneCycleLR, PolynomialLR,
                                      SequentialLR, StepLR)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

FEATURES, CLASSES, ROWS = 12, 5, 8


class Mlp(nn.Module):
    shape = (FEATURES,)

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.second = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.second(F.relu(self.first(x)))


class Dropping(Mlp):
    def forward(self, x):
        return self.second(F.dropout(F.relu(self.first(x)), 0.3, self.training))


class Convolutional(nn.Module):
    shape = (2, 6, 6)

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 4 * 4, CLASSES)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).flatten(1))


class Writer:
    CODES = {torch.float32: ("f32", "f"), torch.float64: ("f64", "d"), torch.int64: ("i64", "q")}

    def __init__(self, folder):
        os.makedirs(folder, exist_ok=True)
        self.index = open(os.path.join(folder, "index.txt"), "w")
        self.data = open(os.path.join(folder, "data.bin"), "wb")

    def put(self, name, value):
        tensor = value.detach().cpu() if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
        if tensor.dtype in (torch.bfloat16, torch.float16):
            tensor = tensor.float()
        dtype, code = self.CODES[tensor.dtype]
        numbers = array.array(code, tensor.reshape(-1).tolist())
        if sys.byteorder != "little":
            numbers.byteswap()
        print(name, dtype, self.data.tell(), *tensor.shape, file=self.index)
        self.data.write(numbers.tobytes())

    def close(self):
        self.index.close()
        self.data.close()


def run(writer, device, name, optimizer, *, model=Mlp, rate=1e-2, schedule=None, steps=10, window=1, ragged=False, autocast=None,
        scaler=None, clip=None, clip_value=None, average=None, groups=(), float_rate=False, dtype=torch.float32, seed=3, **settings):
    """One case. `groups`: (predicate on the name, rate multiplier, weight decay or None), the first that holds wins."""
    torch.manual_seed(seed)
    net = model().to(device, dtype)
    rows = [ROWS - 2 * (k % window) if ragged else ROWS for k in range(steps * window)]
    batches = [(torch.randn(n, *model.shape, dtype=dtype), torch.randint(CLASSES, (n,))) for n in rows]
    for key, value in net.state_dict().items():
        writer.put(f"{name}/init/{key}", value)
    for k, (x, y) in enumerate(batches):
        writer.put(f"{name}/x/{k}", x)
        writer.put(f"{name}/y/{k}", y)
    batches = [(x.to(device), y.to(device)) for x, y in batches]

    members = [[] for _ in range(len(groups) + 1)]
    for key, parameter in net.named_parameters():
        chosen = next((i for i, (holds, _, _) in enumerate(groups) if holds(key)), len(groups))
        members[chosen].append(parameter)
    described = [{"params": ps, "lr": rate * (groups[i][1] if i < len(groups) else 1.0)} for i, ps in enumerate(members) if ps]
    for i, group in enumerate(g for i, g in enumerate(groups) if members[i]):
        if group[2] is not None:
            described[i]["weight_decay"] = group[2]
    driver = SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": group["lr"]} for group in described], lr=rate)
    if not float_rate:
        for group in described:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=device)
    rule = optimizer(described, **settings)
    scheduled = rule if float_rate else driver
    scheduler = schedule(scheduled) if schedule else None
    scaling = torch.amp.GradScaler(device, enabled=scaler is not None, **(scaler or {}))
    ema = None
    if average is not None:
        ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(average))
        ema.update_parameters(net)  # its first call copies: the average starts from the first weights

    torch.manual_seed(seed + 1)  # what dropout draws from
    last_group = len(described) - 1  # the parameters that no group takes
    for step in range(steps):
        if not float_rate:
            for group, wanted in zip(rule.param_groups, driver.param_groups):
                group["lr"].fill_(wanted["lr"])
        used = float(scheduled.param_groups[last_group]["lr"])
        mine = batches[step * window:(step + 1) * window]
        total = sum(len(y) for _, y in mine)
        reported = 0.0
        buffers = {key: value.clone() for key, value in net.named_buffers()}
        for x, y in mine:
            with torch.autocast(torch.device(device).type, dtype=autocast, enabled=autocast is not None):
                loss = F.cross_entropy(net(x), y)
            loss = loss * (len(y) / total) if ragged else loss / window
            scaling.scale(loss).backward()
            reported = reported + loss.detach()
        norm = None
        if clip is not None:
            scaling.unscale_(rule)
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        if clip_value is not None:
            scaling.unscale_(rule)
            torch.nn.utils.clip_grad_value_(net.parameters(), clip_value)
        before = scaling.get_scale()
        scaling.step(rule)
        scaling.update()
        skipped = scaler is not None and scaling.get_scale() < before
        rule.zero_grad(set_to_none=True)
        if skipped:
            for key, value in net.named_buffers():  # PyTorch would keep the statistics of the batch whose step it skipped
                value.copy_(buffers[key])
        else:
            if scheduler:
                scheduler.step()
            if ema is not None:
                ema.update_parameters(net)

        put = lambda what, value: writer.put(f"{name}/{step}/{what}", value)
        put("loss", reported)
        put("rate", used)
        put("skipped", float(skipped))
        if scaler is not None:
            put("scale", scaling.get_scale())
        if norm is not None:
            put("norm", norm)
        for key, value in net.named_parameters():
            put(f"param/{key}", value)
        for key, value in net.named_buffers():
            put(f"buffer/{key}", value)
        if ema is not None:
            for key, value in ema.module.named_parameters():
                put(f"average/{key}", value)
    if ema is not None:
        with torch.no_grad():
            ema.eval(), net.eval()
            x, y = batches[0]
            with torch.autocast(torch.device(device).type, dtype=autocast, enabled=autocast is not None):
                writer.put(f"{name}/evaluated/average", F.cross_entropy(ema(x), y))
                writer.put(f"{name}/evaluated/weights", F.cross_entropy(net(x), y))


def warm_cosine(rule, warmup, total):
    rise = LinearLR(rule, start_factor=1 / (warmup + 1), end_factor=1.0, total_iters=warmup)
    return SequentialLR(rule, [rise, CosineAnnealingLR(rule, T_max=total - warmup)], milestones=[warmup])


def warmup_stable_decay(t, warmup, total, decay, floor):
    start = total - decay * total
    if t < warmup:
        return (t + 1) / (warmup + 1)
    return 1.0 if t < start else floor if t >= total else 1 + (floor - 1) * (t - start) / (decay * total)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    device = options.device
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    writer = Writer(options.out)

    def case(name, optimizer, **settings):
        settings.setdefault("fused", True)
        run(writer, device, name, optimizer, **settings)

    # Rules, at a constant rate.
    case("adamw", AdamW, weight_decay=0.05)
    case("adamw_amsgrad", AdamW, amsgrad=True, betas=(0.8, 0.95), eps=1e-6)
    case("adam_l2", Adam, weight_decay=0.1)
    case("adamw_double", AdamW, weight_decay=0.05, dtype=torch.float64)
    case("sgd", SGD, rate=0.1)
    case("sgd_momentum", SGD, rate=0.1, momentum=0.9, weight_decay=0.01)
    case("sgd_nesterov", SGD, rate=0.1, momentum=0.9, nesterov=True)
    case("sgd_dampening", SGD, rate=0.1, momentum=0.9, dampening=0.3)
    case("groups", AdamW, weight_decay=0.1, schedule=lambda o: LinearLR(o, 1.0, 0.5, 8),
         groups=[(lambda n: n.endswith(".bias"), 1.0, 0.0), (lambda n: n.startswith("second"), 0.3, None)])

    # Schedules, beyond their end where PyTorch's scheduler holds its last value there.
    case("cosine", AdamW, schedule=lambda o: CosineAnnealingLR(o, T_max=10, eta_min=1e-3))
    case("linear", AdamW, schedule=lambda o: LinearLR(o, start_factor=1.0, end_factor=0.1, total_iters=7))
    case("step", AdamW, schedule=lambda o: StepLR(o, step_size=3, gamma=0.5))
    case("polynomial", AdamW, schedule=lambda o: PolynomialLR(o, total_iters=7, power=2.0))
    case("one_cycle", AdamW, rate=2e-2, steps=12,
         schedule=lambda o: OneCycleLR(o, max_lr=2e-2, total_steps=12, pct_start=0.25, div_factor=10, final_div_factor=100,
                                       cycle_momentum=False))
    case("warmup_cosine", AdamW, schedule=lambda o: warm_cosine(o, 3, 10))
    case("warmup_stable_decay", AdamW, steps=12, schedule=lambda o: LambdaLR(o, lambda t: warmup_stable_decay(t, 2, 10, 0.4, 0.1)))
    case("chain", AdamW, schedule=lambda o: SequentialLR(o, [ConstantLR(o, factor=0.25, total_iters=100),
                                                             CosineAnnealingLR(o, T_max=7)], milestones=[3]))
    case("table", AdamW, schedule=lambda o: MultiStepLR(o, milestones=[2, 5], gamma=0.1))
    case("cosine_float_rate", AdamW, float_rate=True, schedule=lambda o: CosineAnnealingLR(o, T_max=10, eta_min=1e-3))

    # Precision. Scales of 2^22 and more overflow in fp16 at once, and a scale that grows every 3 steps does so again and again.
    forced = {"init_scale": 2.0**22, "growth_interval": 3}
    case("bf16", AdamW, autocast=torch.bfloat16)
    case("fp16", AdamW, autocast=torch.float16, scaler={"init_scale": 1024.0, "growth_interval": 4})
    case("fp16_overflow", AdamW, autocast=torch.float16, scaler=forced, steps=20, schedule=lambda o: CosineAnnealingLR(o, T_max=20))
    case("fp16_overflow_clip", AdamW, autocast=torch.float16, scaler=forced, steps=20, clip=0.2)
    case("fp16_overflow_average", AdamW, autocast=torch.float16, scaler=forced, steps=20, average=0.8)
    # PyTorch's fused SGD leaves its momentum uninitialized when the first step is skipped, so the reference is its host-stepped one.
    case("fp16_overflow_sgd", SGD, rate=0.1, autocast=torch.float16, scaler=forced, steps=20, momentum=0.9, dampening=0.3, fused=False)
    case("fp16_overflow_norm", AdamW, model=Convolutional, autocast=torch.float16, scaler=forced, steps=12)

    # Windows, clipping, averages, other models.
    case("window_4", AdamW, window=4, steps=6)
    case("window_3", AdamW, window=3, steps=6)
    case("window_ragged", AdamW, window=3, steps=6, ragged=True)
    case("window_4_fp16", AdamW, window=4, steps=10, autocast=torch.float16, scaler=forced, schedule=lambda o: StepLR(o, step_size=2, gamma=0.5))
    # With SGD, because Adam's step hardly depends on a gradient's magnitude.
    case("clip", SGD, rate=0.1, momentum=0.9, clip=0.3)
    case("clip_loose", SGD, rate=0.1, momentum=0.9, clip=1e3)
    case("clip_value", SGD, rate=0.1, momentum=0.9, clip_value=0.02)
    case("average", AdamW, average=0.9)
    case("dropout", AdamW, model=Dropping)
    case("dropout_window", AdamW, model=Dropping, window=2, steps=5)
    case("convolution", SGD, model=Convolutional, rate=0.05, momentum=0.9)
    case("everything", AdamW, model=Dropping, window=4, steps=12, autocast=torch.float16, scaler=forced, clip=0.5, average=0.9,
         schedule=lambda o: warm_cosine(o, 3, 12), weight_decay=0.1, groups=[(lambda n: n.endswith(".bias"), 2.0, 0.0)])
    writer.close()


if __name__ == "__main__":
    main()
