#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Two writers fill one store over and over; disk, files, memory and descriptors must stay within their bounds.

    make churn SECONDS=240

Each writer stores chains of pages in the geometry of SmolLM2, comes back to some of them and compares every byte, and
now and then changes its namespace, or leaves and comes again. The sampler looks at both from outside.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from banyan._native import SharedBytes, Store, store_check

LAYER_BYTES = [12288] * 30
FRAME_BYTES = sum(LAYER_BYTES)
NUM_FRAMES = 64
MAX_CHAIN_PAGES = 24
NUM_REMEMBERED = 500
QUOTA_BYTES = 512 << 20
SAMPLE_S = 0.5
MIB = 1 << 20
# What an allocator may keep more at the end than after the first quarter.
MAX_GROWTH_BYTES = 8 * MIB
# A quota has 64 segments (`growth.rs`); for each of two shelves come a manifest, the one that replaces it, and a lock,
# and for the store its own few.
MAX_FILES = 64 + 2 * 4 + 8
MAX_DESCRIPTORS = 96


# ---- a writer --------------------------------------------------------------------------------------------------


class Writer:
    """One process with one store at a time. Frames 0.. are written from, the same number behind them read into."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._random = random.Random(seed)
        self._memory = SharedBytes.create(2 * NUM_FRAMES * FRAME_BYTES, "churn")
        self._words = np.frombuffer(self._memory, dtype=np.uint64).reshape(2 * NUM_FRAMES, FRAME_BYTES // 8)
        self._words[:NUM_FRAMES] = np.arange(FRAME_BYTES // 8, dtype=np.uint64)
        self._chains: deque[list[str]] = deque(maxlen=NUM_REMEMBERED)
        self._num_made = 0
        self._name = f"{seed}"
        self._namespace = b"n" * 32
        self.num_pages_written = 0
        self.num_pages_read = 0
        self._open()

    def _open(self) -> None:
        self._store = Store.open(
            [str(self._folder)],
            self._namespace,
            LAYER_BYTES,
            quota_bytes=QUOTA_BYTES,
            share_bytes=QUOTA_BYTES // 2,
            floor_bytes=0,
        )

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            draw = self._random.random()
            if draw < 0.7 or not self._chains:
                self._write_chain()
            elif draw < 0.998:
                self._read_chain()
            elif draw < 0.999:
                self._change_namespace()
            else:
                self._store.close()
                self._open()
        self._store.close()

    def _new_key(self) -> str:
        self._num_made += 1
        return hashlib.sha256(f"{self._name} {self._num_made}".encode()).hexdigest()

    def _write_chain(self) -> None:
        keys = [self._new_key() for _ in range(self._random.randint(1, MAX_CHAIN_PAGES))]
        for position, key in enumerate(keys):
            self._words[position, :: 12288 // 8] = int(key[:15], 16)
        offsets = np.arange(len(keys), dtype=np.int64) * FRAME_BYTES
        self._store.put(keys, None, self._memory, offsets)
        self._store.sync()
        stored = {key for key, outcome in self._store.completed() if outcome == "stored"}
        self.num_pages_written += len(stored)
        self._chains.append(keys)

    def _read_chain(self) -> None:
        keys = self._random.choice(self._chains)
        found = self._store.lookup(keys)
        offsets = np.arange(NUM_FRAMES, NUM_FRAMES + found.num_pages, dtype=np.int64) * FRAME_BYTES
        failed = {position for position, _ in self._store.read(found, found.num_pages, self._memory, offsets).finish()}
        for position in set(range(found.num_pages)) - failed:
            wanted = np.arange(FRAME_BYTES // 8, dtype=np.uint64)
            wanted[:: 12288 // 8] = int(keys[position][:15], 16)
            if not np.array_equal(self._words[NUM_FRAMES + position], wanted):
                raise RuntimeError(f"wrong bytes for page {keys[position]}")
        self.num_pages_read += found.num_pages - len(failed)

    def _change_namespace(self) -> None:
        self._namespace = self._random.randbytes(32)
        self._store.invalidate(self._namespace)
        self._chains.clear()


# ---- the sampler -----------------------------------------------------------------------------------------------


@dataclass
class Samples:
    disk_bytes: list[int] = field(default_factory=list)
    num_files: list[int] = field(default_factory=list)
    own_bytes: dict[int, list[int]] = field(default_factory=dict)
    num_descriptors: list[int] = field(default_factory=list)

    def take(self, folder: Path, processes: list[subprocess.Popen[str]]) -> None:
        num_bytes = num_files = 0
        for path in folder.rglob("*"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            num_bytes += status.st_blocks * 512
            num_files += path.is_file()
        self.disk_bytes.append(num_bytes)
        self.num_files.append(num_files)
        for process in processes:
            proc = Path(f"/proc/{process.pid}")
            try:
                lines = (proc / "status").read_text().splitlines()
                self.num_descriptors.append(len(list((proc / "fd").iterdir())))
            except FileNotFoundError:
                continue
            for line in lines:
                if line.startswith("RssAnon:"):
                    self.own_bytes.setdefault(process.pid, []).append(int(line.split()[1]) * 1024)

    def growth_bytes(self) -> int:
        """The greatest difference, over the processes, between the last quarter's memory and the second's."""
        growths = []
        for series in self.own_bytes.values():
            quarter = max(1, len(series) // 4)
            growths.append(statistics.median(series[-quarter:]) - statistics.median(series[quarter : 2 * quarter]))
        return int(max(growths))


def breaches(samples: Samples, num_bad_records: int) -> list[str]:
    """What was not kept, in words."""
    bounds = (
        ("bytes on disk", max(samples.disk_bytes), QUOTA_BYTES),
        ("files", max(samples.num_files), MAX_FILES),
        ("descriptors of a process", max(samples.num_descriptors), MAX_DESCRIPTORS),
        ("bytes of memory more at the end", samples.growth_bytes(), MAX_GROWTH_BYTES),
        ("bad records at the end", num_bad_records, 0),
    )
    return [f"{value} {what}, not at most {bound}" for what, value, bound in bounds if value > bound]


def churn(folder: Path, seconds: float) -> dict[str, Any]:
    """Both writers for so long; the maxima, and what broke its bound."""
    samples = Samples()
    command = [sys.executable, __file__, "--dir", str(folder), "--seconds", str(seconds), "--writer"]
    processes = [subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True) for seed in (1, 2)]
    while any(process.poll() is None for process in processes):
        samples.take(folder, processes)
        time.sleep(SAMPLE_S)
    if any(process.returncode for process in processes):
        raise RuntimeError("a writer failed")
    done = [json.loads(process.communicate()[0]) for process in processes]
    report = store_check([str(folder)])
    return {
        "seconds": seconds,
        "written_gb": sum(one["num_pages_written"] for one in done) * FRAME_BYTES / 1e9,
        "read_gb": sum(one["num_pages_read"] for one in done) * FRAME_BYTES / 1e9,
        "quota_mib": QUOTA_BYTES / MIB,
        "most_disk_mib": max(samples.disk_bytes) / MIB,
        "most_files": max(samples.num_files),
        "most_descriptors": max(samples.num_descriptors),
        "most_memory_mib": max(max(series) for series in samples.own_bytes.values()) / MIB,
        "memory_growth_mib": samples.growth_bytes() / MIB,
        "breaches": breaches(samples, len(report["findings"])),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--dir", type=Path, help="an empty folder for the store; a temporary one if absent")
    parser.add_argument("--writer", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.writer is not None:
        writer = Writer(args.dir, args.writer)
        writer.run(args.seconds)
        print(json.dumps({"num_pages_written": writer.num_pages_written, "num_pages_read": writer.num_pages_read}))
        return 0
    with tempfile.TemporaryDirectory(prefix="banyan-churn-", dir=args.dir) as folder:
        report = churn(Path(folder), args.seconds)
    print(json.dumps(report, indent=1))
    return 1 if report["breaches"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
