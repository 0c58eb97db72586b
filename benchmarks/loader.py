#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Samples a second of Treadle's loader, torch::data and Python's DataLoader over the same images, interleaved.

Usage: loader.py PATH/TO/benchmark_loader [--workers N] [--rounds N] [--folder FOLDER]

Images in memory: the 60000 of Fashion-MNIST as floats, shuffled, in batches of 128. Pictures: 10000 of them as JPEG files, which
benchmark_loader --make writes. Needs a Python that imports torch, and for the pictures Pillow; for a comparison of loaders alone Pillow must
be linked with the libjpeg-turbo of the system, as `pip install --no-binary pillow pillow` does.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile
import time

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

try:
    from PIL import Image, features
except ImportError:
    Image = None

BATCH = 128


class Pictures(Dataset):
    def __init__(self, folder: pathlib.Path) -> None:
        classes = sorted(path for path in folder.iterdir() if path.is_dir())
        self.files = [(str(file), number) for number, own in enumerate(classes) for file in sorted(own.glob("*.jpg"))]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        path, target = self.files[i]
        with Image.open(path) as picture:
            picture = picture.convert("L")
            data = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(1, picture.height, picture.width)
        return data, target


def python_loader(dataset: Dataset, workers: int) -> DataLoader:
    return DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0)


def python_epoch(loader: DataLoader) -> float:
    begin = time.perf_counter()
    samples = sum(len(data) for data, _ in loader)
    return samples / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=pathlib.Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or pathlib.Path(temporary) / "pictures"
        if not folder.is_dir():
            subprocess.run([options.binary, "--make", str(folder)], check=True)
        run(options, folder)


def run(options: argparse.Namespace, folder: pathlib.Path) -> None:
    loaders = {"python-memory": python_loader(TensorDataset(torch.rand(60000, 1, 28, 28), torch.randint(10, (60000,))), options.workers)}
    if Image:
        print(json.dumps({"pillow's libjpeg-turbo": features.version("libjpeg_turbo")}))
        loaders["python-jpeg"] = python_loader(Pictures(folder), options.workers)
    for loader in loaders.values():  # the workers start once, with their first epoch
        python_epoch(loader)
    with subprocess.Popen([options.binary, "--serve", str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        if server.stdout.readline().strip() != "ready":
            raise SystemExit(f"loader.py: {options.binary} did not start")

        def served_epoch(name: str) -> float:
            server.stdin.write(f"{name} {options.workers}\n")
            server.stdin.flush()
            samples, seconds = server.stdout.readline().split()
            return int(samples) / float(seconds)

        served = ["memory", "memory-by-sample", "memory-augmented", "torch-memory", "jpeg", "torch-jpeg"]
        rates: dict[str, list[float]] = {name: [] for name in [*served, *loaders]}
        for name in served:
            served_epoch(name)
        for _ in range(options.rounds):
            for name in served:
                rates[name].append(served_epoch(name))
            for name, loader in loaders.items():
                rates[name].append(python_epoch(loader))
        server.stdin.close()
    median = {name: statistics.median(all_of) for name, all_of in rates.items()}
    for name, all_of in rates.items():
        print(f"{name:18} {median[name]:12.0f} samples/s   ({min(all_of):.0f} to {max(all_of):.0f})")
    for ours, theirs in [("memory", "torch-memory"), ("memory", "python-memory"), ("memory-by-sample", "torch-memory"),
                         ("memory-by-sample", "python-memory"), ("jpeg", "torch-jpeg"), ("jpeg", "python-jpeg")]:
        if theirs in median:
            print(f"{ours} / {theirs}: {median[ours] / median[theirs]:.2f}")


if __name__ == "__main__":
    main()
