# SPDX-License-Identifier: Apache-2.0
"""Between the cluster and ``banyan.routing``: loads in, ranks out. Every decision is taken there, but for those of
``source_rules``.

Ranks stand in groups, and a large cluster has hundreds of them. So the prefill policy is asked twice, first with the
groups as if they were ranks (``group_policy``) and then with the ranks of the chosen group;
``decode_rank`` does the same by design. What a policy sees of a rank is made anew only when it has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from banyan.routing import POLICIES, Query, RankState
from banyan.routing.policies import DualPath
from banyan.routing.reads import ReadQueue, decode_part
from banyan_lab.sim.decode import DecodeGroup, DecodeRank
from banyan_lab.sim.prefill import PrefillGroup, PrefillRank
from banyan_lab.sim.source_rules import DecodeState, decode_rank, group_policy, is_held_back, is_read_by_decode
from banyan_lab.sim.systems import Placement, Reads
from banyan_lab.sim.turn import Turn


@dataclass(frozen=True, slots=True)
class FairTieBreaks:
    """Tie-breaks that favour another rank every turn. ``SeededTieBreaks`` spread as well and cost ten times as much."""

    def __call__(self, turn: int, rank: int) -> int:
        return (rank * 0x9E3779B1 + turn * 0x85EBCA77) & 0xFFFFFFFF


TIE_BREAKS = FairTieBreaks()


class Places(Protocol):
    """Picks a turn's ranks. Keeps no loads of its own: it looks at the ranks."""

    def pick(self, turn: Turn) -> tuple[PrefillRank, DecodeRank] | None:
        """The ranks, or None when the turn should be held back until a rank has less to do."""
        ...


class Circle:
    """``round_robin`` over so many places, with the memory of past turns that a policy does not have itself."""

    def __init__(self, num_places: int) -> None:
        self._policy = POLICIES["round_robin"]()
        self._states = [RankState(rank=place) for place in range(num_places)]

    def next(self, turn: Turn) -> int:
        query = Query(turn=turn.number, num_prompt_tokens=turn.prompt_tokens)
        chosen = self._policy.choose(query, self._states, TIE_BREAKS).rank
        self._states[chosen] = RankState(rank=chosen, last_turn=turn.number)
        return chosen


class RoundRobinPlaces:
    """``round_robin`` on both sides."""

    def __init__(self, prefill: Sequence[PrefillGroup], decode: Sequence[DecodeGroup]) -> None:
        self._prefill = [rank for group in prefill for rank in group.ranks]
        self._decode = [rank for group in decode for rank in group.ranks]
        self._near, self._far = Circle(len(self._prefill)), Circle(len(self._decode))

    def pick(self, turn: Turn) -> tuple[PrefillRank, DecodeRank]:
        return self._prefill[self._near.next(turn)], self._decode[self._far.next(turn)]


