# SPDX-License-Identifier: Apache-2.0
"""Valid messages, changed: every reader of bytes that come from a client, a server, a neighbour or a file gets them.
Each reads them or says that it cannot, in the way that its callers expect, and keeps nothing of them.

    make fuzz INPUTS=1000000
    python -m benchmark.byte_fuzz --inputs 1 --from NUMBER

Each input is made by a number and the list of readers alone. What is found gets a test of its reader.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmark.byte_readers import Reader, of_pairs, readers

MOST_CHANGES = 4
MOST_BYTES = 1 << 16
SLOW_S = 0.5
"""For one input of at most ``MOST_BYTES``, of the processor's time."""

MOST_GROWN_BYTES = 128 << 20
WARM = 20_000
"""Inputs before the memory of the process is looked at."""

NUM_LISTED = 20
PLANTED = (
    *(b"\x00", b"\xff", b"\xff" * 8, b"\x80" + b"\x00" * 7, b"\x7f" + b"\xff" * 7, b"\x00" * 64, b"a" * 5000),
    # Of msgpack: no type, and lengths of what does not come.
    *(b"\xc1", b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xca\x7f\xc0\x00\x00"),
    *(b"[" * 3000, b"{" * 50, b"\x91" * 3000),
    *(b"null", b"true", b"-1", b"1e400", b"9" * 400, b"18446744073709551616", b'"', b"\\", b'"\\ud800"', b"[]", b"{}"),
    *(b"\xed\xa0\x80", b"\r\n", b"\n\n", b",", b":", b" ", b"None", b"\xe2\x80\xae"),
)


@dataclass
class Played:
    """How many inputs each reader read, and refused; what was wrong."""

    read: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def play(self, number: int, one: Reader, payload: bytes) -> None:
        """Give one input to a reader."""
        took_s = self._read(number, one, payload)
        # Once is the machine.
        if took_s > SLOW_S and (took_s := self._read(number, one, payload)) > SLOW_S:
            self.wrong.append(f"{number}: {one.name}: took {took_s:.1f} s for {len(payload)} bytes")

    def _read(self, number: int, one: Reader, payload: bytes) -> float:
        began_s = time.thread_time()
        try:
            one.read(payload)
            self.read[one.name] += 1
        except one.refusals:
            self.refused[one.name] += 1
        except Exception as error:  # noqa: BLE001 - that is what is looked for
            self.wrong.append(f"{number}: {one.name}: {type(error).__name__}: {error}"[:300])
        return time.thread_time() - began_s


def drawn(number: int, among: Sequence[Reader]) -> tuple[Reader, bytes]:
    """The reader and the input of a number."""
    rng = random.Random(number)
    one = rng.choice(among)
    payload = bytearray(rng.choice(one.seeds))
    for _ in range(rng.randrange(MOST_CHANGES + 1)):
        rng.choice(CHANGES)(rng, payload, one.seeds)
    return one, bytes(payload[:MOST_BYTES])


def _flip(rng: random.Random, payload: bytearray, _seeds: Sequence[bytes]) -> None:
    if payload:
        payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)


def _cut(rng: random.Random, payload: bytearray, _seeds: Sequence[bytes]) -> None:
    del payload[rng.randrange(len(payload) + 1) :]


def _drop(rng: random.Random, payload: bytearray, _seeds: Sequence[bytes]) -> None:
    start = rng.randrange(len(payload) + 1)
    del payload[start : start + rng.randrange(1, 9)]


def _repeat(rng: random.Random, payload: bytearray, _seeds: Sequence[bytes]) -> None:
    start = rng.randrange(len(payload) + 1)
    piece = payload[start : start + rng.randrange(1, 33)]
    payload[start:start] = piece * rng.randrange(1, 5)


def _plant(rng: random.Random, payload: bytearray, _seeds: Sequence[bytes]) -> None:
    start, piece = rng.randrange(len(payload) + 1), rng.choice(PLANTED)
    payload[start : start + rng.choice((0, 1, len(piece)))] = piece


def _splice(rng: random.Random, payload: bytearray, seeds: Sequence[bytes]) -> None:
    other = rng.choice(seeds)
    payload[rng.randrange(len(payload) + 1) :] = other[rng.randrange(len(other) + 1) :]


CHANGES: tuple[Callable[[random.Random, bytearray, Sequence[bytes]], None], ...] = (
    *(_flip, _flip, _plant, _plant, _drop, _repeat, _splice, _cut),
)


def play(first: int, num_inputs: int, among: Sequence[Reader]) -> Played:
    """So many inputs, from the number ``first`` on."""
    played, warm_bytes = Played(), 0
    for number in range(first, first + num_inputs):
        played.play(number, *drawn(number, among))
        if number - first == WARM:
            warm_bytes = _most_bytes()
    if warm_bytes and (grown := _most_bytes() - warm_bytes) > MOST_GROWN_BYTES:
        played.wrong.append(f"memory grew by {grown >> 20} MiB after {WARM} inputs")
    return played


def _most_bytes() -> int:
    # Not getrusage(): what it says outlives an exec(), so that it may be of the process that has started this one.
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmark.byte_fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--from", dest="first", type=int, help="default: others each time")
    args = parser.parse_args()
    first = time.time_ns() if args.first is None else args.first
    began_s = time.monotonic()
    played = play(first, args.inputs, [*readers(), *of_pairs()])
    took_s = time.monotonic() - began_s
    print(f"{args.inputs} inputs from number {first} on, in {took_s:.0f} s")
    print(
        json.dumps({name: [played.read[name], played.refused[name]] for name in sorted(played.read | played.refused)})
    )
    print("\n".join(played.wrong[:NUM_LISTED]) or "nothing was wrong")
    return 1 if played.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
