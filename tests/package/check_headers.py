#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles every public header on its own, warnings being errors: check_headers.py --include <dir> --command-file <file> [--jobs 2]"""
import argparse
import concurrent.futures
import pathlib
import subprocess
import sys

WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]


def check(command, header):
    text = f"#include <{header}>\n"
    result = subprocess.run(command + WARNINGS + ["-x", "c++", "-"], input=text, capture_output=True, text=True, check=False)
    return header, result.returncode, result.stderr


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--include", type=pathlib.Path, required=True)
    parser.add_argument("--command-file", type=pathlib.Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    command = [line for line in arguments.command_file.read_text(encoding="utf-8").split("\n") if line]
    headers = sorted(str(path.relative_to(arguments.include)) for path in arguments.include.rglob("*.hpp"))
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for header, status, output in pool.map(lambda header: check(command, header), headers):
            if status != 0:
                failed += 1
                print(f"{header} does not compile on its own:\n{output}", flush=True)
    print(f"{len(headers)} headers, {failed} failed")
    return 1 if failed or not headers else 0


if __name__ == "__main__":
    sys.exit(main())