class DualPathPlaces:
    """``dualpath`` on the prefill side, ``decode_rank`` on the other."""

    def __init__(
        self,
        prefill: Sequence[PrefillGroup],
        decode: Sequence[DecodeGroup],
        *,
        policy: DualPath,
        kv_bytes_per_token: float,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._policy = policy
        self._kv_bytes = kv_bytes_per_token
        num_ranks = len(prefill[0].ranks)
        num_nodes = len({id(rank.node) for rank in prefill[0].ranks})
        self._group_policy = group_policy(policy, num_ranks=num_ranks, num_nodes=num_nodes)

    def pick(self, turn: Turn) -> tuple[PrefillRank, DecodeRank] | None:
        query = Query(turn=turn.number, num_prompt_tokens=turn.prompt_tokens)
        groups = self._prefill
        group = groups[0]
        if len(groups) > 1:
            choice = self._group_policy.choose(query, [_group_state(i, g) for i, g in enumerate(groups)], TIE_BREAKS)
            group = groups[choice.rank]
        choice = self._policy.choose(query, [_prefill_state(rank) for rank in group.ranks], TIE_BREAKS)
        if is_held_back(choice):
            return None
        return group.ranks[choice.rank], self._decode_rank(query, turn.prompt_tokens + turn.output_tokens)

    def _decode_rank(self, query: Query, num_tokens: int) -> DecodeRank:
        groups = self._decode
        group = groups[0]
        if len(groups) > 1:
            totals = {i: (_decode_group_state(i, g),) for i, g in enumerate(groups)}
            group = groups[decode_rank(query, totals, num_tokens, TIE_BREAKS)]
        states = [self._decode_state(rank) for rank in group.ranks]
        return group.ranks[decode_rank(query, {0: states}, num_tokens, TIE_BREAKS)]

    def _decode_state(self, rank: DecodeRank) -> DecodeState:
        state = rank.state
        if state is None or state.ongoing_tokens != rank.ongoing_tokens:
            free_tokens = int(rank.room.capacity / self._kv_bytes) - rank.ongoing_tokens
            state = DecodeState(rank=rank.place, ongoing_tokens=rank.ongoing_tokens, free_tokens=free_tokens)
            rank.state = state
        return state


def _prefill_state(rank: PrefillRank) -> RankState:
    state, read_queue_tokens = rank.state, rank.node.read_queue_tokens
    if state is None or (state.ongoing_tokens, state.read_queue_tokens) != (rank.ongoing_tokens, read_queue_tokens):
        state = RankState(
            rank=rank.place,
            num_waiting=rank.num_waiting,
            pending_prefill_tokens=rank.pending_tokens,
            ongoing_tokens=rank.ongoing_tokens,
            read_queue_tokens=read_queue_tokens,
        )
        rank.state = state
    return state


def _group_state(number: int, group: PrefillGroup) -> RankState:
    state, ongoing_tokens, queue_tokens = group.state, group.ongoing_tokens, group.read_queue_tokens
    if state is None or state.ongoing_tokens != ongoing_tokens or state.read_queue_tokens != queue_tokens:
        state = RankState(rank=number, ongoing_tokens=ongoing_tokens, read_queue_tokens=queue_tokens)
        group.state = state
    return state


def _decode_group_state(number: int, group: DecodeGroup) -> DecodeState:
    state = group.state
    if state is None or state.ongoing_tokens != group.ongoing_tokens:
        state = DecodeState(rank=number, ongoing_tokens=group.ongoing_tokens)
        group.state = state
    return state


def places(
    kind: Placement,
    prefill: Sequence[PrefillGroup],
    decode: Sequence[DecodeGroup],
    *,
    policy: DualPath,
    kv_bytes_per_token: float,
) -> Places:
    if kind is Placement.ROUND_ROBIN:
        return RoundRobinPlaces(prefill, decode)
    return DualPathPlaces(prefill, decode, policy=policy, kv_bytes_per_token=kv_bytes_per_token)


class ReadSides:
    """Decides which side reads how much of a turn's KV."""

    def __init__(self, reads: Reads, *, even_share: float, tokens_per_s: float) -> None:
        """``even_share`` is the decode side's share of all storage NICs, ``tokens_per_s`` what a node's read."""
        self._reads = reads
        self._even_share = even_share
        self._tokens_per_s = tokens_per_s
        self._sides = Circle(2)

    def decode_tokens(self, turn: Turn) -> int:
        """How many of the turn's stored tokens the decode side reads; the prefill side reads the others."""
        if self._reads in (Reads.PREFILL, Reads.NOBODY):
            return 0
        if self._reads is Reads.EVEN:
            return round(turn.stored_tokens * self._even_share)
        if self._reads is Reads.IN_TURN:
            return turn.stored_tokens * self._sides.next(turn)
        near, far = turn.prefill_rank.node.read_queue_tokens, turn.decode_rank.node.read_queue_tokens
        if self._reads is Reads.SPLIT:
            prefill, decode = (ReadQueue(num_tokens, self._tokens_per_s) for num_tokens in (near, far))
            return decode_part(turn.stored_tokens, prefill=prefill, decode=decode)
        return turn.stored_tokens if is_read_by_decode(prefill_tokens=near, decode_tokens=far) else 0
