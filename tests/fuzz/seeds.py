#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes what fuzzing begins with: seeds.py <reader> <folder>. Small valid files, from which a fuzzer finds the rest."""
import gzip
import pathlib
import struct
import sys
import zlib


def png(width, height, color):
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    samples = {0: 1, 2: 3, 6: 4}[color]
    rows = b"".join(b"\0" + bytes((x * y) % 256 for x in range(width * samples)) for y in range(height))
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


# A gray picture of 8x8 pixels: one block with nothing but its mean, one Huffman code of each kind.
JPEG = (b"\xff\xd8" + b"\xff\xdb\x00\x43\x00" + b"\x01" * 64 + b"\xff\xc0\x00\x0b\x08\x00\x08\x00\x08\x01\x01\x11\x00"
        + b"\xff\xc4\x00\x14\x00\x01" + b"\0" * 15 + b"\x00" + b"\xff\xc4\x00\x14\x10\x01" + b"\0" * 15 + b"\x00"
        + b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + b"\x3f" + b"\xff\xd9")

IDX = b"\0\0\x0b\x02" + struct.pack(">II", 2, 3) + bytes(range(12))
RECORD = b"\x03" + bytes(i % 251 for i in range(3072))
TOKENS = struct.pack("<200H", *range(200))
HEADER = struct.pack("<256i", 20240520, 1, 200, *[0] * 253)
SEEDS = {
    "Idx": [IDX, gzip.compress(IDX), b"\0\0\x08\x01" + struct.pack(">I", 4) + b"abcd", b"\0\0\x0e\x01" + struct.pack(">Id", 1, 2.5)],
    "Cifar": [RECORD, RECORD * 3, b"\x07" + RECORD, gzip.compress(RECORD)],
    "Tokens": [TOKENS, HEADER + TOKENS, struct.pack("<256i", 20240801, 7, 100, *[0] * 253) + TOKENS],
    "Csv": [b"1,2\n3,4\n", b"a;b\n1;2.5e3\n;4\n", b"x,y\r\n-1, +2\r\n", gzip.compress(b"1,2\n" * 50)],
    "Image": [png(5, 4, 0), png(5, 4, 2), png(3, 7, 6), JPEG],
}

if __name__ == "__main__":
    for number, content in enumerate(SEEDS[sys.argv[1]]):
        (pathlib.Path(sys.argv[2]) / f"seed-{number}").write_bytes(content)
