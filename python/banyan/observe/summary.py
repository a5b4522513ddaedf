# SPDX-License-Identifier: Apache-2.0
"""A server in one object of plain values: what `banyan top --json` prints and the page shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from banyan.observe.alerts import Above, alerts
from banyan.observe.rates import ALERT_S, WEAR_S, Rates
from banyan.observe.reading import HIT_SOURCES, RankReading, Reading
from banyan.telemetry import WINDOW_MINUTES

RATES = (
    "prompt_tokens",
    "fetched_pages",
    "fetched_bytes",
    "read_bytes",
    "evicted_duplicate_pages",
    "evicted_last_pages",
    "displaced_pages",
    "backed_up_pages",
    "backups_dropped_pages",
    "archived_pages",
    "store_written_bytes",
)
"""Counters that are shown by the second."""

SECONDS_A_DAY = 86_400


def summary(rates: Rates) -> dict[str, Any]:
    """``is_since_start``: the figures by the second are means over the server's life."""
    now = rates.now
    return {
        "url": now.url,
        "model": now.model,
        "num_shards": max((rank.num_shards for rank in now.ranks), default=1),
        "version": now.version,
        "taken_s": round(now.taken_s, 3),
        "is_since_start": rates.is_since_start,
        "hits": hits(rates.total_grown),
        "ceiling": ceiling(now),
        "per_s": {name: round(rates.total_per_s(name), 3) for name in RATES},
        "distinct_share": round(now.distinct_share, 4),
        "changing_lines": [
            {"dp_rank": rank.dp_rank, **asdict(line)} for rank in now.ranks for line in rank.changing_lines
        ],
        "store": _store(rates),
        "ranks": [_rank(rates, rank) for rank in now.ranks],
        "alerts": [
            {
                "name": rule.name,
                "severity": rule.severity,
                "summary": rule.summary,
                "advice": rule.advice,
                "ranks": ranks,
                # Of one that counts, while nobody has looked for as long as alerts are judged over.
                "is_since_start": not isinstance(rule.condition, Above) and rates.over(ALERT_S).is_since_start,
            }
            for rule, ranks in alerts(rates)
        ],
    }


def ceiling(now: Reading) -> dict[str, float]:
    """Shares of prompt tokens: those that could have been found at most, by window, and those that a cache would have
    found with half the memory, the same, and twice. Zeros before the first answer."""
    ceilings = {name: now.of_nodes(f"hit_ceiling_{name}", name) for name in WINDOW_MINUTES}
    return ceilings | {name: now.of_nodes(f"hit_share_{name}", "24h") for name in ("half", "same", "double")}


def hits(grown: Callable[[str], float]) -> dict[str, float]:
    """Prompt tokens by where they were: a source, or "computed". ``grown``: by how much a counter has."""
    found = {source: grown(f"{source}_tokens") for source in HIT_SOURCES}
    return {**found, "computed": max(0.0, grown("prompt_tokens") - sum(found.values()))}


def _rank(rates: Rates, rank: RankReading) -> dict[str, Any]:
    return {
        "dp_rank": rank.dp_rank,
        "up_s": rank.up_s,
        "num_running": rank.num_running,
        "num_waiting": rank.num_waiting,
        "num_used_tokens": rank.num_used_tokens,
        "page_tokens": rank.page_tokens,
        "hits": hits(partial(rates.grown, rank)),
        "per_s": {name: round(rates.per_s(rank, name), 3) for name in RATES},
        "values": dict(sorted(rank.values.items())),
    }


def _store(rates: Rates) -> dict[str, float | None] | None:
    """The store as all ranks together see it; None without one. ``written_bytes_per_day``: as in the last hours."""
    now = rates.now
    if not any(rank.has("store_written_bytes") for rank in now.ranks):
        return None
    told = [rank.value("store_num_records") for rank in now.ranks if rank.has("store_num_records")]
    return {
        # Every rank sees the records of all, where the store tells them.
        "num_records": max(told, default=None),
        "backlog_pages": now.total("store_backlog_pages"),
        "written_bytes": now.total("store_written_bytes"),
        "written_bytes_per_day": round(rates.over(WEAR_S).total_per_s("store_written_bytes") * SECONDS_A_DAY),
        "allowed_bytes_per_day": now.total("store_write_bytes_per_day"),
        "checksum_failures": now.total("store_checksum_failures"),
        "stalls": now.total("store_stalls"),
    }
