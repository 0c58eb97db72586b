#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles the code of README.md and docs/*.md, so that no page shows what does not compile.

    extract.py --root <project> --work <folder> [--command-file <file>] [--jobs 2]

Every ```cpp block follows an HTML comment on the line before it, which readers do not see:

    <!-- compile: program -->         a whole translation unit, compiled as it stands
    <!-- compile: declarations -->    at namespace scope, after preamble.hpp
    <!-- compile: statements -->      in a function, after preamble.hpp; its parameters are the preamble's objects
    <!-- compile: continue -->        goes on in the scope of the block before it

A ```cpp block without one is an error. All fragments become a few translation units. The README's first code block must hold exactly two
command lines. Without --command-file the units are written and counted, not compiled.
"""
import argparse
import concurrent.futures
import pathlib
import re
import subprocess
import sys

MARK = re.compile(r"<!--\s*compile:\s*(\w+)\s*-->\s*$")
FENCE = re.compile(r"^(\s*)(```+)\s*(\S*)\s*$")
KINDS = ("program", "declarations", "statements", "continue")
# One unit costs 10 s and more for the headers alone; an error in one fragment hides nothing in the others.
FRAGMENTS_PER_UNIT = 40


class Block:
    def __init__(self, path, line, language, mark, text):
        self.path, self.line, self.language, self.mark, self.text = path, line, language, mark, text

    @property
    def where(self):
        return f"{self.path.name}:{self.line}"


def blocks_of(path):
    """The fenced blocks of a Markdown file, with the comment that stands directly before each."""
    lines = path.read_text(encoding="utf-8").splitlines()
    found, mark, number = [], None, 0
    while number < len(lines):
        fence = FENCE.match(lines[number])
        if not fence:
            match = MARK.search(lines[number])
            if match:
                mark = match.group(1)
            elif lines[number].strip():
                mark = None
            number += 1
            continue
        indent, ticks, language = fence.groups()
        start = number + 1
        number = start
        while number < len(lines) and not re.match(rf"^\s*{ticks}\s*$", lines[number]):
            number += 1
        if number == len(lines):
            raise SystemExit(f"{path.name}:{start}: this code block never ends")
        text = [line[len(indent):] if line.startswith(indent) else line for line in lines[start:number]]
        found.append(Block(path, start + 1, language, mark, text))
        mark = None
        number += 1
    return found


def check_two_commands(readme):
    blocks = blocks_of(readme)
    if not blocks:
        return [f"{readme.name}: no code block"]
    commands = [line for line in blocks[0].text if line.strip()]
    if len(commands) != 2:
        return [f"{blocks[0].where}: the first code block must hold exactly two command lines, and holds {len(commands)}"]
    errors = []
    for command in commands:
        program = readme.parent / command.split()[0]
        if command.lstrip().startswith("#") or not program.is_file():
            errors.append(f"{blocks[0].where}: '{command}' does not start with a script of this project")
    return errors


def split_includes(text):
    """Includes go to the top of the unit: a function may not hold one."""
    includes = [line for line in text if line.lstrip().startswith("#include")]
    rest = ["" if line.lstrip().startswith("#include") else line for line in text]
    return includes, rest


def write_units(blocks, work, preamble):
    """Writes the translation units; returns their paths and the errors in the pages."""
    errors, programs, scopes = [], [], []
    for block in blocks:
        if block.language not in ("cpp", "c++"):
            if block.mark:
                errors.append(f"{block.where}: a compile comment before a block in '{block.language}'")
            continue
        if block.mark is None:
            errors.append(f"{block.where}: a cpp block without a comment <!-- compile: {'|'.join(KINDS)} --> on the line before it")
        elif block.mark not in KINDS:
            errors.append(f"{block.where}: 'compile: {block.mark}' is none of {', '.join(KINDS)}")
        elif block.mark == "program":
            programs.append(block)
        elif block.mark == "continue":
            if not scopes or scopes[-1][0].path != block.path:
                errors.append(f"{block.where}: 'continue' without a fragment before it on this page")
            else:
                scopes[-1].append(block)
        else:
            scopes.append([block])

    units = []
    for block in programs:
        unit = work / f"program_{block.path.stem}_{block.line}.cpp"
        unit.write_text(f'#line {block.line} "{block.path}"\n' + "\n".join(block.text) + "\n", encoding="utf-8")
        units.append((unit, False))
    for first in range(0, len(scopes), FRAGMENTS_PER_UNIT):
        includes, body = [], []
        for scope in scopes[first:first + FRAGMENTS_PER_UNIT]:
            head = scope[0]
            name = re.sub(r"\W", "_", f"{head.path.stem}_{head.line}")
            statements = head.mark == "statements"
            body.append(f"namespace {name} {{")
            if statements:
                body.append("[[maybe_unused]] static void fragment(TREADLE_DOC_PARAMETERS) {")
            for block in scope:
                more, rest = split_includes(block.text)
                includes += more
                body.append(f'#line {block.line} "{block.path}"')
                body += rest
            if statements:
                body.append("}")
            body.append(f"}}  // namespace {name}")
        unit = work / f"fragments_{first // FRAGMENTS_PER_UNIT}.cpp"
        head = [f"#include {name}" for name in sorted({line.split('#include', 1)[1].strip() for line in includes})]
        unit.write_text("\n".join([f'#include "{preamble}"'] + head + body) + "\n", encoding="utf-8")
        units.append((unit, True))
    return units, errors


def compile_unit(command, unit):
    result = subprocess.run(command + [str(unit)], capture_output=True, text=True, check=False)
    return unit, result.returncode, result.stdout + result.stderr


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--root", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--command-file", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--preamble", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent / "preamble.hpp")
    arguments = parser.parse_args()

    pages = [arguments.root / "README.md"] + sorted((arguments.root / "docs").glob("**/*.md"))
    if not pages[0].is_file():
        raise SystemExit("README.md is missing")
    errors = check_two_commands(pages[0])
    blocks = [block for page in pages for block in blocks_of(page)]
    arguments.work.mkdir(parents=True, exist_ok=True)
    for old in arguments.work.glob("*.cpp"):
        old.unlink()
    units, more = write_units(blocks, arguments.work, arguments.preamble)
    errors += more
    count = sum(1 for block in blocks if block.language in ("cpp", "c++"))
    print(f"{len(pages)} pages, {count} cpp blocks, {len(units)} translation units", flush=True)
    if arguments.command_file and not errors:
        command = arguments.command_file.read_text(encoding="utf-8").split("\n")
        command = [argument for argument in command if argument]
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
            for unit, status, output in pool.map(lambda unit: compile_unit(command, unit[0]), units):
                print(f"{unit.name}: {'compiles' if status == 0 else 'does not compile'}", flush=True)
                if status != 0:
                    errors.append(output.strip())
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
