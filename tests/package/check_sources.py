#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rules that no compiler checks: check_sources.py <project root>. See CONTRIBUTING.md for the reasons."""
import pathlib
import re
import sys

LICENSE = "SPDX-License-Identifier: Apache-2.0"
LONGEST_HEADER = 300
# The umbrella's promise: these come only with the header of the policy that needs them.
NOT_IN_UMBRELLA = re.compile(r"nccl|cuda_runtime|ATen/cuda/|c10/cuda/|nvrtc|nlohmann", re.IGNORECASE)


def includes_of(path):
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(encoding="utf-8"), re.MULTILINE)


def closure(header, include_dir):
    """The header and every header of this project that it reaches."""
    seen, todo = [], [header]
    while todo:
        path = todo.pop()
        if path in seen:
            continue
        seen.append(path)
        todo += [include_dir / name for name in includes_of(path) if (include_dir / name).is_file()]
        todo += [path.parent / name for name in includes_of(path) if (path.parent / name).is_file()]
    return seen


def main():
    root = pathlib.Path(sys.argv[1]).resolve()
    include_dir = root / "include"
    errors = []
    headers = sorted(include_dir.rglob("*.hpp"))
    sources = headers + [path for folder in ("tests", "examples", "benchmarks", "cmake", "scripts")
                         for path in sorted((root / folder).rglob("*"))
                         if path.suffix in (".cpp", ".hpp", ".cmake", ".py", ".sh") or path.name == "CMakeLists.txt"]
    for path in sources:
        head = path.read_text(encoding="utf-8").splitlines()[:2]
        if not any(LICENSE in line for line in head):
            errors.append(f"{path.relative_to(root)}: the first line must hold '{LICENSE}'")
    for path in headers:
        name = path.relative_to(root)
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > LONGEST_HEADER:
            errors.append(f"{name}: {len(lines)} lines, and {LONGEST_HEADER} are the most: split it")
        if "#pragma once" not in lines:
            errors.append(f"{name}: no #pragma once")
        if "torch/torch.h" in includes_of(path):
            errors.append(f"{name}: includes torch/torch.h, which costs each user 12 s: include what it uses")
        if re.search(r"^\s*using namespace torch\b", path.read_text(encoding="utf-8"), re.MULTILINE):
            errors.append(f"{name}: 'using namespace torch' makes names such as 'cuda' ambiguous for its users")
    umbrella = include_dir / "treadle" / "treadle.hpp"
    if umbrella.is_file():
        for path in closure(umbrella, include_dir):
            for name in includes_of(path):
                if NOT_IN_UMBRELLA.search(name):
                    errors.append(f"{path.relative_to(root)}: includes {name}, and the umbrella reaches it")
    for error in errors:
        print(error, file=sys.stderr)
    print(f"{len(headers)} headers, {len(sources)} files, {len(errors)} errors")
    return 1 if errors or not headers else 0


if __name__ == "__main__":
    sys.exit(main())
