# SPDX-License-Identifier: Apache-2.0
"""Every sentence of Treadle's that a page quotes is one that the code says.

    check_quotes.py <project folder>

A quotation is a code span, or a comment in a code block, that begins as errors do (`treadle::Trainer: ...`, `optim::AdamW: ...`), and each code
span in the first column of docs/errors.md's table of compile-time sentences. `...` stands for anything. Fails for a quotation that is part of
no sentence, and if there is none to look at.
"""
import pathlib
import re
import sys

SUBJECT = r"(?:treadle|precision|parallelism|accumulation|checkpointing|execution|clipping|nonfinite|averaging|optim)(?:::\w+)*: "
LITERAL = r'"((?:\\.|[^"\\])*)"'
ANYTHING = "\0"  # between two literals, where the code puts a value


def statements(folder):
    """The literals of each statement, in one string."""
    for path in sorted(folder.rglob("*.hpp")):
        text = re.sub(LITERAL + r"|//[^\n]*|/\*.*?\*/", lambda m: m.group() if m.group().startswith('"') else " ", path.read_text(), flags=re.S)
        for statement in re.findall(r'(?:"(?:\\.|[^"\\])*"|[^;"])+', text):
            said, end = "", 0
            for found in re.finditer(LITERAL, statement):
                if statement[end:found.start()].strip():
                    said += ANYTHING
                said += re.sub(r"\\(.)", r"\1", found.group(1))
                end = found.end()
            if said:
                yield said


def quotations(root):
    for page in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        table = False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            table = line.startswith("| sentence begins |") or (table and line.startswith("|"))
            spans = [span for span in re.findall(r"`([^`]+)`", line) if re.match(SUBJECT, span)]
            if table and page.name == "errors.md":
                spans = re.findall(r"`([^`]+)`", line.split("|")[1])
            spans += re.findall(rf"//\s*({SUBJECT}.+)$", line)
            for span in spans:
                yield f"{page.relative_to(root)}:{number}", span


def says(said, quotation):
    place = 0
    for part in filter(None, (part.strip() for part in quotation.split("..."))):
        place = said.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def is_said(sentences, quotation):
    if any(says(said, quotation) for said in sentences):
        return True
    # Helpers are given the name of who complains, so the two stand apart.
    name, colon, rest = quotation.partition(": ")
    return bool(colon) and any(name in said for said in sentences) and any(says(said, rest) for said in sentences)


def main():
    root = pathlib.Path(sys.argv[1])
    sentences = list(statements(root / "include"))
    found = list(quotations(root))
    problems = [f"{place}: the code does not say: {text}" for place, text in found if not is_said(sentences, text)]
    if not found:
        problems.append("no quotation was found, so nothing was compared")
    print("\n".join(problems) or f"{len(found)} quotations, each said by the code")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
