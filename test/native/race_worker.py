# SPDX-License-Identifier: Apache-2.0
"""One side of the eviction race: `owner` or `reader` (path of the rank table), or `peek` (path of the owner's pool).

A page of key number `k`, written in round `g`, is made of the words `(k << 40) + (g << 20) + position`.
So every page proves by itself that it is whole and for which key it was written; all its extents alike prove that they
are of one generation.
"""

from __future__ import annotations

import random
import sys
import time

import numpy as np
from processes import Pool, frames, ids, key

from banyan._native import RankTable

NUM_FRAMES = 64
NUM_LAYERS = 2
PAGE_BYTES = 1024
NUM_KEYS = 48
RUN = 16
NUM_PLACES = 256
KEYS = [key(number) for number in range(NUM_KEYS)]
POSITIONS = np.arange(PAGE_BYTES // 8, dtype=np.uint64)


def own(rank_table: RankTable) -> None:
    """Withdraws, rewrites and publishes stretches of keys for ever."""
    pool = Pool(NUM_FRAMES, NUM_LAYERS, PAGE_BYTES, "race-owner")
    frame_table = pool.frame_table(rank_table, 0)
    place = random.Random(1)
    free = list(range(NUM_FRAMES))
    frame_of: dict[int, int] = {}
    generation = 0
    num_rewritten = num_quarantined = 0
    pool.pages[:] = POSITIONS  # A whole page of key 0, for whoever looks before the first round.
    print("ready", flush=True)
    while True:
        generation += 1
        first = place.randrange(NUM_KEYS - RUN)
        evicted = [frame_of.pop(number) for number in range(first, first + RUN) if number in frame_of]
        free += ids(frame_table.retire(frames(evicted)))
        num_quarantined += frame_table.num_quarantined > 0
        free += ids(frame_table.drain())
        missing = [number for number in range(first, first + RUN) if number not in frame_of][: len(free)]
        taken = [free.pop(0) for _ in missing]
        tags = np.array([number * (1 << 40) + generation * (1 << 20) for number in missing], dtype=np.uint64)
        pool.pages[:, taken, :] = tags[None, :, None] + POSITIONS
        assert frame_table.publish(frames(taken), [KEYS[number] for number in missing]) == len(missing)
        frame_of.update(zip(missing, taken, strict=True))
        num_rewritten += len(missing)
        if generation % 64 == 0 and not owner_goes_on(generation):
            print("done", num_rewritten, num_quarantined, flush=True)
            return


def owner_goes_on(_generation: int) -> bool:
    import select

    return not select.select([sys.stdin], [], [], 0)[0]


def read(rank_table: RankTable, slot: int, num_copies: int) -> None:
    """Looks up, leases, copies and checks until `num_copies` pages were copied."""
    pool = Pool(NUM_PLACES, NUM_LAYERS, PAGE_BYTES, "race-reader")
    peers = pool.peers(rank_table, slot)
    place = random.Random(slot)
    targets = np.arange(NUM_PLACES, dtype=np.int64)
    copied = missed = torn = 0
    print("ready", flush=True)
    while copied < num_copies:
        loads, numbers, used = [], [], 0
        for _ in range(NUM_PLACES // RUN):
            first = place.randrange(NUM_KEYS - RUN)
            wanted = KEYS[first : first + RUN]
            found = peers.lookup(wanted)
            lease = peers.lease(found, wanted[: found.num_pages]) if found.num_pages else None
            if lease is None:
                missed += 1
                continue
            loads.append((lease, targets[used : used + lease.num_pages]))
            numbers += range(first, first + lease.num_pages)
            used += lease.num_pages
        if loads:
            assert peers.start_copy(loads).finish()
            torn += num_torn(pool.pages[:, :used, :], np.array(numbers, dtype=np.uint64))
            copied += used
    print("done", copied, missed, torn, flush=True)


def peek(path: str, most_s: float) -> None:
    """Copies pages of the owner without any lease, until one is torn: what leases are for."""
    words = np.memmap(path, dtype=np.uint64, mode="r").reshape(2 * NUM_LAYERS, NUM_FRAMES, -1)
    deadline = time.monotonic() + most_s
    torn = copied = 0
    while torn == 0 and time.monotonic() < deadline:
        pages = words.copy()
        numbers = pages[0, :, 0] >> np.uint64(40)
        torn = num_torn(pages, numbers)
        copied += NUM_FRAMES
    print("done", copied, torn, flush=True)


def num_torn(pages: np.ndarray, numbers: np.ndarray) -> int:
    """Pages that are not, in all extents, one page of their key. `pages`: extents x pages x words."""
    tags = pages[0, :, 0]
    right_key = tags >> np.uint64(40) == numbers
    expected = tags[None, :, None] + POSITIONS
    return int((~(right_key & (pages == expected).all(axis=(0, 2)))).sum())


if __name__ == "__main__":
    role, path, *rest = sys.argv[1:]
    if role == "owner":
        own(RankTable.open(path))
    elif role == "reader":
        read(RankTable.open(path), int(rest[0]), int(rest[1]))
    else:
        peek(path, float(rest[0]))
