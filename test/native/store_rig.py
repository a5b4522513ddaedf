# SPDX-License-Identifier: Apache-2.0
"""Real stores for the contract of ``ports.PageStore``, and pages to put into them."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from banyan._native import SharedBytes
from banyan.ports import PageStore, StoreFound
from banyan.store import backends
from banyan.store.backends import Space, asked_store, open_store
from banyan.store.location import StoreLocation

LAYER_BYTES = (4096, 28672)
FRAME_BYTES = sum(LAYER_BYTES)
NUM_FRAMES = 16
QUOTA_BYTES = 8 << 20
SPACE = Space(quota_bytes=QUOTA_BYTES, share_bytes=4 << 20, floor_bytes=0)


def key(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def keys(*numbers: int) -> list[str]:
    return [key(number) for number in numbers]


def offsets(*frames: int) -> np.ndarray:
    return np.array(frames, dtype=np.int64) * FRAME_BYTES


def filled(seed: int = 3) -> SharedBytes:
    """Frames of noise."""
    memory = SharedBytes.create(NUM_FRAMES * FRAME_BYTES, "arena")
    words = np.frombuffer(memory, dtype=np.uint64)
    words[:] = np.random.default_rng(seed).integers(0, 1 << 63, len(words), dtype=np.uint64)
    return memory


def frame(memory: SharedBytes, number: int) -> np.ndarray:
    return np.frombuffer(memory, dtype=np.uint8).reshape(NUM_FRAMES, FRAME_BYTES)[number]


def until(condition: Callable[[], bool], *, timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def found(store: PageStore, wanted: list[str]) -> StoreFound:
    """What it holds, as a server finds out: one that has to be asked is asked."""
    asked = asked_store(store)
    if asked is not None:
        number = asked.ask(wanted)
        assert number is not None
        over: list[tuple[int, Any]] = []
        until(lambda: bool(over.extend(asked.answers()) or over))
        assert [said for said, _ in over] == [number]
    return store.lookup(wanted)


def fetch(store: PageStore, memory: SharedBytes, numbers: list[int], first_frame: int, step: int = 1) -> list[Any]:
    """Read pages into the frames from ``first_frame`` on; those that failed."""
    pages = found(store, keys(*numbers))
    assert pages.num_pages == len(numbers)
    targets = offsets(*range(first_frame, first_frame + len(numbers)))
    read = store.read(pages, len(numbers), memory, targets, layers_per_step=step)
    failed = read.finish()
    assert read.has_ended
    return failed


@dataclass
class Place:
    """A store that is not there yet."""

    url: str
    folder: Path
    mounts: Path
    namespace: bytes
    damage: Callable[[], None] = field(default=lambda: None)

    def open(self, namespace: bytes = b"") -> PageStore:
        location = StoreLocation.parse(self.url.split(","))
        return open_store(location, namespace=namespace or self.namespace, layer_bytes=LAYER_BYTES, space=SPACE)

    @property
    def is_on_disk(self) -> bool:
        return not self.url.startswith("mooncake")

    def held_bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self.folder.rglob("*") if path.is_file())

    def flip(self) -> None:
        """Flip a bit in every 4 KiB of every file but those that say what is where."""
        for path in self.folder.rglob("*"):
            if path.is_file() and path.stat().st_size >= FRAME_BYTES and not path.name.startswith("manifest"):
                with path.open("r+b") as file:
                    for start in range(8 << 10, path.stat().st_size, 4096):
                        file.seek(start)
                        byte = file.read(1)
                        file.seek(start)
                        file.write(bytes([byte[0] ^ 1]))


def main(url: str, namespace: str, mounts: str, *numbers: str) -> None:
    """A server's process: stores some pages, says so, and stays until it is killed or its input ends."""
    backends.MOUNTS = Path(mounts)
    place = Place(url, Path(), backends.MOUNTS, bytes.fromhex(namespace))
    store, memory, wanted = place.open(), filled(), [int(number) for number in numbers]
    assert store.put(keys(*wanted), None, memory, offsets(*wanted)) == ["queued"] * len(wanted)
    assert store.sync() == 0
    print("stored", flush=True)
    sys.stdin.read()
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
