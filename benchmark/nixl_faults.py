# SPDX-License-Identifier: Apache-2.0
"""Pulls whose source lies, dies or stands still, drawn from a seed: is a wrong byte ever taken for a good one, and is a
frame ever written after its pull has ended?

    python -m benchmark.nixl_faults --num 10000

All of Banyan's own code of a pull runs, but for the process boundary: NIXL is a stand-in that copies as it is told, and
errs as it is told. Real processes are killed and stopped in test/native/test_nodes_by_nixl.py.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from banyan import _native
from banyan.features.nodes.exported_arena import PartFrames
from banyan.features.nodes.nixl_pulls import NixlCarrier
from banyan.features.nodes.pull import Ended, Pull
from banyan.features.nodes.wire import MAX_AGENT_BYTES, ReadableLease, pack_sums
from banyan.layout import BlockGeometry
from banyan.transport.nixl import layer_reads
from banyan.transport.nixl.process import StillWriting
from benchmark.results import write_report

NAMESPACE = b"n" * 32
NUM_LAYERS, LAYER_BYTES = 4, 4096
BLOCK = BlockGeometry(((LAYER_BYTES // 2, LAYER_BYTES // 2),) * NUM_LAYERS)
PIECE_BYTES, NUM_PIECES = 2 * LAYER_BYTES, 3
"""A page is read in so many: its first layer, two more, the last one."""

NUM_FRAMES, MOST_PAGES = 12, 6
BASE, THERE = 1 << 40, 1 << 41
"""Where the two memories are said to lie."""

FAULTS = (
    "none",
    "a bit",
    "another page",
    "nothing written",
    "overwritten later",
    "error",
    "process dies",
    "stands still",
    "stands still, and does not die",
    "layers too soon",
    "foreign message",
    "places of other memory",
    "places that are too few",
    "places beyond all memory",
    "given up",
)


class Violation(Exception):
    """What must not happen."""


class FakeNixl:
    """Reads that copy between two memories, and err. Implements ``layer_reads.Reads``."""

    def __init__(self, here: memoryview, there: bytes, frames: Sequence[int], rng: random.Random, fault: str) -> None:
        self._here, self._there, self._frames = here, there, set(frames)
        self._rng = rng
        self._fault = fault
        self._at = rng.randrange(NUM_PIECES * len(frames))
        self._num_moves = 0
        self.is_dead = False
        self.pending: list[tuple[int, bytes]] = []
        """What is still to be written."""

    def begin(self, peer: str, to: Any, from_: Any, /) -> Any:
        moves = [(int(a[0]) - BASE, int(b[0]) - THERE, int(a[1])) for a, b in zip(to, from_, strict=True)]
        for place, _, num_bytes in moves:
            first, last = place // BLOCK.frame_bytes, (place + num_bytes - 1) // BLOCK.frame_bytes
            if first != last or first not in self._frames:
                raise Violation(f"a read into byte {place}, which is none of the pull's")
        for place, source, num_bytes in moves:
            self.pending.append((place, self._erring(source, num_bytes)))
            self._num_moves += 1
        return len(self.pending)

    def _erring(self, source: int, num_bytes: int) -> bytes:
        if not 0 <= source <= len(self._there) - num_bytes:
            raise OSError("NIXL knows no such memory")
        found = self._there[source : source + num_bytes]
        if self._num_moves != self._at:
            return found
        match self._fault:
            case "a bit":
                wrong = bytearray(found)
                wrong[self._rng.randrange(num_bytes)] ^= 1 << self._rng.randrange(8)
                return bytes(wrong)
            case "another page" | "overwritten later":
                return self._rng.randbytes(num_bytes)
            case "nothing written":
                return b""
            case "error":
                raise OSError("a read ended as ERR")
        return found

    def is_done(self, handle: Any, /) -> bool:
        if self._fault.startswith("stands still") and self._num_moves > self._at:
            return False
        self.write()
        return True

    def write(self) -> None:
        """All that is under way arrives, unless its process is dead."""
        for place, found in [] if self.is_dead else self.pending:
            self._here[place : place + len(found)] = found
        self.pending.clear()


class FakeProcess:
    """A NIXL process, as far as a carrier knows it, and one pull's channel in it."""

    def __init__(self, nixl: FakeNixl, fault: str, now: Callable[[float], None]) -> None:
        self._nixl = nixl
        self._fault = fault
        self._pass = now
        self._num_asked = 0
        self.over: list[Callable[[], None]] = []

    def carry(self, metadata: bytes, places: bytes, offsets: bytes, layer_bytes: Sequence[int]) -> FakeProcess:
        if self._fault == "places that are too few":
            raise Violation("they were taken for enough")
        self._reading = layer_reads.Reading("there", BASE, offsets, places, layer_bytes)
        return self

    def num_landed(self) -> int | None:
        self._num_asked += 1
        match self._fault:
            case "process dies" if self._num_asked > 2:
                self._nixl.is_dead = True
                raise ConnectionError("the process has ended")
            case "layers too soon":
                return NUM_LAYERS
            case "foreign message":
                raise OSError("the process says what it does not say")
        before = self._reading.num_done
        try:
            self._reading.step(self._nixl)
        except OSError as error:
            # A process ends at the first error of NIXL.
            self._nixl.is_dead = True
            raise ConnectionError("the process has ended") from error
        if self._reading.num_done == before:
            self._pass(0.25)
            return None
        return self._reading.num_landed

    def end(self) -> None:
        self._reading.stop()
        if self._nixl.is_dead or self._reading.is_over:
            return
        if self._fault == "stands still, and does not die":
            raise StillWriting(self)  # type: ignore[arg-type]
        self._nixl.is_dead = True

    @property
    def popen(self) -> FakeProcess:
        return self

    def wait(self) -> None:
        """Of the process that does not die: what was under way comes, and then it is dead."""
        self._nixl.write()
        self._nixl.is_dead = True


