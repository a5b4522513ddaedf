# SPDX-License-Identifier: Apache-2.0
"""What a rank tells of itself, for ``/metrics`` and ``/server_info``. It only looks. Scheduler thread only."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from banyan.sglang_plugin import runtime
from banyan.telemetry import Copies, Counters, Pseudonyms, num_ended

if TYPE_CHECKING:
    from banyan.sglang_plugin.rank.one_rank import RankParts

HISTORY_SHARE = 0.05
"""Of the scheduler's thread at most, however often clients ask for what takes milliseconds to tell."""


class RankFigures:
    """One rank's."""

    def __init__(self, parts: RankParts) -> None:
        self._kinds, self._planner, self._demand = parts.kinds, parts.planner, parts.demand
        self._reuse, self._dropped, self._counters = parts.reuse, parts.dropped, parts.setup.counters
        self._page_tokens, self._began_s = parts.setup.page_tokens, parts.began_s
        carried = parts.setup.carried
        self._pseudonyms = Pseudonyms(carried["server"])
        # What the server says of the secret by which it believes whose a request is; "" where it serves everybody.
        self._tenants = str(carried.get("tenants", ""))
        self._history: dict[str, Any] = {}
        self._tells_anew_s = 0.0

    def counters_now(self) -> Counters:
        """The counters, with the control time up to this moment."""
        spent = runtime.STOPWATCH.by_name()
        self._counters.control_us = runtime.STOPWATCH.elapsed_ns // 1000
        self._counters.evict_us = sum(one.own_ns for name, one in spent.items() if name.startswith("evict.")) // 1000
        self._counters.alloc_wait_us = self._kinds.wait_us
        self._planner.count(self._counters)
        self._kinds.full.count(self._counters)
        self._counters.threads_ended = num_ended()
        return self._counters

    def gauges(self) -> dict[str, Any]:
        """What this rank is like now, and cheap to tell: for ``/metrics``."""
        self._demand.hear()
        report, now_s = self._kinds.full.residency_report, time.monotonic()
        copies = report.copies(now_s)
        return {
            **self._kinds.full.figures(),
            **self._stores(),
            **self._room(),
            "distinct_share": copies.distinct_share,
            "duplicate_share": copies.duplicate_share,
            **self._reuse.figures(self._node_pages(report.mean_copies(now_s))),
            "up_s": self._up_s,
        }

    def state(self) -> dict[str, Any]:
        """This rank's part of ``/server_info``."""
        self._demand.hear()
        return {
            **self._kinds.full.state(),
            **self._stores(),
            **self._room(),
            **self.counters_now().as_dict(),
            **self._told_history(),
            **{f"{kind.pools.name}s": kind.state() for kind in self._kinds.beside},
            "hooks": {
                name: {"num_calls": spent.num_calls, "own_us": spent.own_ns // 1000}
                for name, spent in sorted(runtime.STOPWATCH.by_name().items())
            },
            **self._demand.state(),
            "up_s": self._up_s,
            "tenants": self._tenants,
        }

    @property
    def _up_s(self) -> float:
        return round(time.monotonic() - self._began_s, 1)

    def _told_history(self) -> dict[str, Any]:
        """The last prompts, decisions and evictions, and what is counted of pages: as it was a moment ago."""
        began_s = time.monotonic()
        if began_s >= self._tells_anew_s:
            report = self._kinds.full.residency_report
            history = {
                **report.state(),
                **self._reuse.count(self._node_pages(report.mean_copies(began_s))),
                **self._planner.state(),
                "dropped": self._dropped.state(),
            }
            # The only way out: nothing of a client's leaves by its own name.
            self._history = self._pseudonyms.told(history)
            ended_s = time.monotonic()
            self._tells_anew_s = ended_s + (ended_s - began_s) / HISTORY_SHARE
        return self._history

    def _node_pages(self, copies: Copies) -> Callable[[float], float]:
        """Distinct pages that the node would hold with so many times its arena; without one, its pools."""
        pools, arena = self._kinds.node_pages
        if not arena:
            return lambda times: times * pools * copies.distinct_share
        # What lies in the arena as well takes no room of its own.
        return lambda times: pools * (1.0 - copies.duplicate_share) + times * arena

    def _stores(self) -> dict[str, Any]:
        """What changes of the stores of all kinds of pages, together: they are looked after as one."""
        told = [figures for kind in (self._kinds.full, *self._kinds.beside) if (figures := kind.store_figures())]
        if not told:
            return {}
        stats: Counter[str] = Counter()
        for figures in told:
            stats.update(figures["store"])
        if "is_stopped" in stats:
            stats["is_stopped"] = min(1, stats["is_stopped"])
        per_day = sum(figures["store_write_bytes_per_day"] for figures in told)
        return {"store": dict(stats), "store_write_bytes_per_day": per_day}

    def _room(self) -> dict[str, int]:
        allocator = self._kinds.full.pools.allocator
        num_free = allocator.available_size() // self._page_tokens
        return {"num_pool_pages": allocator.num_pages, "num_free_pages": num_free}
