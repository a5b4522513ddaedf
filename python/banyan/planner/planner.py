# SPDX-License-Identifier: Apache-2.0
"""The planner of one rank: decides for each tail, learns from what was measured, remembers why.

Invariants
  1. A plan is never expected to take longer than recomputing by more than the error of the comparison, with two
     exceptions. A trial moves all that was found, to measure it anew, where plans of its class have left some of it so
     often that this costs ``1 / TRIAL_EVERY`` of computing each of them. Without trials lengths that were slow once
     would never be moved again. A plan that would leave one token to compute leaves a page more (``LONE_TOKEN``).
  2. Tails of one class (suppliers and length) change between moving and computing only when the other is better by more
     than the error: estimates that wobble around a tie do not make decisions flap.
  3. The same question of the same request gets the same answer: SGLang asks on every scheduling pass.
  4. What is remembered is bounded: the last ``MAX_WAITING`` requests until they are forgotten, to tell of them the last
     ``MAX_DECISIONS``, and ``MAX_HABITS`` classes.
  5. How much to read from the store, or from another node, is decided before the request's turn. What is on its way
     then is moved whole or not at all: its layers come together, so a part of it would take as long.

Called by one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

from banyan.core import Outcome, Refusal, SourceKind, Supplier, rid_of
from banyan.latest import Latest
from banyan.pacing.correction import length_class
from banyan.planner.plan import Estimated, Plan, PlanReason, Pricing, Tail, most_saving
from banyan.telemetry import Why

TRIAL_EVERY = 64
MAX_HABITS = 1024
MAX_WAITING = 4096
MAX_DECISIONS = 256
"""Some 100 KB of /server_info."""

WEIGHED = (PlanReason.FASTER, PlanReason.KEPT)
"""Why a plan is what it is, where its times have decided."""

UNPLANNED = {PlanReason.TOO_SHORT: Why.SHORT, PlanReason.LONE_TOKEN: Why.TAIL}
"""Why a plan leaves some of what was found, where it is not cheaper so."""


class Action(Enum):
    """What a tail gets when it is not left to measured times."""

    MOVE = "move"
    COMPUTE = "compute"


@dataclass(slots=True)
class _Habit:
    """What tails of one class get, and how many plans in a row have left what a move of all would be measured by."""

    moves: bool = True
    num_left: int = 0


@dataclass(slots=True)
class _Decision:
    tail: Tail
    plan: Plan
    planned_s: float
    outcome: str = "planned"
    steps: list[tuple[str, float]] = field(default_factory=list)
    computed: dict[str, int] = field(default_factory=dict)


class Planner:
    """Decides how many of the pages found for a tail are moved."""

    def __init__(
        self, pricing: Pricing, *, min_pages: int, num_kinds: int = 1, clock: Callable[[], float] = time.time
    ) -> None:
        """With pages of several kinds a prefix can be restored at few lengths: a tail is moved as far as it was found,
        or not at all. ``clock``: seconds since the epoch, for what is told."""
        self._clock = clock
        self._num_kinds = num_kinds
        self._pricing = pricing
        self._min_pages = max(1, min_pages)
        self._habits: Latest[tuple[tuple[Supplier, ...], int], _Habit] = Latest(MAX_HABITS)
        self._decisions: Latest[str, _Decision] = Latest(MAX_WAITING)
        self._reads: Latest[str, _Decision] = Latest(MAX_WAITING)
        self._told: Latest[str, _Decision] = Latest(MAX_DECISIONS)
        self.num_moved = self.num_computed = 0
        """Requests whose answer has begun and whose last plan moved something, or nothing of what was found."""

    def decide(self, request: str, tail: Tail, asked: Action | None = None) -> Plan:
        """The plan for this tail; ``asked`` overrides what was measured."""
        known = self._decisions.get(request)
        if known is not None and known.tail == tail:
            return known.plan
        read = self._reads.get(request)
        if tail.num_found == 0 and known is not None and known is read:
            # The reason not to read is the reason that nothing is found.
            return Plan(0, PlanReason.NOTHING_FOUND)
        if read is not None and read.plan.reason is PlanReason.TRIAL:
            asked = Action.MOVE
        plan = _without_lone_token(tail, self._plan(tail, asked, uncut=(SourceKind.STORE, SourceKind.REMOTE)))
        self._remember(request, _Decision(tail, plan, self._clock()))
        return plan

    def decide_read(self, request: str, tail: Tail, asked: Action | None = None) -> Plan:
        """As ``decide``, for a tail whose pages have yet to be read from the store or from another node."""
        known = self._reads.get(request)
        if known is not None and known.tail == tail:
            return known.plan
        decision = _Decision(tail, self._plan(tail, asked, uncut=()), self._clock())
        self._reads.put(request, decision)
        if decision.plan.num_pages == 0:
            self._remember(request, decision)
        return decision.plan

    def choose_read(self, request: str, tails: Sequence[Tail], asked: Action | None = None) -> int:
        """For which of ``tails`` to read: one tail, as several nodes have some of it, the one with the most first. That
        one is tried as often as if it were alone, where it is passed over because it was slow."""
        first, *others = [self._compare(tail, asked, uncut=()) for tail in tails]
        if first.reason not in WEIGHED:
            return 0
        chosen = most_saving([first, *others])
        if chosen and (trial := self._trial(tails[0], msgspec.structs.replace(first, num_pages=0))) is not None:
            self._reads.put(request, _Decision(tails[0], trial, self._clock()))
            return 0
        return chosen

    def _remember(self, request: str, decision: _Decision) -> None:
        self._decisions.put(request, decision)
        self._told.put(request, decision)

    def forget(self, request: str) -> None:
        """It has ended and asks no more. It can still be told of."""
        self._decisions.pop(request, None)
        self._reads.pop(request, None)

    def _plan(self, tail: Tail, asked: Action | None, *, uncut: Collection[SourceKind]) -> Plan:
        plan = self._compare(tail, asked, uncut=uncut)
        if plan.reason not in WEIGHED:
            return plan
        return self._trial(tail, plan) or plan

    def _compare(self, tail: Tail, asked: Action | None, *, uncut: Collection[SourceKind]) -> Plan:
        """The plan for this tail, but for trials."""
        found = tail.num_found
        if found == 0:
            return Plan(0, PlanReason.NOTHING_FOUND)
        if found < self._min_pages:
            return Plan(0, PlanReason.TOO_SHORT)
        recompute = self._pricing.recompute(tail)
        best = None
        if recompute is not None:
            least = self._min_pages if self._num_kinds == 1 else found
            best = self._pricing.best(tail, recompute, min_pages=least, uncut=uncut)
        if asked is not None:
            return Plan(found if asked is Action.MOVE else 0, PlanReason.ASKED, best, recompute)
        if best is None or recompute is None:
            return Plan(found, PlanReason.UNMEASURED, best, recompute)
        return self._choose(tail, best, recompute)

    def _habit(self, tail: Tail) -> _Habit:
        suppliers = tuple(dict.fromkeys(run.supplier for run in tail.runs))
        return self._habits.used((suppliers, length_class(tail.num_found * tail.page_tokens)), _Habit)

    def _choose(self, tail: Tail, best: Estimated, recompute: Estimated) -> Plan:
        habit = self._habit(tail)
        gain_us = recompute.total_us - best.total_us
        is_clear = abs(gain_us) > best.error_us
        reason = PlanReason.FASTER
        if is_clear:
            habit.moves = gain_us > 0
        elif habit.moves != (gain_us > 0):
            reason = PlanReason.KEPT
        return Plan((best if habit.moves else recompute).num_pages, reason, best, recompute)

    def _trial(self, tail: Tail, plan: Plan) -> Plan | None:
        """In place of ``plan``, where all that was found is to be moved, to see how long it takes now. Counts the
        plan."""
        habit, recompute = self._habit(tail), plan.recompute
        if self._pricing.measures(tail, plan.num_pages) == self._pricing.measures(tail, tail.num_found):
            habit.num_left = 0
            return None
        habit.num_left += 1
        assert plan.best is not None and recompute is not None, "times have decided"
        whole = self._pricing.estimate(tail, tail.num_found, recompute)
        assert whole is not None, "known for the best, known for the whole"
        chosen = plan.best if plan.num_pages else recompute
        more_us = max(recompute.total_us, whole.total_us - chosen.total_us)
        if habit.num_left * recompute.total_us < TRIAL_EVERY * more_us:
            return None
        habit.num_left = 0
        self._pricing.measure_anew(tail, tail.num_found)
        return msgspec.structs.replace(plan, num_pages=tail.num_found, reason=PlanReason.TRIAL)

    def _decision(self, request: str) -> _Decision | None:
        return self._decisions.get(request) or self._told.get(request)

    def record(self, request: str, outcome: Outcome) -> None:
        """What became of a plan. Requests of which nothing is told any more are ignored."""
        decision = self._decision(request)
        if decision is not None:
            decision.outcome = outcome.value
            decision.steps.append((outcome.value, self._clock()))

    def record_refused(self, request: str, why: Refusal) -> None:
        """As ``record``, of a plan that could not be carried out."""
        self.record(request, Outcome.REFUSED)
        decision = self._decision(request)
        if decision is not None:
            decision.outcome = f"{Outcome.REFUSED.value}: {why.value}"

    def why_unmoved(self, request: str) -> tuple[int, Why]:
        """How many of its first tokens were to be had by its last plan, and why others that were found were not."""
        decision = self._decision(request)
        if decision is None:
            return 0, Why.REFUSED
        tail, plan = decision.tail, decision.plan
        unplanned = Why.REFUSED if plan.num_pages >= tail.num_found else UNPLANNED.get(plan.reason, Why.CHEAPER)
        return tail.own_tokens + plan.num_pages * tail.page_tokens, unplanned

    def record_computed(self, request: str, reasons: Mapping[Why, int]) -> None:
        """Its answer has begun: tokens of its prompt that were computed, by why."""
        decision = self._decision(request)
        if decision is not None:
            self.num_moved += decision.plan.num_pages > 0
            self.num_computed += decision.plan.num_pages == 0 and decision.tail.num_found > 0
            decision.computed = {why.value: num_tokens for why, num_tokens in reasons.items()}

    def explain(self) -> list[dict[str, Any]]:
        """The last decisions, oldest first, as plain values."""
        return [_explanation(request, decision) for request, decision in self._told.items()]


def _without_lone_token(tail: Tail, plan: Plan) -> Plan:
    """Torch rounds a matrix times one row differently from the same row among others (docs/design/0003), and a hit must
    give the tokens of a miss: a single token is never left to compute."""
    num_left = tail.prompt_tokens - tail.own_tokens - plan.num_pages * tail.page_tokens
    if plan.num_pages == 0 or num_left != 1:
        return plan
    return msgspec.structs.replace(plan, num_pages=plan.num_pages - 1, reason=PlanReason.LONE_TOKEN)


def _explanation(request: str, decision: _Decision) -> dict[str, Any]:
    tail, plan = decision.tail, decision.plan
    best, recompute = plan.best, plan.recompute
    return {
        "rid": rid_of(request),
        "prompt_tokens": tail.prompt_tokens,
        "own_tokens": tail.own_tokens,
        "dp_origin_kv_len": tail.own_tokens,
        "dp_max_kv_len": tail.own_tokens + tail.num_found * tail.page_tokens,
        "dp_max_kv_rank": tail.max_rank,
        "page_tokens": tail.page_tokens,
        "found": [[run.kind.value, run.num_pages, *([run.origin] if run.origin else ())] for run in tail.runs],
        "moved_pages": plan.num_pages,
        "reason": plan.reason.value,
        "outcome": decision.outcome,
        "computed": decision.computed,
        "planned_s": round(decision.planned_s, 4),
        "steps": [[what, round(at_s - decision.planned_s, 4)] for what, at_s in decision.steps],
        "expected_us": None if best is None else round(best.total_us),
        "expected_move_us": None if best is None else round(best.move_us),
        "expected_compute_us": None if best is None else round(best.compute_us),
        "error_us": None if best is None else round(best.error_us),
        "recompute_us": None if recompute is None else round(recompute.total_us),
    }
