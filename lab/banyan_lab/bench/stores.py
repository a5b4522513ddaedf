# SPDX-License-Identifier: Apache-2.0
"""Any store by its URL, through the interface that a server uses: pages down, and up again whole and layer by layer.

A put counts until the store says that it is stored; what that means is the store's: Banyan's own files are synced then,
others are not. Reads pass the page cache where the store does.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from banyan.ports import PageStore
from banyan.store.backends import Space, open_store
from banyan.store.location import StoreLocation
from banyan_lab.bench.store.blocks import SHAPES, Blocks, Shape

NUM_ROUNDS = 5
PAGES_AT_ONCE = 32
"""In one put, as a prompt's."""


def run(url: str) -> list[dict[str, Any]]:
    """A row for each shape: median GB/s over the rounds. What was stored is removed, folders stay."""
    location = StoreLocation.parse([part for part in url.split(",") if part])
    return [{"store": str(location), **_measure(shape, location)} for shape in SHAPES]


def _measure(shape: Shape, location: StoreLocation) -> dict[str, Any]:
    blocks = Blocks(shape)
    quota_bytes = 4 * shape.num_bytes + (64 << 20)
    store = open_store(
        location,
        namespace=os.urandom(32),
        layer_bytes=[shape.layer_bytes] * shape.num_layers,
        space=Space(quota_bytes=quota_bytes, share_bytes=quota_bytes, floor_bytes=0),
    )
    seconds: dict[str, list[float]] = {"put": [], "get": [], "layerwise_get": []}
    try:
        for _ in range(NUM_ROUNDS):
            keys = blocks.fresh_keys()
            seconds["put"].append(_put_s(store, blocks, keys))
            # What the page cache still has to write is not to be written at the reads' expense.
            os.sync()
            seconds["get"].append(_get_s(store, blocks, keys, shape.num_layers))
            seconds["layerwise_get"].append(_get_s(store, blocks, keys, 1))
            store.clear()
            store.sync()
        engine = store.engine
    finally:
        store.close()
    gbps = {
        f"{what}_gbps": statistics.median(shape.num_bytes / s / 1e9 for s in taken) for what, taken in seconds.items()
    }
    return {"block": shape.name, "block_bytes": shape.block_bytes, "engine": engine, **gbps}


def _put_s(store: PageStore, blocks: Blocks, keys: list[str]) -> float:
    start_s = time.perf_counter()
    first = 0
    while first < len(keys):
        some = keys[first : first + PAGES_AT_ONCE]
        parent = keys[first - 1] if first else None
        answers = store.put(some, parent, blocks.memory, blocks.source_offsets[first : first + len(some)])
        num_taken = sum(answer == "queued" for answer in answers)
        first += num_taken
        if not num_taken:
            time.sleep(0.001)
    if store.sync():
        raise RuntimeError("the store could not write: it may be too small for 400 MB")
    taken_s = time.perf_counter() - start_s
    store.completed()
    return taken_s


def _get_s(store: PageStore, blocks: Blocks, keys: list[str], layers_per_step: int) -> float:
    blocks.forget_targets()
    start_s = time.perf_counter()
    found = store.lookup(keys)
    read = store.read(
        found, found.num_pages, blocks.memory, blocks.target_offsets[: found.num_pages], layers_per_step=layers_per_step
    )
    failed = read.finish()
    taken_s = time.perf_counter() - start_s
    if failed or found.num_pages < len(keys):
        raise RuntimeError(f"{len(keys) - found.num_pages} of {len(keys)} pages are not there, {len(failed)} failed")
    blocks.check_targets()
    return taken_s
