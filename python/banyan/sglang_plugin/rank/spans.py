# SPDX-License-Identifier: Apache-2.0
"""A fetch in SGLang's own trace of its request (``--enable-trace``): the lookup, and the copy until it has landed.

SGLang draws a request's time on this rank; these spans lie in it where they happened, under ``banyan.lookup`` and
``banyan.copy``. Requests that are not traced cost one look into a table. Scheduler thread only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from sglang.srt.observability.trace import TraceEvent, TraceSliceContext

from banyan.core import Fetch, Offer, Outcome
from banyan.sglang_plugin.rank import requests

LEVEL = 1
"""SGLang's, for one step of a request: shown at every level of detail."""

ENDS = (Outcome.LANDED, Outcome.FAILED)


class Spans:
    """What this rank's fetches add to traces."""

    def __init__(self) -> None:
        self._copies: dict[str, tuple[Fetch, int]] = {}

    def looked_up(self, rid: str, began_ns: int, offer: Offer, num_pages: int) -> None:
        """The first lookup of a request has ended: what was found, and how much of it is to be moved. SGLang asks again
        on every scheduling pass; the answer is kept then, and there is nothing to see."""
        req = requests.traced(rid)
        if req is None or getattr(req, "banyan_is_lookup_traced", False):
            return
        req.banyan_is_lookup_traced = True
        found = {f"banyan.found.{run.kind.value}_pages": run.num_pages for run in offer.runs}
        _add(req, "banyan.lookup", began_ns, {**found, "banyan.planned_pages": num_pages})

    def started(self, fetches: Iterable[Fetch]) -> None:
        """The copies of these begin."""
        for fetch in fetches:
            if requests.traced(fetch.rid) is not None:
                self._copies[fetch.rid] = (fetch, time.time_ns())

    def became(self, rid: str, outcome: Outcome) -> None:
        """A fetch has come so far."""
        copy = self._copies.pop(rid, None) if outcome in ENDS else None
        req = requests.traced(rid)
        if copy is None or req is None:
            return
        fetch, began_ns = copy
        moved = {f"banyan.{kind.value}_tokens": num_tokens for kind, num_tokens in fetch.tokens.items()}
        _add(req, "banyan.copy", began_ns, {**moved, "banyan.outcome": outcome.value}, event=outcome.value)


def _add(req: Any, name: str, began_ns: int, attributes: dict[str, Any], *, event: str = "") -> None:
    ended_ns = time.time_ns()
    req.time_stats.trace_ctx.trace_slice(
        TraceSliceContext(
            slice_name=name,
            start_time_ns=began_ns,
            end_time_ns=ended_ns,
            level=LEVEL,
            attrs=attributes,
            events=[TraceEvent(event, ended_ns, {})] if event else [],
        )
    )