def _places(fault: str, frames: Sequence[int], rng: random.Random) -> array[int]:
    places = array("Q", [THERE + frame * BLOCK.frame_bytes for frame in frames])
    match fault:
        case "places of other memory":
            end = THERE + NUM_FRAMES * BLOCK.frame_bytes
            places[rng.randrange(len(places))] = rng.choice([0, BASE, THERE - 1, end])
        case "places that are too few":
            places = places[:-1] if rng.random() < 0.5 else places + places[:1]
        case "places beyond all memory":
            places[rng.randrange(len(places))] = rng.choice([2**64 - 1, 2**63, 2**63 - 1])
    return places


def one_pull(rng: random.Random, fault: str) -> Ended:
    """
    Raises:
        Violation: when a page that was called good is not, or a frame was written that nobody may write.
    """
    num_pages = rng.randint(1, MOST_PAGES)
    keys = [rng.randbytes(32).hex() for _ in range(num_pages)]
    there = _native.SharedBytes.create(NUM_FRAMES * BLOCK.frame_bytes, "there")
    memoryview(there)[:] = rng.randbytes(there.num_bytes)
    sources, targets = (rng.sample(range(NUM_FRAMES), num_pages) for _ in range(2))
    sums = [
        there.checksums(NAMESPACE, keys, _starts(sources, layer), LAYER_BYTES, layer) for layer in range(NUM_LAYERS)
    ]
    here = _native.SharedBytes.create(NUM_FRAMES * BLOCK.frame_bytes, "here")
    memoryview(here)[:] = bytes([170]) * here.num_bytes
    now_s = [0.0]
    nixl = FakeNixl(memoryview(here), bytes(memoryview(there)), targets, rng, fault)
    process = FakeProcess(nixl, fault, lambda took_s: now_s.__setitem__(0, now_s[0] + took_s))
    agent = rng.randbytes(rng.randint(1, min(64, MAX_AGENT_BYTES)))
    lease = ReadableLease(1, b"t" * 16, 1, pack_sums(sums), agent, _places(fault, sources, rng).tobytes())
    offsets = array("q", [frame * BLOCK.frame_bytes for frame in targets])
    feed = _native.Feed(here, offsets, BLOCK.block_bytes, NUM_LAYERS)
    read = feed.read()
    carrier = NixlCarrier(lambda: process, lease, clock=lambda: now_s[0])  # type: ignore[arg-type, return-value]
    num_looks = rng.randint(0, 4) if fault == "given up" else sys.maxsize
    looks = iter(range(num_looks))
    ended = Pull(NAMESPACE, keys, PartFrames(here, offsets, BLOCK.layer_bytes), feed).carry(
        lease, "there", carrier, lambda: next(looks, None) is not None
    )
    _settled(read, nixl, here)
    lost = {position for position, _ in read.finish()}
    for page, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if page not in lost and _page(here, target) != _page(there, source):
            raise Violation(f"{fault}: page {page} is wrong and was called good, {ended}")
    for frame in set(range(NUM_FRAMES)) - set(targets):
        if _page(here, frame) != bytes([170]) * BLOCK.block_bytes:
            raise Violation(f"{fault}: frame {frame}, which is not the pull's, was written")
    return ended


def _settled(read: _native.Read, nixl: FakeNixl, here: _native.SharedBytes) -> None:
    """Once the read has ended, what still arrives changes nothing."""
    if not read.has_ended and not read.is_late:
        raise Violation("a pull has returned, and its read goes on")
    while not read.has_ended:
        pass
    before = bytes(memoryview(here))
    nixl.write()
    if bytes(memoryview(here)) != before:
        raise Violation("a frame was written after its read had ended")


def _starts(frames: Sequence[int], layer: int) -> array[int]:
    return array("q", [frame * BLOCK.frame_bytes + layer * LAYER_BYTES for frame in frames])


def _page(memory: _native.SharedBytes, frame: int) -> bytes:
    start = frame * BLOCK.frame_bytes
    return bytes(memoryview(memory)[start : start + BLOCK.block_bytes])


def run(num: int, seed: int) -> dict[str, Any]:
    """What became of ``num`` pulls, by fault."""
    rng = random.Random(seed)
    ends: Counter[tuple[str, str]] = Counter()
    # Several reads a pull.
    were = layer_reads.CHUNK_BYTES, layer_reads.PIECE_BYTES
    layer_reads.CHUNK_BYTES = layer_reads.PIECE_BYTES = PIECE_BYTES
    try:
        for number in range(num):
            fault = FAULTS[number % len(FAULTS)]
            ends[fault, one_pull(rng, fault).value] += 1
    finally:
        layer_reads.CHUNK_BYTES, layer_reads.PIECE_BYTES = were
    return {
        "num_pulls": num,
        "num_wrong": 0,
        "ends": {fault: {end: n for (of, end), n in sorted(ends.items()) if of == fault} for fault in FAULTS},
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.nixl_faults", description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/remote"))
    args = parser.parse_args(argv)
    found = run(args.num, args.seed)
    write_report(args.out / "nixl_faults.json", found, args)
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
