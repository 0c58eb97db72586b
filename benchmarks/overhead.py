#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Instructions that a step executes in the benchmark's own binary, that is outside LibTorch, by callgrind.

Usage: overhead.py PATH/TO/benchmark_overhead [--functions]

Counted is inside the function counted_loop only, after a warm-up. Treadle's own code is its loop minus the hand-written one,
which makes the same ATen calls and whose inlined ATen code is counted too.
"""
import collections
import os
import re
import subprocess
import sys
import tempfile

STEPS = 40


def instructions(binary: str, loop: str, steps: int) -> collections.Counter:
    """Self instructions by function, of functions that live in the binary."""
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "callgrind.out")
        subprocess.run(
            ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", "--toggle-collect=*counted_loop*", binary, "--loop", loop,
             "--steps", str(steps)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        names: dict[str, str] = {}
        own = collections.Counter()
        in_binary, function, is_call = False, "", False

        def resolve(kind: str, text: str) -> str:
            match = re.match(r"\((\d+)\)(?: (.*))?", text)
            if match.group(2):
                names[kind + match.group(1)] = match.group(2)
            return names[kind + match.group(1)]

        for line in open(out, encoding="utf-8", errors="replace"):
            line = line.rstrip("\n")
            if line.startswith("ob="):
                in_binary = os.path.basename(resolve("ob", line[3:])) == os.path.basename(binary)
            elif line.startswith("fn="):
                function = resolve("fn", line[3:])
            elif line.startswith("cob="):
                resolve("ob", line[4:])
            elif line.startswith("cfn="):
                resolve("fn", line[4:])
            elif line.startswith("calls="):
                is_call = True
            elif line and (line[0].isdigit() or line[0] in "+-*"):
                if not is_call and in_binary:
                    own[function] += int(line.split()[1])
                is_call = False
        return own


def per_step(binary: str, loop: str) -> collections.Counter:
    return collections.Counter({f: count / STEPS for f, count in instructions(binary, loop, STEPS).items()})


def main() -> None:
    binary = sys.argv[1]
    kinds = [a for a in sys.argv[2:] if not a.startswith("-")]
    for kind, limit in (("defaults", 80), ("everything", 1000)):
        if kinds and kind not in kinds:
            continue
        ours, hand = per_step(binary, f"treadle-{kind}"), per_step(binary, f"hand-{kind}")
        total, base = sum(ours.values()), sum(hand.values())
        print(f"{kind}: {total:.0f} instructions a step in the binary against {base:.0f} by hand: "
              f"{total - base:+.0f} (budget {limit})")
        if "--functions" in sys.argv:
            difference = {f: ours[f] - hand[f] for f in set(ours) | set(hand)}
            for function, count in sorted(difference.items(), key=lambda item: -abs(item[1]))[:30]:
                if abs(count) >= 1:
                    print(f"  {count:+8.0f}  {function[:150]}")


if __name__ == "__main__":
    main()
