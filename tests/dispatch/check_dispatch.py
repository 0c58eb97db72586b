#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""No run-time dispatch in a step: check_dispatch.py OBJDUMP TREADLE_OBJECT HAND_OBJECT CONTROL_OBJECT

Each indirect call is looked up in the line table, which names the inlined function that it was written in. Treadle's object may hold
one only where the hand-written loop's object holds one from the same line of the same header, which is then ATen's or the standard
library's. The exceptions are named below, with their reasons.
"""
import collections
import os
import re
import subprocess
import sys

# x86-64: through a register or memory; aarch64: blr, br.
INDIRECT = re.compile(r"\t(?:bnd |notrack )*(?:(?:callq?|jmpq?)\s+\*|blr[a-z]*\s|br[a-z]*\s+x)")
# (in the name of the function, in the name of the file, why it may be there)
EXCEPTIONS = [
    ("treadle::v0_1::write_text(", "std_function.h", "a step that warns writes to the replaceable sink"),
    ("std::_Sp_counted_ptr_inplace<std::function<void (treadle::v0_1::Severity", "std_function.h", "the sink is freed when replaced"),
    ("", "bits/shared_ptr_base.h", "the last owner of recorded values, or of the sink, frees them as std::shared_ptr does"),
    ("treadle::v0_1::detail::refuse_target(", "treadle/loss.hpp", "the text of LibTorch's error for a class out of range is read"),
]

Call = collections.namedtuple("Call", "function place instruction")


def indirect_calls(objdump: str, path: str) -> list[Call]:
    text = subprocess.run([objdump, "-d", "-l", "-C", "--no-show-raw-insn", path], check=True, capture_output=True, text=True).stdout
    calls, function, place, instructions = [], "", "", 0
    for line in text.splitlines():
        if match := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            function, place = match.group(1), ""
        elif match := re.match(r"(/.*?):(\d+)(?: \(discriminator \d+\))?$", line):
            place = f"{os.path.normpath(match.group(1))}:{match.group(2)}"
        elif re.match(r"\s*[0-9a-f]+:\t", line):
            instructions += 1
            if INDIRECT.search(line):
                calls.append(Call(function, place, line.split("\t", 1)[1].strip()))
    if instructions == 0:
        sys.exit(f"{path}: no instruction was disassembled")
    return calls


def main() -> int:
    objdump, treadle_object, hand_object, control_object = sys.argv[1:5]
    if not os.path.exists(objdump):
        print("SKIPPED: there is no objdump; install binutils")
        return 77
    controls = {call.function for call in indirect_calls(objdump, control_object)}
    missed = [name for name in ("control_virtual(", "control_virtual_tail(", "control_function(", "control_pointer(", "control_member(")
              if not any(function.startswith(name) for function in controls)]
    if missed:
        print(f"the check is blind: it does not see the dispatch in {', '.join(missed)}")
        return 1

    allowed = {call.place for call in indirect_calls(objdump, hand_object)}
    if "" in allowed or any("/include/treadle/" in place for place in allowed):
        print("the hand-written loop's object has no line table, or holds Treadle's code")
        return 1
    calls = indirect_calls(objdump, treadle_object)
    bad, excused = [], collections.Counter()
    for call in calls:
        if call.place in allowed:
            continue
        reason = next((reason for function, file, reason in EXCEPTIONS if function in call.function and f"{file}:" in call.place), None)
        if reason:
            excused[reason] += 1
        else:
            bad.append(call)
    for place in sorted(allowed):
        print(f"the hand-written loop has indirect calls from {place}")
    for reason, count in excused.items():
        print(f"{count} of Treadle's are excepted: {reason}")
    for call in bad:
        print(f"not in the hand-written loop: {call.instruction}\n  from {call.place or 'an unknown line'}\n  in {call.function[:300]}")
    print(f"{len(calls)} indirect calls, {len(bad)} of them Treadle's own")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
