# SPDX-License-Identifier: Apache-2.0
"""What it costs to read pages that another `--tp` has stored, against reading one's own.

    python -m benchmark.resharding --path FOLDER           # a minute; wants 2 GiB there

Shards of the first size of each case store the pages of a prompt in a folder of their own; one shard of the second size
reads them: bytes of its own pages a second, and bytes read for each of these. Equal sizes: as a rank reads its own
store. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

from banyan._native import SharedBytes, Store
from banyan.features.resharding.heads import heads_of, pieces
from banyan.features.resharding.rank.other_sizes import MEMORY_BYTES
from banyan.features.resharding.rank.stored_shards import Division, Shape
from banyan.layout import BlockGeometry
from benchmark.provenance import provenance

NUM_HEADS, HEAD_BYTES = 8, 256
SHAPES = {"8B, 16 tokens": (32, 16, 160), "70B, 64 tokens": (80, 64, 16)}
"""Layers, tokens of a page, pages."""

CASES = ((1, 1), (2, 1), (8, 1), (1, 2), (1, 8), (4, 2))
ROUNDS = 5
NAMES = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(1024)]


def shape_of(page: str, size: int) -> Shape:
    num_layers, num_tokens, _ = SHAPES[page]
    num_heads = len(heads_of(NUM_HEADS, size, 0))
    part_bytes = num_tokens * num_heads * HEAD_BYTES
    return Shape(BlockGeometry(((part_bytes, part_bytes),) * num_layers), num_heads, num_tokens)


def name_of(size: int, shard: int) -> bytes:
    return hashlib.sha256(f"{size} {shard}".encode()).digest()


def open_store(folder: Path, size: int, shard: int, block: BlockGeometry) -> Store:
    return Store.open([str(folder)], name_of(size, shard), block.layer_bytes, quota_bytes=8 << 30, floor_bytes=0)


def offsets_of(first: int, num_pages: int, frame_bytes: int) -> array[int]:
    return array("q", range(first * frame_bytes, (first + num_pages) * frame_bytes, frame_bytes))


def store_pages(folder: Path, size: int, block: BlockGeometry, names: Sequence[str]) -> None:
    memory = SharedBytes.create(block.frame_bytes * len(names), "banyan-bench")
    memoryview(memory)[:] = (os.urandom(1 << 20) * (len(memory) // (1 << 20) + 1))[: len(memory)]
    for shard in range(size):
        store = open_store(folder, size, shard, block)
        for first in range(0, len(names), 8):
            some = list(names[first : first + 8])
            store.put(
                some, names[first - 1] if first else None, memory, offsets_of(first, len(some), block.frame_bytes)
            )
            store.sync()
        store.close()


def put_together(division: Division, own: Shape, memory: SharedBytes, names: Sequence[str]) -> None:
    """As a rank's thread does."""
    for first in range(0, len(names), division.num_at_once):
        num_pages, reads = division.read(names[first : first + division.num_at_once])
        assert not any(read.failed_pages() for read in reads)
        for place in range(num_pages):
            division.put_together(place, own.parts(memory, (first + place) * own.block.frame_bytes))


def measure(folder: Path, page: str, stored: int, size: int) -> dict[str, object]:
    names, own, theirs = NAMES[: SHAPES[page][-1]], shape_of(page, size), shape_of(page, stored)
    store_pages(folder, stored, theirs.block, names)
    store, frame_bytes = open_store(folder, size, 0, own.block), own.block.frame_bytes
    memory = SharedBytes.create(frame_bytes * len(names), "banyan-bench")
    needed = list(pieces(NUM_HEADS, heads_of(NUM_HEADS, size, 0), stored))
    layer_bytes, num_bytes = theirs.block.layer_bytes, len(needed) * theirs.block.frame_bytes
    shards = [(piece, store.beside(name_of(stored, piece.shard), layer_bytes, len(needed))) for piece in needed]
    scratch = SharedBytes.create(max(MEMORY_BYTES, num_bytes), "banyan-bench")
    division = Division(stored, shards, theirs, scratch)
    store.register(memory)
    seconds = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        if stored == size:
            offsets = offsets_of(0, len(names), frame_bytes)
            read = store.read(store.lookup(names), len(names), memory, offsets, layers_per_step=len(layer_bytes))
            assert read.finish() == []
        else:
            put_together(division, own, memory, names)
        seconds.append(time.perf_counter() - began_s)
    for _, beside in shards:
        beside.close()
    store.close()
    return {
        "page": page,
        "stored_with": stored,
        "read_with": size,
        "gb_per_s": round(len(names) * frame_bytes / statistics.median(seconds) / 1e9, 2),
        "read_per_used": num_bytes / frame_bytes,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.resharding", description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, help="a folder on the drive")
    args = parser.parse_args(argv)
    rows = []
    for page in SHAPES:
        for stored, size in CASES:
            with tempfile.TemporaryDirectory(dir=args.path) as folder:
                rows.append(measure(Path(folder) / "store", page, stored, size))
    print(json.dumps({"rows": rows, **provenance()}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
