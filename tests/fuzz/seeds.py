#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes what fuzzing begins with: seeds.py <reader> <folder>. Small valid files, from which a fuzzer finds the rest."""
import gzip
import json
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

def safetensors(data, **tensors):
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


MANIFEST = {"format": "treadle-snapshot", "format_version": 1, "run": "r", "step": 3, "world_size": 2, "exact": True, "device": "cpu",
            "treadle_version": "0.1.0", "torch_version": "2.11.0", "policies": {"precision": "Fp32{}"}, "types": {"precision": "Fp32"},
            "metrics": [["loss", 0.5], ["other", "nan"]], "files": {"model.safetensors": {"bytes": 8, "xxh3": "00000000000000ab"}}}

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
    "Safetensors": [safetensors(b""), safetensors(bytes(24), a=tensor("F32", [2, 2], 0, 16), b=tensor("I64", [], 16, 24)),
                    safetensors(b"\0\1" + bytes(9), x=tensor("BOOL", [2], 0, 2), y=tensor("BF16", [1, 4], 2, 10), z=tensor("F8_E4M3", [1], 10, 11)),
                    safetensors(bytes(4), e=tensor("U64", [0, 3], 0, 0), u=tensor("U16", [2], 0, 4), __metadata__={"format": "pt", "\u00e9": ""})],
    "Manifest": [json.dumps({"content": content, "xxh3": "0000000000000000"}).encode()
                 for content in (MANIFEST, MANIFEST | {"files": {}, "metrics": []}, MANIFEST | {"policies": {}, "types": {}, "step": -1})],
}

if __name__ == "__main__":
    for number, content in enumerate(SEEDS[sys.argv[1]]):
        (pathlib.Path(sys.argv[2]) / f"seed-{number}").write_bytes(content)
