# SPDX-License-Identifier: Apache-2.0
"""What a rank is like now, beside what it has counted: the figures of its state that ``/metrics`` shows too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WINDOW_MINUTES = {"15m": 15, "1h": 60, "24h": 24 * 60}
"""What a ceiling is told for: the last minutes, by the end of its name."""

GAUGES = {
    "up_s": "how long this rank has been up",
    "num_pool_pages": "pages that this rank's pool has",
    "num_free_pages": "of these, pages that hold nothing; those in quarantine are counted",
    "num_published_pages": "pages of this rank's pool that the peers may fetch",
    "num_quarantined_pages": "freed pages that a peer is still reading",
    "num_ranks": "data-parallel ranks of this server on this node",
    "num_live_ranks": "of these, ranks that are there and share",
    "num_silent_ranks": "of these, ranks that have requests and have not reported to the dispatcher for 30 s",
    "distinct_share": "distinct pages over pages held in all pools, by a sample; 1: no page is held twice",
    "duplicate_share": "share of this rank's pages that another pool or the arena holds too, by a sample",
    "num_arena_frames": "pages that this rank's part of the host arena has room for",
    "num_arena_pages": "pages that it holds",
    **{
        f"heard_tokens_{name}": f"prompt tokens of the node of the last {name} that this rank has heard of"
        for name in WINDOW_MINUTES
    },
    **{
        f"hit_ceiling_{name}": f"of these of the last {name}, the share found or computed before"
        for name in WINDOW_MINUTES
    },
    "hit_share_half": "of these of the last 24h, the share that half the arena would find (without one: the pools)",
    "hit_share_same": "of those, the share that as many pages as now would find, if the latest asked for stayed",
    "hit_share_double": "of those, the share that twice the arena would find (without one: the pools)",
    "store_write_bytes_per_day": "bytes that this rank may write to the store in a day; 0: no limit",
}
"""By their names in /server_info, with their meaning for /metrics."""

STATE_COUNTERS = {
    "num_failures": "faults of Banyan's own in any process of this server on this node, which SGLang was spared: every "
    "rank and shard shows all of them; please report them",
    "num_arena_evicted_pages": "pages that this rank's part of the host arena has evicted since the start",
}
"""Of the same state, what only grows."""

STORE_GAUGES = {
    "backlog_pages": "pages that wait to be written to the store",
    "num_records": "pages that the store holds, by whichever server",
    "own_places": "places in this rank's files of the store",
    "free_places": "of these, places that hold nothing",
    "is_stopped": "1: the store takes no writes: a thread failed, or no manifest can be written",
}
"""The same for what a store tells."""

STORE_COUNTERS = {
    "written_bytes": "bytes written to the store since the start",
    "written_pages": "pages written to the store since the start",
    "put_full": "pages that the store did not take: its back-log was full, or it took no writes",
    "evicted_pages": "pages that the store has evicted since the start",
    "checksum_failures": "pages of the store that did not verify",
    "read_errors": "reads that the store's device or mount failed",
    "write_failures": "pages that were to be written and were not, those that a flush gave up as well",
    "write_errors": "writes that the store's device or library failed, but for want of space on a device",
    "growth_failures": "times the store could not grow, but for its limits, a lock or want of space",
    "stalls": "times the store's device did not answer in time",
    "sync_timeouts": "times nobody waited any longer for what was to be written",
    "lost_threads": "threads of the store that have failed; nothing is looked up or stored there any more",
    "no_space_pauses": "times writes paused because the file system was full",
    "floor_refusals": "times the store did not grow, because little was free on its file system",
    "untold_moves": "pages of the store of which routers were not told that they came or went: too many at once",
}
"""Of a store's, what only grows."""

TOLD_GAUGES = {
    "num_prefixes": "prefixes that the cache keeps by command",
    "num_pages": "pages of these",
    "num_pool_pages": "of these, pages that this rank's pool keeps",
    "num_tenants": "tenants that these are kept for",
    "most_pages_of_tenant": "pages that one tenant may have kept",
}
"""The same for what the cache was told."""

TOLD_COUNTERS = {
    "num_refused": "pins that were refused since the start",
    "num_untold": "actions of requests, and marks of `cache_control`, that were skipped since the start",
}
"""Of that, what only grows."""

SECTIONS = {
    "": (GAUGES, STATE_COUNTERS),
    "store_": (STORE_GAUGES, STORE_COUNTERS),
    "told_": (TOLD_GAUGES, TOLD_COUNTERS),
}
"""Gauges, and what only grows, by what their names in ``SERIES`` begin with: the part of a rank's state that tells
them."""


def gauges_of(state: Mapping[str, Any]) -> dict[str, float]:
    """The gauges in a rank's state, and what counts beside its counters, by their names in ``SERIES``; of an arena, a
    store or a feature that it has not, none."""
    found: dict[str, float] = {}
    for prefix, (gauges, counters) in SECTIONS.items():
        told = state.get(prefix.removesuffix("_"), {}) if prefix else state
        found |= {prefix + name: float(told[name]) for name in (*gauges, *counters) if name in told}
    return found
