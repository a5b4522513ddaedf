# SPDX-License-Identifier: Apache-2.0
"""This rank's planner: asked at every lookup, told what every move and every forward took."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from banyan.core import Fetch, Offer, Outcome, Refusal, Run, SourceKind, Supplier
from banyan.pacing.write_pause import WritePause
from banyan.planner import Action, ForwardSample, MoveRates, Piece, Planner, PrefillTimes, Pricing, RequestFacts
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank import prefill
from banyan.sglang_plugin.rank.reporting.spans import Spans
from banyan.telemetry import Counters, Why

NUM_SHOWN_FORWARDS = 64
"""Forwards in /server_info."""

TYPICAL_TOKENS = 512
"""Of a leaf that an eviction takes: what the planner is asked for to compare copies with computations."""


class RankPlanner:
    """Implements ``banyan.ports.FetchPlanner``: the cache tells it what becomes of fetches. Scheduler thread only."""

    def __init__(
        self,
        *,
        num_layers: int,
        page_tokens: int,
        min_pages: int,
        num_in_step: int = 1,
        fixed_tokens: float = 0.0,
        num_kinds: int = 1,
        chunk_tokens: int = sys.maxsize,
    ) -> None:
        """``fixed_tokens``: what a fetch moves besides its pages, in tokens of their size: a state. ``num_kinds``: of
        pages. ``chunk_tokens``: no forward computes more of a prompt."""
        config = runtime.config()
        self._num_layers = num_layers
        self._page_tokens = page_tokens
        self._default_action = Action.MOVE if config is not None and config.plan == "move" else None
        self._times = PrefillTimes(chunk_tokens=chunk_tokens)
        self._rates = MoveRates()
        self._pricing = Pricing(
            times=self._times,
            rates=self._rates,
            num_layers=num_layers,
            num_in_step=num_in_step,
            fixed_tokens=fixed_tokens,
        )
        self._planner = Planner(self._pricing, min_pages=min_pages, num_kinds=num_kinds)
        self._fixed_tokens = fixed_tokens
        self._pieces_prepared: tuple[Piece, ...] = ()
        self.pieces_running: tuple[Piece, ...] = ()
        """What the forward that has just begun computes; () when it is no prefill."""
        self.writes = WritePause()
        """Whose stores write nothing while a prefill runs."""
        self.spans = Spans()

    # ---- plan --------------------------------------------------------------------------------------------------

    def num_pages(self, request: RequestFacts, num_tail_pages: int, offer: Offer) -> int:
        """How many of the pages found at the front of the tail to move."""
        tail = request.tail(num_tail_pages, offer.runs, offer.rank)
        if tail is None:
            return offer.num_pages
        return self._planner.decide(request.id, tail, self._asked(request)).num_pages

    def num_to_read(self, request: RequestFacts, num_missing: int, found: Run, /) -> int:
        """Asked before the request's turn comes: what is read by then can be moved, what is not is computed."""
        tail = request.tail(num_missing, [found])
        if tail is None:
            return found.num_pages
        return self._planner.decide_read(request.id, tail, self._asked(request)).num_pages

    def choose_read(self, request: RequestFacts, num_missing: int, found: Sequence[Run]) -> int:
        """Asked before ``num_to_read`` where several nodes have some, the one with the most first: whose to read."""
        tails = [tail for run in found if (tail := request.tail(num_missing, [run])) is not None]
        return self._planner.choose_read(request.id, tails, self._asked(request)) if tails else 0

    def move_share(self, kind: SourceKind) -> float | None:
        """What it takes to have an evicted prefix again from ``kind``, over computing it; None while not measured."""
        return self._pricing.move_share(kind, TYPICAL_TOKENS)

    def decode_us(self) -> float | None:
        """What a forward over a single token takes, as forwards tell; None while nothing is known."""
        told = self._times.expected((1, 0))
        return None if told is None else told[0]

    def token_us(self) -> float | None:
        """What it takes to move a token from the slower of pools and arena, as far as anything has come from them."""
        told = [self._rates.expected(kind, TYPICAL_TOKENS) for kind in (SourceKind.PEER, SourceKind.HOST)]
        return max((move[0] / TYPICAL_TOKENS for move in told if move is not None), default=None)

    def _asked(self, request: RequestFacts) -> Action | None:
        return request.asked or self._default_action

    # ---- learn -------------------------------------------------------------------------------------------------

    def became(self, request: str, outcome: Outcome) -> None:
        self._planner.record(request, outcome)
        self.spans.became(request, outcome)

    def refused(self, request: str, why: Refusal) -> None:
        self._planner.record_refused(request, why)
        self.spans.became(request, Outcome.REFUSED)

    def why_unmoved(self, request: str) -> tuple[int, Why]:
        """As the planner's."""
        return self._planner.why_unmoved(request)

    def forget(self, request: str) -> None:
        """It has ended."""
        self._planner.forget(request)

    def computed(self, request: str, reasons: Mapping[Why, int]) -> None:
        """The answer of a request has begun; tokens of its prompt that were computed, by why."""
        self._planner.record_computed(request, reasons)

    def started(self, fetches: Sequence[Fetch]) -> None:
        self.spans.started(fetches, prefill.requests_of_this_pass())
        self._pieces_prepared = prefill.pieces_of_this_pass()

    def moved(self, fetches: Sequence[Fetch], copy_s: float) -> None:
        if copy_s > 0:
            self._rates.observe_batch(sum((self._moved_by(fetch) for fetch in fetches), Counter()), copy_s * 1e6)

    def was_read(self, came: Run, read_s: float) -> None:
        self._rates.observe_at_most(came.supplier, came.num_pages * self._page_tokens, read_s * 1e6)

    def _moved_by(self, fetch: Fetch) -> Counter[Supplier]:
        tokens: Counter[Supplier] = Counter()
        for run in fetch.runs:
            tokens[run.supplier] += run.num_pages * fetch.page_tokens
        if self._fixed_tokens and fetch.runs:
            tokens[fetch.runs[-1].supplier] += round(self._fixed_tokens)
        return tokens

    def forward_begins(self) -> None:
        """A forward starts: the prepared prefill, or a decode step, which is no lesson."""
        self.pieces_running, self._pieces_prepared = self._pieces_prepared, ()
        if self.pieces_running:
            self.writes.begin_prefill()
        else:
            self.writes.end()

    def step_begins(self) -> None:
        """A scheduling step: it may find nothing more to compute."""
        self.writes.step()

    def forward_ended(self, layer_us: float) -> None:
        """The forward that had begun has taken so long for each layer."""
        self.forward_took(self.pieces_running, layer_us)
        self.pieces_running = ()
        self.writes.end()

    def forward_took(self, pieces: tuple[Piece, ...], layer_us: float) -> None:
        """A forward over ``pieces`` has taken so long for each layer. On a GPU others have begun meanwhile."""
        if pieces and layer_us > 0:
            self._times.observe(ForwardSample(pieces, layer_us * self._num_layers))

    # ---- tell --------------------------------------------------------------------------------------------------

    def count(self, counters: Counters) -> None:
        """Bring this rank's counters up to date."""
        counters.plans_moved = self._planner.num_moved
        counters.plans_computed = self._planner.num_computed

    def state(self) -> dict[str, Any]:
        """What `banyan explain` reads from /server_info."""
        return {
            "plans": self._planner.explain(),
            "move_us_per_token": self._rates.as_dict(),
            "num_layers": self._num_layers,
            "forwards": [
                {"number": number, "pieces": sample.pieces, "forward_us": round(sample.forward_us)}
                for number, sample in self._times.samples[-NUM_SHOWN_FORWARDS:]
            ],
        }
