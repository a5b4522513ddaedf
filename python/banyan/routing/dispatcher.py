# SPDX-License-Identifier: Apache-2.0
"""The bookkeeping around a policy: turns, sessions, and the load of each rank between its reports.

Invariants
  1. Turns count placements, pinned ones included, from 0.
  2. A session is where its last request was placed. At most ``MAX_SESSIONS`` are remembered, the latest ones; each
     takes as much memory as any other, however long the name is that a client has given it.
  3. Nothing here blocks, reads a clock or breaks ties by anything but seed, turn and rank.

Used by one thread: the engine's dispatcher, the router's event loop, or the simulator.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from banyan.latest import Latest
from banyan.routing.conversation import name_of
from banyan.routing.guard import HotRankGuard
from banyan.routing.load import LoadReport, RankLoad
from banyan.routing.pending_prefixes import PrefixFingerprint, PromptTokens
from banyan.routing.place import DEFAULT_GUARD, DEFAULT_TIE_BREAKS, place
from banyan.routing.view import Choice, Policy, Query, RankState, TieBreaks
from banyan.routing.wait import Coming, Wait, wait_for

MAX_SESSIONS = 65_536
MAX_HASHED_PAGES = 256
"""Pages that are hashed anew for one request. sha256 is a chain: 2,000 pages of 16 tokens would take 0.2 ms. Of a
longer prompt that ranks hold and the dispatcher has not seen it learns the rest from the requests that follow."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as the dispatcher sees it.

    Attributes:
        num_tokens: its length.
        cached_tokens: leading tokens that each rank holds, by rank.
        fetchable_tokens: leading tokens that a rank without them can fetch; 0 when nothing is shared.
        session: names the conversation; None when the client does not say.
        tokens: the prompt itself, as far as a cache may supply it, for what ranks are about to hold; None when that is
            not to count.
    """

    num_tokens: int
    cached_tokens: Sequence[int] = field(default_factory=tuple)
    fetchable_tokens: int = 0
    session: str | None = None
    tokens: PromptTokens | None = None


class Dispatcher:
    """Asks a policy, and remembers what the next question needs. Ranks that are ``out_of_reach`` fetch nothing from
    their peers."""

    def __init__(
        self,
        num_ranks: int,
        policy: Policy,
        *,
        guard: HotRankGuard = DEFAULT_GUARD,
        tie_breaks: TieBreaks = DEFAULT_TIE_BREAKS,
        out_of_reach: Collection[int] = (),
    ) -> None:
        self.policy = policy
        self.guard = guard
        self._out_of_reach = frozenset(out_of_reach)
        self._tie_breaks = tie_breaks
        self._loads = [RankLoad() for _ in range(num_ranks)]
        self._sessions: Latest[str, int] = Latest(MAX_SESSIONS)
        self._turn = 0

    def reported(self, rank: int, report: LoadReport) -> None:
        """Take note of a rank's latest report. Ranks beyond the known ones join."""
        while rank >= len(self._loads):
            self._loads.append(RankLoad())
        self._loads[rank].reported(report)

    def forget_all_but(self, active: Collection[int]) -> None:
        """The other ranks have ended, with whatever was sent to them: one that comes back is a new one."""
        for rank in range(len(self._loads)):
            if rank not in active:
                self._loads[rank] = RankLoad()

    def waits_for_reads(self, rank: int, num_tokens: int) -> None:
        """What a known rank is waiting for from the store, now. Its reports do not say it."""
        if rank < len(self._loads):
            self._loads[rank].read_queue_tokens = num_tokens

    def place(self, prompt: Prompt, active: Collection[int], now_s: float, *, policy: Policy | None = None) -> Choice:
        """Choose among the active ranks and count the request there. ``policy`` stands in for the usual one.

        Raises:
            NoActiveRank: when none is active; nothing was counted.
        """
        prefix_fingerprint = _prefix_fingerprint_of(prompt)
        query = self._query(prompt, prefix_fingerprint)
        choice = place(policy or self.policy, query, self.states(active), guard=self.guard, tie_breaks=self._tie_breaks)
        self._count(prompt, prefix_fingerprint, choice.rank, now_s, query.cached_on(choice.rank))
        return choice

    def wait(
        self, prompt: Prompt, active: Collection[int], now_s: float, *, policy: Policy | None = None
    ) -> Wait | None:
        """Whether the request should wait for what a rank is computing, where ranks fetch. Counts nothing.

        Raises:
            NoActiveRank: when none is active and the request would have to be placed.
        """
        if not any(len(load.pending) for load in self._loads):
            return None
        prefix_fingerprint = _prefix_fingerprint_of(prompt)
        if prefix_fingerprint is None:
            return None
        states = self.states(active)
        lengths = {state.rank: self._loads[state.rank].pending.leading_tokens(prefix_fingerprint) for state in states}
        coming = {
            rank: Coming(num_tokens, self._loads[rank].tokens_until(prefix_fingerprint, num_tokens, now_s))
            for rank, num_tokens in lengths.items()
            if num_tokens > prompt.fetchable_tokens
        }
        if not coming:
            return None
        query = self._query(prompt, prefix_fingerprint)
        rank = place(policy or self.policy, query, states, guard=self.guard, tie_breaks=self._tie_breaks).rank
        chosen = next(state for state in states if state.rank == rank)
        return wait_for(query, _held(prompt, rank), coming, chosen, states)

    def is_pending(self, prompt: Prompt, wait: Wait) -> bool:
        """Whether what was waited for is still to come, as far as the rank's reports say."""
        prefix_fingerprint = _prefix_fingerprint_of(prompt)
        return (
            prefix_fingerprint is not None
            and self._loads[wait.rank].pending.leading_tokens(prefix_fingerprint) >= wait.num_tokens
        )

    def count(self, prompt: Prompt, rank: int, now_s: float) -> None:
        """Count a request that goes to ``rank``, whoever chose it."""
        prefix_fingerprint = _prefix_fingerprint_of(prompt)
        self._count(prompt, prefix_fingerprint, rank, now_s, self._cached(prompt, prefix_fingerprint, rank))

    def unheard_s(self, now_s: float) -> dict[int, float]:
        """By rank, for how long something sent there has been in none of its reports, where anything has."""
        waits = {rank: load.unheard_s(now_s) for rank, load in enumerate(self._loads)}
        return {rank: wait_s for rank, wait_s in waits.items() if wait_s > 0}

    def ended(self, rank: int, num_tokens: int, placed_s: float) -> None:
        """A request of so many tokens that was counted at ``rank`` at ``placed_s`` has ended, however that was.

        For callers that see it before the rank's next report; others need not say so.
        """
        self._loads[rank].ended(placed_s, num_tokens)

    def _count(
        self, prompt: Prompt, prefix_fingerprint: PrefixFingerprint | None, rank: int, now_s: float, cached_tokens: int
    ) -> None:
        fetchable_tokens = 0 if rank in self._out_of_reach else prompt.fetchable_tokens
        self._loads[rank].placed(
            self._turn,
            now_s,
            num_prompt_tokens=prompt.num_tokens,
            num_new_tokens=prompt.num_tokens - max(cached_tokens, fetchable_tokens),
            prefix_fingerprint=prefix_fingerprint,
        )
        self._turn += 1
        if prompt.session is not None:
            self._sessions.put(name_of(prompt.session), rank)

    def opened(self, session: str, rank: int) -> None:
        """A session has begun there, whose name came with the answer."""
        self._sessions.put(name_of(session), rank)

    def states(self, active: Collection[int]) -> list[RankState]:
        """The active ranks as they are believed to be now, in their order."""
        return [_state(rank, load) for rank, load in enumerate(self._loads) if rank in active]

    def _query(self, prompt: Prompt, prefix_fingerprint: PrefixFingerprint | None) -> Query:
        cached_tokens = {rank: self._cached(prompt, prefix_fingerprint, rank) for rank in range(len(self._loads))}
        return Query(
            turn=self._turn,
            num_prompt_tokens=prompt.num_tokens,
            cached_tokens={rank: num_tokens for rank, num_tokens in cached_tokens.items() if num_tokens},
            fetchable_tokens=prompt.fetchable_tokens,
            session_rank=self._sessions.get(name_of(prompt.session)) if prompt.session is not None else None,
            out_of_reach=self._out_of_reach,
        )

    def _cached(self, prompt: Prompt, prefix_fingerprint: PrefixFingerprint | None, rank: int) -> int:
        """Leading tokens that the rank holds, or is about to."""
        held = _held(prompt, rank)
        return (
            held
            if prefix_fingerprint is None
            else max(held, self._loads[rank].pending.leading_tokens(prefix_fingerprint))
        )


def _held(prompt: Prompt, rank: int) -> int:
    return prompt.cached_tokens[rank] if rank < len(prompt.cached_tokens) else 0


def _prefix_fingerprint_of(prompt: Prompt) -> PrefixFingerprint | None:
    """What to compare with prompts that are pending; None where that can add nothing: somebody has all of it."""
    most_held = max((prompt.fetchable_tokens, *prompt.cached_tokens))
    return prompt.tokens.prefix_fingerprint() if prompt.tokens is not None and most_held < len(prompt.tokens) else None


def _state(rank: int, load: RankLoad) -> RankState:
    report = load.report
    return RankState(
        rank=rank,
        num_running=report.num_running,
        num_waiting=report.num_waiting + load.num_on_its_way,
        pending_prefill_tokens=report.pending_prefill_tokens + load.num_new_tokens,
        ongoing_tokens=report.ongoing_tokens + load.num_prompt_tokens,
        read_queue_tokens=load.read_queue_tokens,
        unused_tokens=None if report.unused_tokens is None else max(0, report.unused_tokens - load.num_prompt_tokens),
        last_turn=load.last_turn,
        prefill_tokens_per_s=report.prefill_tokens_per_s,
    )
