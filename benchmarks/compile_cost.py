#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What Treadle's headers cost a compiler: CPU time and memory against <torch/torch.h>.

Usage: compile_cost.py [--compiler g++] [--torch FOLDER] [--repeats 3] [--optimize -O0]

FOLDER is LibTorch's (default: $TREADLE_TORCH_ROOT, the folder that Python imports torch from, or the cache folder). CPU time is that of
the compiler and its children, so other load changes it little; files are compiled in turn and medians are taken.
"""
import argparse
import importlib.util
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
CASES = ["policies(precision::Bf16{})", "policies(accumulation::AccumulateOver{.batches = 4})",
         "policies(precision::Fp16{}, clipping::ClipNorm{})", "policies(averaging::ExponentialAverage{}, nonfinite::Skip{})",
         "policies(accumulation::SplitBatch{}, clipping::ClipValue{}, precision::Tf32{})"]


def find_torch() -> str:
    if root := os.environ.get("TREADLE_TORCH_ROOT"):
        return root
    if spec := importlib.util.find_spec("torch"):
        return spec.submodule_search_locations[0]
    return os.path.expanduser("~/.cache/treadle/torch-2.11.0/torch")


def trainers(count: int) -> str:
    """A program with `count` combinations of policies in one file."""
    text = """#include <torch/nn.h>
#include <treadle/treadle.hpp>
namespace td = treadle;
using namespace treadle;
struct Objective {
  auto operator()(auto& net, const td::Batch& batch) const { return td::mean_loss(net.forward(batch.data), batch.target); }
};
void train(torch::nn::Sequential net, const std::vector<td::Batch>& batches, const auto& set) {
  td::Trainer trainer{net, Objective{}, td::optim::AdamW{}, set};
  trainer.fit(batches, batches);
}
"""
    for i in range(count):
        policies = (["policies()"] + CASES)[i]
        text += f"void train{i}(torch::nn::Sequential net, const std::vector<td::Batch>& data) {{ train(net, data, td::{policies}); }}\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="g++")
    parser.add_argument("--torch", default=find_torch())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--optimize", default="-O0")
    options = parser.parse_args()
    torch = pathlib.Path(options.torch)
    if not (torch / "include/torch/csrc/api/include/torch/torch.h").exists():
        sys.exit(f"compile_cost.py: there is no LibTorch in '{torch}'; name its folder with --torch")
    headers = sorted(str(path.relative_to(ROOT / "include")) for path in (ROOT / "include").rglob("*.hpp"))
    files = {
        "<torch/torch.h>": "#include <torch/torch.h>\n",
        "umbrella": "#include <treadle/treadle.hpp>\n",
        "every header": "".join(f"#include <{header}>\n" for header in headers),
        "<torch/torch.h> and umbrella": "#include <torch/torch.h>\n#include <treadle/treadle.hpp>\n",
        "1 combination": trainers(1),
        f"{1 + len(CASES)} combinations": trainers(1 + len(CASES)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in files}
    memory: dict[str, list[float]] = {name: [] for name in files}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.repeats):
            for name, text in files.items():
                source = os.path.join(folder, "file.cpp")
                pathlib.Path(source).write_text(text, encoding="utf-8")
                child = subprocess.Popen(
                    [options.compiler, "-std=c++20", options.optimize, "-c", source, "-o", source + ".o", f"-I{ROOT / 'include'}",
                     "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", "-isystem", str(ROOT / "include/treadle/shims"), "-isystem", str(torch / "include"), "-isystem", str(torch / "include/torch/csrc/api/include")])
                _, status, usage = os.wait4(child.pid, 0)
                child.returncode = os.waitstatus_to_exitcode(status)
                if child.returncode:
                    sys.exit(f"compile_cost.py: '{name}' does not compile")
                seconds[name].append(usage.ru_utime + usage.ru_stime)
                memory[name].append(usage.ru_maxrss / 1024)

    base_time = statistics.median(seconds["<torch/torch.h>"])
    base_memory = statistics.median(memory["<torch/torch.h>"])
    limits = {"umbrella": 1.10, "every header": 1.50}
    print(f"{options.compiler} {options.optimize}, median of {options.repeats}")
    print(f"{'file':30}  {'CPU s':>7}  {'ratio':>6}  {'MiB':>6}  {'ratio':>6}  limit")
    for name in files:
        time, size = statistics.median(seconds[name]), statistics.median(memory[name])
        print(f"{name:30}  {time:7.2f}  {time / base_time:6.3f}  {size:6.0f}  {size / base_memory:6.3f}  "
              f"{limits[name] if name in limits else '':>5}")
    many = f"{1 + len(CASES)} combinations"
    further = (statistics.median(seconds[many]) - statistics.median(seconds["1 combination"])) / len(CASES)
    print(f"each further combination        {further:7.2f}  (limit 0.6 s)")


if __name__ == "__main__":
    main()
