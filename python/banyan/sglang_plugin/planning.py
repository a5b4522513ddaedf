# SPDX-License-Identifier: Apache-2.0
"""This rank's planner: asked at every lookup, told what every move and every forward took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from banyan.pacing import ForwardShape, LayerTimes, PermittedStore, WritePermits
from banyan.planner import (
    Action,
    ForwardSample,
    MoveRates,
    Piece,
    Planner,
    Run,
    SourceKind,
    Tail,
    profile,
)
from banyan.ports import Copy
from banyan.sglang_plugin import prefill, prefill_times, requests, runtime
from banyan.telemetry import Counters

NUM_SHOWN_FORWARDS = 64
"""Forwards in /server_info: more than `banyan profile` causes between two looks."""


class RankPlanner:
    """The planner between SGLang's linker calls. Called by the scheduler thread.

    A move: planned (``num_pages``) -> leased or refused -> moving (``started``) -> landed or failed (``moved``).
    """

    def __init__(self, *, num_layers: int, page_tokens: int, min_pages: int) -> None:
        config, profiled = runtime.config(), prefill_times.loaded_profile()
        line = None if profiled is None else profile.mismatch(profiled, num_layers=num_layers)
        if line is not None:
            runtime.refuse(line)
        self._num_layers = num_layers
        self._page_tokens = page_tokens
        self._default_action = Action.MOVE if config is not None and config.plan == "move" else None
        self._times = prefill_times.times()
        self._rates = MoveRates()
        self._planner = Planner(times=self._times, rates=self._rates, num_layers=num_layers, min_pages=min_pages)
        self._leased: dict[str, Mapping[SourceKind, int]] = {}
        self._moving: dict[int, dict[str, Mapping[SourceKind, int]]] = {}
        self._ending: list[tuple[Mapping[SourceKind, int], Copy]] = []
        self._pieces_prepared: tuple[Piece, ...] = ()
        self._pieces_running: tuple[Piece, ...] = ()
        self._stored_tokens_prepared = 0
        self._layer_times = None if profiled is None else LayerTimes(profiled.slack)
        self._permits: WritePermits | None = None

    def pace_writes(self, store: PermittedStore, *, block_bytes: int) -> None:
        """From now on, tell ``store`` before each prefill what it may write. A second store replaces the first."""
        self._permits = WritePermits(
            store, times=self._layer_times, num_layers=self._num_layers, block_bytes=block_bytes
        )

    # ---- plan --------------------------------------------------------------------------------------------------

    def num_pages(self, rid: str, num_tail_pages: int, found: Sequence[Run]) -> int:
        """How many of the pages found at the front of the tail to move."""
        tail = self._tail(rid, num_tail_pages, found)
        if tail is None:
            return sum(run.num_pages for run in found)
        return self._planner.decide(rid, tail, self._asked(rid)).num_pages

    def num_to_read(self, rid: str, num_tail_pages: int, num_stored: int) -> int:
        """How many of the pages that the store has of the tail to read. Asked before the request's turn comes: what is
        read by then can be moved, what is not is computed."""
        tail = self._tail(rid, num_tail_pages, [Run(SourceKind.STORE, num_stored)])
        return num_stored if tail is None else self._planner.decide_read(rid, tail, self._asked(rid)).num_pages

    def _tail(self, rid: str, num_tail_pages: int, found: Sequence[Run]) -> Tail | None:
        """The last pages of a request's prompt; None for a request that is not known."""
        prompt_tokens = requests.num_prompt_tokens(rid)
        if prompt_tokens is None:
            return None
        num_prompt_pages = max(prompt_tokens - 1, 0) // self._page_tokens
        return Tail(
            own_tokens=(num_prompt_pages - num_tail_pages) * self._page_tokens,
            prompt_tokens=prompt_tokens,
            page_tokens=self._page_tokens,
            runs=tuple(found),
        )

    def _asked(self, rid: str) -> Action | None:
        return requests.asked_action(rid) or self._default_action

    def leased(self, rid: str, tokens: Mapping[SourceKind, int]) -> None:
        """The move was granted: so many tokens from each kind of source."""
        self._planner.record(rid, "leased")
        self._leased[rid] = tokens

    def refused(self, rid: str) -> None:
        self._planner.record(rid, "refused")

    def cancelled(self, rid: str) -> None:
        if self._leased.pop(rid, None) is not None:
            self._planner.record(rid, "cancelled")

    # ---- learn -------------------------------------------------------------------------------------------------

    def started(self, index: int) -> None:
        """The batch that SGLang has just put together is about to run; ``index`` is that of its moves."""
        self._pieces_prepared = prefill.pieces_of_this_pass()
        self._stored_tokens_prepared = sum(tokens.get(SourceKind.STORE, 0) for tokens in self._leased.values())
        if self._leased:
            self._moving[index] = self._leased
            self._leased = {}

    def moved(self, index: int, copy: Copy, landed: bool) -> None:
        """A batch's moves are finished. How long they took is learnt when they have ended."""
        batch = self._moving.pop(index, {})
        tokens: Counter[SourceKind] = Counter()
        for rid, moved in batch.items():
            self._planner.record(rid, "landed" if landed else "failed")
            tokens.update(moved)
        if landed:
            self._ending.append((tokens, copy))
        self.settle()

    def settle(self) -> None:
        """Learn from the moves that have ended. Called on every scheduling step."""
        going_on = []
        for tokens, copy in self._ending:
            if not copy.has_ended:
                going_on.append((tokens, copy))
            elif copy.copy_s > 0:
                self._rates.observe_batch(tokens, copy.copy_s * 1e6)
        self._ending = going_on

    def forward_begins(self) -> None:
        """A forward starts: the prepared prefill, or a decode step, which is no lesson."""
        self._pieces_running, self._pieces_prepared = self._pieces_prepared, ()
        if self._permits is None:
            return
        if self._pieces_running:
            shape = ForwardShape.of_batch(self._pieces_running)
            self._permits.begin_prefill(shape, num_stored_tokens=self._stored_tokens_prepared)
        else:
            self._permits.end()

    @property
    def pieces_running(self) -> tuple[Piece, ...]:
        """What the forward that has just begun computes; () when it is no prefill."""
        return self._pieces_running

    def forward_ended(self, layer_us: float) -> None:
        """The forward that had begun has taken so long for each layer."""
        self.forward_took(self._pieces_running, layer_us)
        self._pieces_running = ()
        if self._permits is not None:
            self._permits.end()

    def forward_took(self, pieces: tuple[Piece, ...], layer_us: float) -> None:
        """A forward over ``pieces`` has taken so long for each layer. On a GPU others have begun meanwhile."""
        if pieces and layer_us > 0:
            self._times.observe(ForwardSample(pieces, layer_us * self._num_layers))
            if self._layer_times is not None:
                self._layer_times.observe(ForwardShape.of_batch(pieces), layer_us)

    # ---- tell --------------------------------------------------------------------------------------------------

    def count(self, counters: Counters) -> None:
        """Bring this rank's counters up to date."""
        counters.plans_moved = self._planner.num_moved
        counters.plans_computed = self._planner.num_computed

    def state(self) -> dict[str, Any]:
        """What `banyan explain` and `banyan profile` read from /server_info."""
        shown = self._times.samples[-NUM_SHOWN_FORWARDS:]
        first = self._times.num_observed - len(shown)
        return {
            "plans": self._planner.explain(),
            "move_us_per_token": self._rates.as_dict(),
            "num_layers": self._num_layers,
            "forwards": [
                {"number": first + place, "pieces": sample.pieces, "forward_us": round(sample.forward_us)}
                for place, sample in enumerate(shown)
            ],
        }
