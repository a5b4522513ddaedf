# SPDX-License-Identifier: Apache-2.0
"""A rank that will be killed: `reader` (while it copies under leases), `owner` (while it publishes), or `stranger`, to
whom the others' pages are nothing."""

from __future__ import annotations

import sys
import time

import numpy as np
import processes
from processes import Pool, frames, key

from banyan._native import RankTable

NUM_FRAMES = 64
NUM_LAYERS = 4
PAGE_BYTES = 4096
NUM_LEASES = 1000
"""Copies of the reader behind the owner's withdrawal: some 0.1 s."""
WITHIN_S = 60.0


def content(slot: int, frame: int) -> int:
    return slot * 1000 + frame + 1


def fill(pool: Pool, slot: int) -> None:
    pool.pages[:] = np.array([content(slot, frame) for frame in range(NUM_FRAMES)], dtype=np.uint64)[None, :, None]


def rank(rank_table: RankTable, slot: int) -> tuple:
    pool = Pool(NUM_FRAMES, NUM_LAYERS, PAGE_BYTES, f"kill-{slot}")
    fill(pool, slot)
    return pool, pool.frame_table(rank_table, slot), pool.peers(rank_table, slot)


def read_for_ever(rank_table: RankTable, slot: int, num_pages: int) -> None:
    _pool, _frame_table, peers = rank(rank_table, slot)
    wanted = [key(number) for number in range(num_pages)]
    held = peers.lookup(wanted)
    # A copy takes its lease over. Once the owner has withdrawn the pages no lease can be had, so those of
    # the copies that follow are there before: the last is never spent.
    ahead = [peers.lease(held, wanted) for _ in range(NUM_LEASES)]
    print("leased", ahead[0].num_pages, flush=True)
    while len(ahead) > 1:
        lease = peers.lease(held, wanted) or ahead.pop()
        peers.start_copy([(lease, frames(range(num_pages)))]).wait_layer(0)
    time.sleep(WITHIN_S)


def publish_for_ever(rank_table: RankTable, slot: int, num_steady: int) -> None:
    """The first frames stay published; the others come and go all the time."""
    _pool, frame_table, _peers = rank(rank_table, slot)
    frame_table.publish(frames(range(num_steady)), [key(number) for number in range(num_steady)])
    moving = frames(range(num_steady, NUM_FRAMES))
    print("published", flush=True)
    while True:
        frame_table.publish(moving, [key(slot * 10_000 + frame) for frame in moving])
        frame_table.retire(moving)


def stay(rank_table: RankTable, slot: int, _number: int) -> None:
    processes.NAMESPACE = b"s" * 32
    _parts = rank(rank_table, slot)
    print("there", flush=True)
    time.sleep(WITHIN_S)


if __name__ == "__main__":
    role, path, slot, number = sys.argv[1:]
    run = {"reader": read_for_ever, "owner": publish_for_ever, "stranger": stay}[role]
    run(RankTable.open(path), int(slot), int(number))
