# SPDX-License-Identifier: Apache-2.0
"""The store against what the file system gives, and against others that store the same blocks as durably.

Everything on one path, in one run: each round measures every contender once, in an order of its own, so that neither a
slow minute of the machine nor a neighbour hits always the same one. Reads are cold (O_DIRECT, or with the page cache
dropped). A put counts until it is durable.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from banyan_lab.bench.store.blocks import SHAPES, Blocks, Shape
from banyan_lab.bench.store.ours import Ceiling, OurStore, has_ceiling
from banyan_lab.bench.store.peers import Peer, open_peers
from banyan_lab.bench.store.provenance import describe
from banyan_lab.bench.store.ratios import BASES, CEILINGS, Times, is_nixl, is_ours, ratios

NUM_ROUNDS = 7
NUM_READ_ROUNDS = 21
"""More rounds of those that only read, from plain files or records: a tenth of a second each, where shared drives vary
by a third from one to the next."""
NUM_WRITE_ROUNDS = 21
"""And of Banyan's puts and plain durable writes, for the same reason."""
NUM_GET_ROUNDS = 70
"""Still more of whole pages, Banyan's and NIXL's: they differ by less than their medians of a few rounds do."""


Act = tuple[str, str, Callable[[], float]]
"""Who, what, and the call that takes its seconds."""


def run(path: str) -> dict[str, Any]:
    """Measure below ``path``; the ratios are the worst over the block sizes. Leaves nothing behind."""
    results = []
    with tempfile.TemporaryDirectory(dir=path, prefix="banyan-bench-") as folder:
        for shape in SHAPES:
            place = Path(folder) / shape.name
            place.mkdir()
            results.append(_measure(shape, place))
            shutil.rmtree(place)
    worst = {name: _least(result["ratios"][name] for result in results) for name in BASES}
    return {**worst, "blocks": results, **describe(path)}


def _least(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return min(known) if known else None


def _measure(shape: Shape, place: Path) -> dict[str, Any]:
    blocks = Blocks(shape)
    ceiling = Ceiling(shape, place / "plain") if has_ceiling() else None
    ours = OurStore(blocks, place / "store")
    peers, missing = open_peers(blocks, place)
    if ceiling is None:
        missing["ceiling"] = "the native core was built without it (in a checkout: make setup)"
    times: Times = {}

    def timed(name: str, what: str, act: Callable[[], float]) -> None:
        # What somebody else has left in the page cache is not to be written at this one's expense.
        os.sync()
        times.setdefault((name, what), []).append(act())

    acts = _acts(ceiling, ours, peers)
    shuffled = random.Random(0)
    for _ in range(NUM_ROUNDS):
        for act in shuffled.sample(acts, len(acts)):
            timed(*act)
    reads = [act for act in acts if _only_reads(act[0], act[1])]
    gets = [act for act in reads if act[1] == "get"]
    writes = [act for act in acts if act[1] == "durable_write" or (act[1] == "put" and is_ours(act[0]))]
    phases = ((NUM_READ_ROUNDS, reads), (NUM_GET_ROUNDS, gets), (NUM_WRITE_ROUNDS, writes))
    for num_rounds, contenders in phases:
        for _ in range(num_rounds):
            for act in shuffled.sample(contenders, len(contenders)):
                timed(*act)
    for number in range(NUM_ROUNDS):
        pair = (("read_alone", ours.layerwise_read_s), ("read_while_writes_wait", ours.read_with_backlog_s))
        for what, read in pair if number % 2 else reversed(pair):
            timed("banyan", what, read)
    ours.close()
    for peer in peers:
        peer.close()
    rows = [_row(name, what, seconds, shape) for (name, what), seconds in times.items()]
    return {
        "block": shape.name,
        "num_layers": shape.num_layers,
        "layer_bytes": shape.layer_bytes,
        "block_bytes": shape.block_bytes,
        "num_blocks": shape.num_blocks,
        "ratios": ratios(times),
        "rows": rows,
        "missing": missing,
        "backlog_drained_s": ours.drained_s,
    }


def _acts(ceiling: Ceiling | None, ours: OurStore, peers: Sequence[Peer]) -> list[Act]:
    """What a round measures."""
    acts = [] if ceiling is None else _ceiling_acts(ceiling)
    acts += [
        ("banyan", "put", ours.put_s),
        ("banyan", "layerwise_read", ours.layerwise_read_s),
        ("banyan", "get", ours.get_s),
    ]
    for peer in peers:
        # There has to be something to get.
        peer.put_s()
        acts += [(peer.name, "put", peer.put_s), (peer.name, "get", peer.get_s)]
    return acts


def _ceiling_acts(ceiling: Ceiling) -> list[Act]:
    acts: list[Act] = []
    for memory, name in CEILINGS.items():
        for depth in ceiling.read_depths:
            acts.append((f"{name}, depth {depth}", "layerwise_read", partial(ceiling.read_s, depth, memory)))
        for depth in ceiling.write_depths:
            acts.append((f"{name}, depth {depth}", "durable_write", partial(ceiling.write_s, depth, memory)))
    return acts


def _only_reads(name: str, what: str) -> bool:
    """Whether it is one of the reads that are held against each other: ours, plain io_uring's, NIXL's."""
    return what == "layerwise_read" or (what == "get" and (is_ours(name) or is_nixl(name)))


def _row(name: str, what: str, seconds: list[float], shape: Shape) -> dict[str, Any]:
    """Median, least and most of all rounds, and each of them: ratios are of rounds, not of these medians."""
    speeds = [shape.num_bytes / taken / 1e9 for taken in seconds]
    return {
        "store": name,
        "what": what,
        "gbps": statistics.median(speeds),
        "least_gbps": min(speeds),
        "most_gbps": max(speeds),
        "num_rounds": len(speeds),
        "gbps_by_round": [round(speed, 3) for speed in speeds],
    }
