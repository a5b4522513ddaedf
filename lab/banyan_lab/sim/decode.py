# SPDX-License-Identifier: Apache-2.0
"""The decode side: a group of ranks that step together, as one virtual clock that counts steps.

Every request of a group gets one token a step, and a step takes as long as the fullest rank's. So a request that joins
at step v ends at step v + its tokens, whatever happens meanwhile, and one alarm for the next end is enough: no event
for each token.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, Protocol

from banyan_lab.sim.compute import DecodeModel
from banyan_lab.sim.engine import FIRST, Simulation
from banyan_lab.sim.nodes import Node
from banyan_lab.sim.resources import Room
from banyan_lab.sim.source_rules import DecodeState

_SAME_STEP = 1e-6


class Decodable(Protocol):
    """What the decode side knows of a request."""

    begun_decode_s: float
    decode_rank: DecodeRank
    output_tokens: int

    @property
    def prompt_tokens(self) -> int: ...


class DecodeRank:
    """One GPU of the decode side. Loads are those that ``banyan.routing`` wants to see."""

    __slots__ = ("context_tokens", "group", "index", "node", "num_running", "ongoing_tokens", "place", "room", "state")

    def __init__(self, sim: Simulation, group: DecodeGroup, node: Node, room_bytes: float) -> None:
        self.group = group
        self.node = node
        self.place = group.add(self)
        self.state: DecodeState | None = None
        self.room = Room(sim, f"{node.name}.{self.place}.hbm", room_bytes)
        self.ongoing_tokens = 0
        self.num_running = 0
        self.context_tokens = 0

    def assign(self, turn: Decodable) -> None:
        """The turn counts for this rank from its placement on, long before it decodes."""
        tokens = turn.prompt_tokens + turn.output_tokens
        self.ongoing_tokens += tokens
        self.group.ongoing_tokens += tokens

    def release(self, turn: Decodable) -> None:
        tokens = turn.prompt_tokens + turn.output_tokens
        self.ongoing_tokens -= tokens
        self.group.ongoing_tokens -= tokens


class DecodeGroup:
    """Ranks in lockstep."""

    __slots__ = (
        "_armed_s",
        "_decoded",
        "_ends",
        "_model",
        "_pause_s",
        "_rank_s",
        "_seen_s",
        "_sequence",
        "_sim",
        "_step_s",
        "_steps",
        "num_running",
        "ongoing_tokens",
        "ranks",
        "state",
    )

    def __init__(self, sim: Simulation, model: DecodeModel, decoded: Callable[[Any], None]) -> None:
        """``decoded`` runs for a turn when it has its last token."""
        self._sim = sim
        self._model = model
        self._decoded = decoded
        self.ranks: list[DecodeRank] = []
        self.ongoing_tokens = 0
        self.state: DecodeState | None = None
        self._rank_s: list[float] = []
        self._steps = 0.0
        self._seen_s = 0.0
        self._pause_s = 0.0
        self.num_running = 0
        self._step_s = model.fixed_s
        self._ends: list[tuple[float, int, Decodable]] = []
        self._sequence = 0
        self._armed_s = float("inf")

    def add(self, rank: DecodeRank) -> int:
        """A further rank; its place in the group."""
        self.ranks.append(rank)
        self._rank_s.append(self._step_s)
        return len(self.ranks) - 1

    def join(self, turn: Decodable) -> None:
        """Decode what the prefill side left: all tokens but the first."""
        turn.begun_decode_s = self._sim.now_s
        self._advance()
        self._sequence += 1
        heappush(self._ends, (self._steps + max(0, turn.output_tokens - 1), self._sequence, turn))
        self._count(turn, 1)
        self._arm()

    def _count(self, turn: Decodable, sign: int) -> None:
        rank = turn.decode_rank
        rank.num_running += sign
        self.num_running += sign
        # The context grows by one token a step: on average half of the answer is there.
        rank.context_tokens += sign * (turn.prompt_tokens + turn.output_tokens // 2)
        self._rank_s[rank.place] = self._model.step_s(num_requests=rank.num_running, context_tokens=rank.context_tokens)
        self._step_s = max(self._rank_s) + self._pause_s

    @property
    def own_step_s(self) -> float:
        """A step without the pause."""
        return self._step_s - self._pause_s

    def set_pause(self, pause_s: float) -> None:
        """From now on each step waits so long for something else: a chunk of a prefill on the same GPU."""
        self._advance()
        self._step_s += pause_s - self._pause_s
        self._pause_s = pause_s
        self._armed_s = float("inf")
        self._arm()

    def _advance(self) -> None:
        self._steps += (self._sim.now_s - self._seen_s) / self._step_s
        self._seen_s = self._sim.now_s

    def _arm(self) -> None:
        if not self._ends:
            self._armed_s = float("inf")
            return
        ends_s = self._seen_s + max(0.0, self._ends[0][0] - self._steps) * self._step_s
        if ends_s < self._armed_s:
            self._armed_s = ends_s
            self._sim.at(ends_s, self._ring, priority=FIRST)

    def _ring(self) -> None:
        if self._sim.now_s < self._armed_s:
            return
        self._armed_s = float("inf")
        self._advance()
        ended = []
        while self._ends and self._ends[0][0] - self._steps <= _SAME_STEP:
            turn = heappop(self._ends)[2]
            self._count(turn, -1)
            ended.append(turn)
        self._arm()
        for turn in ended:
            self._decoded(turn)
