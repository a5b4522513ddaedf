# SPDX-License-Identifier: Apache-2.0
"""What the directory costs at the size of a busy node: lookups, leases, publishing, with the calls from Python."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from banyan._native import FrameTable, Peers, RankTable, SharedBytes

NUM_PAGES = 2_000
NUM_PUBLISHED = 20_000
NUM_ROUNDS = 51
NAMESPACE = b"b" * 32
PAGE_BYTES = 64


def run() -> dict[str, Any]:
    """Medians over the rounds, with two peers of 20,000 published pages each.

    One prompt of 2,000 pages is held by one of them, the other prompt by the two in turns of 100 pages.
    """
    rank_table = RankTable.create(3)
    geometry = [[(0, PAGE_BYTES)]]
    pools = [SharedBytes.create(NUM_PUBLISHED * PAGE_BYTES, f"bench-{slot}") for slot in range(3)]
    frame_tables = [FrameTable(rank_table, slot, NAMESPACE, pools[slot], NUM_PUBLISHED, geometry) for slot in (0, 1)]
    peers = Peers(rank_table, 2, 2, NAMESPACE, geometry, pools[2])
    prompt, turns = _keys("prompt"), _keys("turns")
    own = [_frame_table_keys(slot, prompt, turns) for slot in (0, 1)]
    order = np.random.default_rng(0)
    for frame_table, keys in zip(frame_tables, own, strict=True):
        frame_table.publish(order.permutation(NUM_PUBLISHED), keys)

    def lease_and_release() -> None:
        lease = peers.lease(found, prompt)
        assert lease is not None
        lease.release()

    found = peers.lookup(prompt)
    assert found.num_pages == peers.lookup(turns).num_pages == NUM_PAGES
    return {
        "num_pages": NUM_PAGES,
        "num_peers": len(frame_tables),
        "num_published_per_peer": NUM_PUBLISHED,
        "num_rounds": NUM_ROUNDS,
        "lookup_2000_us": _median_s(lambda: peers.lookup(prompt)) * 1e6,
        "lookup_2000_in_turns_us": _median_s(lambda: peers.lookup(turns)) * 1e6,
        "prefix_lens_2000_us": _median_s(lambda: peers.prefix_lens(prompt)) * 1e6,
        "lease_release_ns_per_page": _median_s(lease_and_release) * 1e9 / NUM_PAGES,
        # Last: it takes away what was found.
        **_republishing(frame_tables[0], own[0]),
    }


def _keys(name: str, num: int = NUM_PAGES) -> list[str]:
    return [hashlib.sha256(f"{name} {number}".encode()).hexdigest() for number in range(num)]


def _frame_table_keys(slot: int, prompt: list[str], turns: list[str]) -> list[str]:
    keys = prompt if slot == 0 else prompt[: NUM_PAGES // 2]
    keys = keys + [key for number, key in enumerate(turns) if number // 100 % 2 == slot]
    return keys + _keys(f"other of {slot}", NUM_PUBLISHED - len(keys))


def _republishing(frame_table: FrameTable, keys: list[str]) -> dict[str, float]:
    """Costs of retiring and of publishing `NUM_PAGES` random frames of a full frame table."""
    retire_s, publish_s = [], []
    frame_table.reset()
    frames = np.arange(NUM_PUBLISHED, dtype=np.int64)
    frame_table.publish(frames, keys)
    order = np.random.default_rng(1)
    for _ in range(NUM_ROUNDS):
        some = order.choice(frames, NUM_PAGES, replace=False)
        their_keys = [keys[frame] for frame in some]
        start = time.perf_counter()
        frame_table.retire(some)
        middle = time.perf_counter()
        assert frame_table.publish(some, their_keys) == NUM_PAGES
        publish_s.append(time.perf_counter() - middle)
        retire_s.append(middle - start)
    return {
        "publish_ns_per_page": statistics.median(publish_s) * 1e9 / NUM_PAGES,
        "retire_ns_per_page": statistics.median(retire_s) * 1e9 / NUM_PAGES,
    }


def _median_s(call: Callable[[], object]) -> float:
    seconds = []
    for _ in range(NUM_ROUNDS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
