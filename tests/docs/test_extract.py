#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""extract.py's own test: pages that it must accept, and pages that it must refuse with the sentence given here."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

COMPILER = sys.argv.pop(1) if len(sys.argv) > 1 else "c++"
SCRIPT = pathlib.Path(__file__).resolve().parent / "extract.py"
README = "# Project\n\n```sh\nscripts/a\nscripts/b\n```\n"


def fenced(mark, *lines):
    comment = f"<!-- compile: {mark} -->\n" if mark else ""
    return comment + "```cpp\n" + "\n".join(lines) + "\n```\n"


class Extract(unittest.TestCase):
    def run_on(self, page, readme=README):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "docs").mkdir()
            (root / "scripts").mkdir()
            for script in ("a", "b"):
                (root / "scripts" / script).write_text("")
            (root / "README.md").write_text(readme)
            (root / "docs" / "page.md").write_text(page)
            (root / "preamble.hpp").write_text("#pragma once\n#define TREADLE_DOC_PARAMETERS int given\n")
            (root / "command").write_text(f"{COMPILER}\n-std=c++20\n-fsyntax-only\n")
            result = subprocess.run(
                [sys.executable, "-B", str(SCRIPT), "--root", folder, "--work", str(root / "units"),
                 "--preamble", str(root / "preamble.hpp"), "--command-file", str(root / "command")],
                capture_output=True, text=True, check=False)
            return result.returncode, result.stdout + result.stderr

    def accept(self, page, units):
        status, output = self.run_on(page)
        self.assertEqual(status, 0, output)
        self.assertIn(f"{units} translation units", output)

    def refuse(self, page, sentence, readme=README):
        status, output = self.run_on(page, readme)
        self.assertNotEqual(status, 0, output)
        self.assertIn(sentence, output)

    def test_fragments_share_one_unit(self):
        self.accept(fenced("statements", "int a = given;") + fenced("statements", "int a = 2;") +
                    fenced("declarations", "#include <vector>", "std::vector<int> a;"), 1)

    def test_programs_are_units(self):
        self.accept(fenced("program", "int main() {}") + fenced("program", "int main() { return 0; }"), 2)

    def test_continue_sees_the_block_before(self):
        self.accept(fenced("statements", "int a = given;") + "prose\n" + fenced("continue", "int b = a;"), 1)

    def test_broken_fragment(self):
        self.refuse(fenced("statements", "int a = 1;", "int b = nowhere;"), "page.md:4")

    def test_broken_program(self):
        self.refuse(fenced("program", "int main() { nowhere(); }"), "page.md:3")

    def test_program_gets_no_preamble(self):
        self.refuse(fenced("program", "void f(TREADLE_DOC_PARAMETERS) {}"), "TREADLE_DOC_PARAMETERS")

    def test_comment_missing(self):
        self.refuse(fenced("", "int a;"), "a cpp block without a comment")

    def test_comment_must_be_adjacent(self):
        self.refuse("<!-- compile: statements -->\nprose\n```cpp\nint a;\n```\n", "a cpp block without a comment")

    def test_unknown_kind(self):
        self.refuse(fenced("nothing", "int a;"), "'compile: nothing' is none of")

    def test_continue_without_a_start(self):
        self.refuse(fenced("continue", "int a;"), "'continue' without a fragment before it")

    def test_unclosed_block(self):
        self.refuse("```cpp\nint a;\n", "this code block never ends")

    def test_three_commands(self):
        self.refuse("", "exactly two command lines, and holds 3", "```sh\nscripts/a\nscripts/b\nscripts/a\n```\n")

    def test_command_that_is_no_script(self):
        self.refuse("", "does not start with a script", "```sh\nscripts/a\nmake it so\n```\n")


if __name__ == "__main__":
    unittest.main()
