# SPDX-License-Identifier: Apache-2.0
"""What Banyan does for a request, in SGLang's own trace of it (``--enable-trace``).

SGLang draws a request's time on this rank; these spans lie in it where they happened:

  banyan.placed   why the dispatcher sent it here, when it has come
  banyan.lookup   what was found where, and how much of it is to be moved
  banyan.copy     from the start of a fetch until it has landed, inside the forward that follows it
  banyan.landing  one layer of it, from the layer before it on until it is in place
  banyan.wait     the forward waits for a layer
  banyan.layer    one layer of the forward, from its first read of KV until that of the next layer

The last three are details of SGLang's level 3, as its span for each decoded token is. Requests that are not traced cost
one look into a table, and one for each forward. Scheduler thread only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sglang.srt.observability.trace import TraceEvent, TraceSliceContext

from banyan.core import Fetch, Offer, Outcome
from banyan.ports import Copy
from banyan.routing.hint import Decision
from banyan.sglang_plugin.rank import requests

STEP, DETAIL = 1, 3
"""Levels of SGLang's: one step of a request, shown at every level; what steps are made of."""

ENDS = (Outcome.LANDED, Outcome.FAILED)


@dataclass(slots=True)
class _Copying:
    """A fetch of a traced request; ``copy`` once its forward has begun."""

    fetch: Fetch
    began_ns: int
    copy: Copy | None = None


def placed(req: Any, decision: Decision | None) -> None:
    """A request has come; None: SGLang or the client chose this rank."""
    if decision is None or not requests.is_traced(req):
        return
    attributes = {
        "banyan.policy": decision.policy,
        "banyan.reason": decision.reason,
        "banyan.hot_ranks": decision.num_hot_ranks,
        "banyan.dispatch_us": decision.dispatch_us,
        "banyan.held_us": decision.held_us,
        "banyan.seen_elsewhere_tokens": req.dp_max_kv_len,
    }
    _add(req, "banyan.placed", time.time_ns(), attributes)


class TracedForward:
    """The layers of one forward over traced requests."""

    def __init__(self, reqs: Sequence[Any], num_layers: int) -> None:
        self._reqs = reqs
        self._num_layers = num_layers
        self._reads: list[tuple[int, int, int]] = []

    def reads(self, layer: int, waited_s: float) -> None:
        """The forward reads the KV of ``layer``, having waited so long for it. Keys and values are read one after the
        other: only the first read of a layer counts."""
        if self._reads and self._reads[-1][0] == layer:
            return
        self._reads.append((layer, time.time_ns(), round(waited_s * 1e9)))
        if layer == self._num_layers - 1:
            self._tell()

    def _tell(self) -> None:
        for req in self._reqs:
            for layer, read_ns, waited_ns in self._reads:
                if waited_ns:
                    _add(req, "banyan.wait", read_ns - waited_ns, {"banyan.layer": layer}, read_ns, level=DETAIL)
            for (layer, read_ns, _), (_, next_ns, next_waited_ns) in pairwise(self._reads):
                ended_ns = next_ns - next_waited_ns
                _add(req, "banyan.layer", read_ns, {"banyan.layer": layer}, ended_ns, level=DETAIL)
        self._reads = []


class Spans:
    """What this rank's fetches and forwards add to traces."""

    def __init__(self) -> None:
        self._copies: dict[str, _Copying] = {}
        self._prepared: list[Any] = []

    def looked_up(self, request: str, began_ns: int, offer: Offer, num_pages: int) -> None:
        """The first lookup of a request has ended: what was found, and how much of it is to be moved. SGLang asks again
        on every scheduling pass; the answer is kept then, and there is nothing to see."""
        req = requests.traced(request)
        if req is None or getattr(req, "banyan_is_lookup_traced", False):
            return
        req.banyan_is_lookup_traced = True
        found = {f"banyan.found.{run.kind.value}_pages": run.num_pages for run in offer.runs}
        _add(req, "banyan.lookup", began_ns, {**found, "banyan.planned_pages": num_pages})

    def started(self, fetches: Iterable[Fetch], reqs: Iterable[Any]) -> None:
        """The copies of these begin, and the forward over ``reqs`` is next."""
        self._prepared = [req for req in reqs if requests.is_traced(req)]
        for fetch in fetches:
            if requests.traced(fetch.request) is not None:
                self._copies[fetch.request] = _Copying(fetch, time.time_ns())

    def forward_begins(self, copy: Copy | None, num_layers: int) -> TracedForward | None:
        """The prepared forward begins, behind ``copy`` if it follows one; or a decode step. None: nobody traces it."""
        reqs, self._prepared = self._prepared, []
        if not reqs:
            return None
        for req in reqs:
            copying = self._copies.get(requests.id_of(req))
            if copying is not None:
                copying.copy = copy
        return TracedForward(reqs, num_layers)

    def became(self, request: str, outcome: Outcome) -> None:
        """A fetch has come so far."""
        copying = self._copies.pop(request, None) if outcome in ENDS else None
        req = requests.traced(request)
        if copying is None or req is None:
            return
        now_ns = time.time_ns()
        ages_s = () if copying.copy is None else copying.copy.ages_s()
        moments_ns = [now_ns - round(age_s * 1e9) for age_s in ages_s]
        for layer, (began_ns, landed_ns) in enumerate(pairwise(moments_ns)):
            _add(req, "banyan.landing", began_ns, {"banyan.layer": layer}, landed_ns, level=DETAIL)
        # It has landed with its last layer; the rank sees it when the forward behind it is done.
        ended_ns = moments_ns[-1] if len(moments_ns) > 1 else now_ns
        moved = {f"banyan.{kind.value}_tokens": num_tokens for kind, num_tokens in copying.fetch.tokens.items()}
        attributes = {**moved, "banyan.outcome": outcome.value}
        _add(req, "banyan.copy", copying.began_ns, attributes, ended_ns, event=outcome.value)


def _add(
    req: Any,
    name: str,
    began_ns: int,
    attributes: dict[str, Any],
    ended_ns: int | None = None,
    *,
    level: int = STEP,
    event: str = "",
) -> None:
    """A span until now, or until ``ended_ns``."""
    ended_ns = time.time_ns() if ended_ns is None else ended_ns
    req.time_stats.trace_ctx.trace_slice(
        TraceSliceContext(
            slice_name=name,
            start_time_ns=began_ns,
            end_time_ns=ended_ns,
            level=level,
            attrs=attributes,
            events=[TraceEvent(event, ended_ns, {})] if event else [],
        )
    )
