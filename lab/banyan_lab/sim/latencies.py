# SPDX-License-Identifier: Apache-2.0
"""Where a turn's time goes: the parts of its time to the first token, and what comes behind it. Means over turns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from banyan_lab.sim.turn import Turn


class Part(Enum):
    """Parts of the time to the first token, in their order. They add up to it."""

    RANK = "wait for a rank"
    MEMORY = "wait for memory"
    """HBM, or the DRAM buffer with layer-wise prefill."""
    READ = "read"
    """From storage until a pass may begin. NICs are shared fairly: what waits for one is a longer read."""
    PASS = "wait for a pass"
    COMPUTE = "compute"
    """All passes that the turn is in, with waits between them when it is cut."""


def parts_s(turn: Turn, now_s: float) -> list[float]:
    """Seconds of each ``Part``; of a turn without a first token what it has spent until now."""
    stamps = (
        turn.submitted_s,
        turn.placed_s,
        turn.reading_s,
        turn.ready_s,
        turn.computing_s,
        turn.prefilled_s,
    )
    return [min(end_s, now_s) - min(start_s, now_s) for start_s, end_s in pairwise(stamps)]


@dataclass(slots=True)
class Latencies:
    """Sums over turns that were submitted at ``since_s`` or later. ``add`` is a cluster's ``on_turn``.

    Attributes:
        num_turns: finished ones; those with an answer of one token have no second one.
        num_first: those that count for the time to the first token: finished ones, and those added by ``add_waiting``.
    """

    since_s: float = 0.0
    num_turns: int = 0
    num_first: int = 0
    num_second: int = 0
    _parts_s: list[float] = field(default_factory=lambda: [0.0] * len(Part))
    _hand_over_s: float = 0.0
    _tpot_s: float = 0.0

    def add(self, turn: Turn, now_s: float) -> None:
        if turn.submitted_s < self.since_s:
            return
        self.num_turns += 1
        self._add_parts(turn, now_s)
        if turn.output_tokens > 1:
            self.num_second += 1
            self._hand_over_s += turn.begun_decode_s - turn.prefilled_s
            self._tpot_s += (now_s - turn.begun_decode_s) / (turn.output_tokens - 1)

    def add_waiting(self, turns: Iterable[Turn], now_s: float) -> None:
        """Turns without a first token count with the time they have waited: else an overloaded system looks quick."""
        for turn in turns:
            if turn.submitted_s >= self.since_s:
                self._add_parts(turn, now_s)

    def _add_parts(self, turn: Turn, now_s: float) -> None:
        self.num_first += 1
        for place, value_s in enumerate(parts_s(turn, now_s)):
            self._parts_s[place] += value_s

    @property
    def mean_parts_s(self) -> dict[Part, float]:
        return {part: value_s / max(1, self.num_first) for part, value_s in zip(Part, self._parts_s, strict=True)}

    @property
    def ttft_s(self) -> float:
        return sum(self._parts_s) / max(1, self.num_first)

    @property
    def hand_over_s(self) -> float:
        """From the first token to the first decode step."""
        return self._hand_over_s / max(1, self.num_second)

    @property
    def tpot_s(self) -> float:
        """Each token behind the first, without the hand-over."""
        return self._tpot_s / max(1, self.num_second)

    @property
    def ttst_s(self) -> float:
        """From the first token to the second: the hand-over and a step."""
        return self.hand_over_s + self.tpot_s
