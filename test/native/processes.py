# SPDX-License-Identifier: Apache-2.0
"""Real processes that share pages, driven over pipes by the test."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import banyan
from banyan._native import FrameTable, Peers, RankTable, SharedBytes

NAMESPACE = b"t" * 32
PYTHON_PATH = str(Path(banyan.__file__).resolve().parents[1])


def key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def frames(numbers) -> np.ndarray:
    return np.asarray(numbers, dtype=np.int64)


def ids(freed: bytes) -> list[int]:
    return np.frombuffer(freed, dtype=np.int64).tolist()


class Pool:
    """`num_layers` layers of K and V extents, as 64-bit words; `pages[layer][extent]` has a row for each page."""

    def __init__(self, num_frames: int, num_layers: int, page_bytes: int, label: str) -> None:
        extent_bytes = num_frames * page_bytes
        self.num_frames = num_frames
        self.shared = SharedBytes.create(2 * num_layers * extent_bytes, label)
        self.geometry = [
            [((2 * layer + side) * extent_bytes, page_bytes) for side in (0, 1)] for layer in range(num_layers)
        ]
        words = np.frombuffer(self.shared, dtype=np.uint64)
        self.pages = words.reshape(2 * num_layers, num_frames, page_bytes // 8)

    def frame_table(self, rank_table: RankTable, slot: int) -> FrameTable:
        return FrameTable(rank_table, slot, NAMESPACE, self.shared, self.num_frames, self.geometry)

    def peers(self, rank_table: RankTable, slot: int) -> Peers:
        return Peers(rank_table, slot, slot, NAMESPACE, self.geometry, self.shared)


class Process:
    """A Python process that runs `script` and talks line by line."""

    def __init__(self, script: Path, *arguments: object) -> None:
        path = os.pathsep.join([PYTHON_PATH, str(script.parent), os.environ.get("PYTHONPATH", "")])
        self.popen = subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def expect(self, word: str) -> list[str]:
        """The rest of the next line, which begins with `word`."""
        line = self.popen.stdout.readline().split()
        assert line[:1] == [word], f"expected {word}, got {line}"
        return line[1:]

    def tell(self, line: str) -> None:
        self.popen.stdin.write(line + "\n")
        self.popen.stdin.flush()

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self.popen.kill()
        self.close()

    def close(self) -> None:
        self.popen.stdin.close()
        self.popen.stdout.close()
        self.popen.wait(timeout=30)
