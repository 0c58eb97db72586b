# SPDX-License-Identifier: Apache-2.0
"""Every static_assert with a sentence under include/ has a compile-fail case that demands the sentence.

    check_sentences.py <include folder> <folder of the cases>

Fails for a sentence that no `// expect:` line is part of, for an expectation that fits two different sentences (it could not tell them apart),
and for one that quotes Treadle but fits none.
"""
import pathlib
import re
import sys


def without_comments(text):
    pattern = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/\*.*?\*/', re.S)
    return pattern.sub(lambda m: m.group() if m.group().startswith('"') else " ", text)


def arguments(text, begin):
    """The text between the parenthesis that opens at `begin` and the one that closes it."""
    depth, i = 0, begin
    while True:
        if text[i] == '"':
            i += 1
            while text[i] != '"':
                i += 2 if text[i] == "\\" else 1
        elif text[i] == "(":
            depth += 1
        elif text[i] == ")":
            depth -= 1
            if depth == 0:
                return text[begin + 1:i]
        i += 1


def sentences(folder):
    for path in sorted(folder.rglob("*.hpp")):
        text = without_comments(path.read_text())
        for found in re.finditer(r"\bstatic_assert\s*\(", text):
            inside = arguments(text, found.end() - 1)
            message = re.search(r',\s*((?:"(?:\\.|[^"\\])*"\s*)+)$', inside)
            if message:
                yield path.relative_to(folder), "".join(re.findall(r'"((?:\\.|[^"\\])*)"', message.group(1)))


def main():
    include, cases = map(pathlib.Path, sys.argv[1:3])
    stated = list(sentences(include))
    expected = [(path.name, text.strip()) for path in sorted(cases.glob("*.cpp"))
                for text in re.findall(r"^// expect: (.*)$", path.read_text(), re.M)]
    problems = [f"{path}: no compile-fail case expects: {sentence}" for path, sentence in stated
                if not any(text in sentence for _, text in expected)]
    for name, text in expected:
        fits = {sentence for _, sentence in stated if text in sentence}
        if len(fits) > 1:
            problems.append(f"{name}: fits {len(fits)} different sentences: {text}")
        if not fits and text.startswith("treadle"):
            problems.append(f"{name}: fits no static_assert under {include}: {text}")
    if not stated:
        problems.append(f"{include}: no static_assert with a sentence was found, so nothing was compared")
    print("\n".join(problems) or f"{len(stated)} sentences, each expected by a case")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
