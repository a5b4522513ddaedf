# SPDX-License-Identifier: Apache-2.0
"""One request's tail: how much of it to move, from measured times. Pure values and one function.

A plan moves the first ``n`` pages that were found and computes the rest, in one forward or, chunk by chunk, in several.
All of the move comes with the first of them, layer by layer ahead of it, so with m the time of the move, c that of all
forwards, f that of the first, and L layers, the first token comes after

    m / L  +  max(m, f) * (L - 1) / L  +  f / L  +  c - f

(the first layer's KV, then the slower of the two for the layers between, then the last layer, then the other chunks).
Where moving is slow, the best n is where move and first forward take as long: the cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from operator import attrgetter

import msgspec

from banyan.core import Run, SourceKind, Supplier
from banyan.layout import cacheable_tokens
from banyan.pacing.correction import length_class
from banyan.planner.move_rates import MoveRates
from banyan.planner.prefill_times import PrefillTimes

NUM_PARTS = 4
"""Into how many parts the search for a cut divides a stretch of pages."""

NEAR = 64
"""The search ends at this part of what was found: the cost is flat around its minimum."""


@dataclass(frozen=True, slots=True)
class Tail:
    """What is asked: the part of a prompt behind the rank's own prefix, and where its first pages were found.

    ``runs`` follow each other from the front of the tail without a gap. ``max_rank`` supplies most of them (-1: not
    told); it changes no plan.
    """

    own_tokens: int
    prompt_tokens: int
    page_tokens: int
    runs: tuple[Run, ...]
    max_rank: int = field(default=-1, compare=False)

    @property
    def num_found(self) -> int:
        return sum(map(attrgetter("num_pages"), self.runs))


class PlanReason(Enum):
    """Why a plan is what it is."""

    NOTHING_FOUND = "nothing found"
    TOO_SHORT = "found less than --banyan-min-fetch-tokens"
    ASKED = "the request or --banyan-plan asked for it"
    UNMEASURED = "a time is not known yet, so what was found is moved"
    FASTER = "expected to be faster"
    KEPT = "no clear gain in changing what such tails get"
    TRIAL = "measured again, after many that were not moved whole"
    LONE_TOKEN = "the last page is computed, so that the token behind it is not alone"


class Estimated(msgspec.Struct, frozen=True):
    """What a plan is expected to cost, in microseconds to the end of the last forward. Behind the first one the move
    can hide."""

    num_pages: int
    move_us: float
    first_us: float
    compute_us: float
    total_us: float
    error_us: float


class Plan(msgspec.Struct, frozen=True):
    """How many pages to move, and the figures behind it (None while a time is not known)."""

    num_pages: int
    reason: PlanReason
    best: Estimated | None = None
    recompute: Estimated | None = None


def most_saving(plans: Sequence[Plan]) -> int:
    """Which of these plans for the same tail, of pages found at one node each, is to be carried out. The first, unless
    another one ends earlier, by more than the first one's error, or moves something where the first moves nothing. A
    plan of which a time is not known is better than to move nothing, and no other one is better than it."""
    chosen = 0
    for place, plan in enumerate(plans):
        if _is_better(plan, plans[chosen]):
            chosen = place
    return chosen


def _is_better(plan: Plan, chosen: Plan) -> bool:
    if plan.num_pages == 0 or chosen.num_pages == 0:
        return plan.num_pages > chosen.num_pages
    if plan.best is None or chosen.best is None:
        return False
    return plan.best.total_us < chosen.best.total_us - chosen.best.error_us


class Pricing:
    """Prices plans of one rank from its measured times.

    Where ``num_in_step`` ranks step together, all of them wait for a move that is not hidden behind the first forward:
    that part is charged once for each. Every move brings ``fixed_tokens`` besides, whatever its length, where its last
    page is: a model's state, as many tokens' KV as weigh the same. It pays above some length only.
    """

    def __init__(
        self,
        *,
        times: PrefillTimes,
        rates: MoveRates,
        num_layers: int,
        num_in_step: int = 1,
        fixed_tokens: float = 0.0,
    ) -> None:
        self._times = times
        self._rates = rates
        self._num_layers = num_layers
        self._num_in_step = num_in_step
        self._fixed_tokens = round(fixed_tokens)

    def recompute(self, tail: Tail) -> Estimated | None:
        """The plan that moves nothing; None while prefill times are not known."""
        forward = self._times.expected((tail.prompt_tokens - tail.own_tokens, tail.own_tokens))
        if forward is None:
            return None
        compute_us, error_us, first_us = forward
        return Estimated(0, 0.0, first_us, compute_us, compute_us, error_us)

    def move_share(self, kind: SourceKind, num_tokens: int) -> float | None:
        """What moving a prompt's first tokens takes, over computing them; None while either is not known."""
        move = self._rates.expected(kind, num_tokens + self._fixed_tokens)
        forward = self._times.expected((num_tokens, 0))
        return None if move is None or forward is None or forward[0] <= 0 else move[0] / forward[0]

    def estimate(self, tail: Tail, num_pages: int, recompute: Estimated) -> Estimated | None:
        """The plan that moves ``num_pages``; None while a rate that it needs is not known.

        ``error_us`` is that of the difference to recomputing: an error that both share does not count.
        """
        moved = _moved(tail, num_pages)
        forward = self._times.expected((tail.prompt_tokens - tail.own_tokens - moved, tail.own_tokens + moved))
        assert forward is not None, "known for recomputing, known for what is shorter"
        compute_us, compute_error_us, first_us = forward
        move_us = move_error_us = 0.0
        for supplier, num_tokens in self._brought(tail, num_pages):
            move = self._rates.expected(supplier, num_tokens)
            if move is None:
                return None
            move_us += move[0]
            move_error_us += move[1]
        layers = self._num_layers
        exposed_us = (move_us + max(move_us, first_us) * (layers - 1) + first_us) / layers - first_us
        total_us = compute_us + self._num_in_step * exposed_us
        # A fit to a few forwards may take a short tail for nothing: then the comparison is as uncertain as it is large.
        shared = recompute.error_us / recompute.total_us if recompute.total_us > 0 else 1.0
        error_us = move_error_us + abs(recompute.total_us - compute_us) * shared
        error_us += abs(compute_us * shared - compute_error_us)
        return Estimated(num_pages, move_us, first_us, compute_us, total_us, error_us)

    def measures(self, tail: Tail, num_pages: int) -> set[tuple[Supplier, int]]:
        """Which of the measured rates a move of the first ``num_pages`` goes by, and teaches."""
        return {(supplier, length_class(num_tokens)) for supplier, num_tokens in self._brought(tail, num_pages)}

    def measure_anew(self, tail: Tail, num_pages: int) -> None:
        """What the next such move takes counts as if it were the first."""
        for supplier, num_tokens in self._brought(tail, num_pages):
            self._rates.measure_anew(supplier, num_tokens)

    def _brought(self, tail: Tail, num_pages: int) -> list[tuple[Supplier, int]]:
        """What a move of the first ``num_pages`` brings, by supplier."""
        brought = list(_tokens_by_supplier(tail, num_pages))
        if self._fixed_tokens and brought:
            supplier, num_tokens = brought[-1]
            brought[-1] = supplier, num_tokens + self._fixed_tokens
        return brought

    def best(
        self, tail: Tail, recompute: Estimated, *, min_pages: int, uncut: Collection[SourceKind] = ()
    ) -> Estimated | None:
        """The cheapest plan that moves at least ``min_pages`` (1 or more); None while a rate is not known.

        A move that hides behind the first forward is taken whole. Else the cut is searched run by run: within one
        source the cost has one valley, or another where all of it is moved, and the next source may have others. Runs
        of the kinds ``uncut`` move whole or not at all.
        """
        found = tail.num_found
        whole = self.estimate(tail, found, recompute) if found >= min_pages else None
        if whole is None or whole.move_us <= whole.first_us:
            return whole
        tried = {found: whole}
        low = min_pages
        for run, high in zip(tail.runs, accumulate(run.num_pages for run in tail.runs), strict=True):
            if high >= low:
                start = high if run.kind in uncut else low
                self._search(tail, recompute, range(start, high + 1), tried)
                low = high
        # Of equals, the one that moves most.
        return min(tried.values(), key=lambda estimate: (estimate.total_us, -estimate.num_pages))

    def _search(self, tail: Tail, recompute: Estimated, run: range, tried: dict[int, Estimated]) -> None:
        """Try cuts within a run, ever closer around the best of them."""
        cuts = _parts(run[0], run[-1])
        while cuts:
            for cut in cuts:
                if cut not in tried:
                    estimate = self.estimate(tail, cut, recompute)
                    assert estimate is not None, "known for the whole, known for every part"
                    tried[cut] = estimate
            known = sorted(cut for cut in tried if cut in run)
            best = min(known, key=lambda cut: (tried[cut].total_us, -cut))
            cuts = _closer_cuts(known, best, near=tail.num_found // NEAR)


def _moved(tail: Tail, num_pages: int) -> int:
    """Tokens of the first ``num_pages``; the last of them may end beyond what a cache can supply."""
    return min(num_pages * tail.page_tokens, cacheable_tokens(tail.prompt_tokens) - tail.own_tokens)


def _parts(start: int, end: int) -> list[int]:
    """Both ends and points evenly between."""
    return sorted({start + (end - start) * part // NUM_PARTS for part in range(NUM_PARTS + 1)})


def _closer_cuts(tried: list[int], best: int, *, near: int) -> list[int]:
    """Points between the best cut so far and its neighbours; none when those are near."""
    place = tried.index(best)
    neighbours = tried[max(0, place - 1) : place] + tried[place + 1 : place + 2]
    closer = {cut for other in neighbours if abs(other - best) > near for cut in _parts(*sorted((best, other)))}
    return sorted(closer - set(tried))


def _tokens_by_supplier(tail: Tail, num_pages: int) -> Iterator[tuple[Supplier, int]]:
    """Tokens that the first ``num_pages`` take from each supplier."""
    pages: dict[Supplier, int] = {}
    for run in tail.runs:
        taken = min(run.num_pages, num_pages)
        num_pages -= taken
        if taken:
            pages[run.supplier] = pages.get(run.supplier, 0) + taken
    return ((supplier, count * tail.page_tokens) for supplier, count in pages.items())
