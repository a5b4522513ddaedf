# SPDX-License-Identifier: Apache-2.0
"""What moves through the cluster: agents, and one turn of an agent as a request."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from banyan_lab.sim.workload import Trajectory

if TYPE_CHECKING:
    from banyan_lab.sim.decode import DecodeRank
    from banyan_lab.sim.prefill import PrefillRank


UNREACHED = math.inf
"""When a turn reaches a stage that it has not reached."""


class Agent:
    """One trajectory being played: its turns follow each other without a pause."""

    __slots__ = ("context_tokens", "next_turn", "number", "trajectory")

    def __init__(self, trajectory: Trajectory, number: int) -> None:
        self.trajectory = trajectory
        self.number = number
        self.next_turn = 0
        self.context_tokens = 0


class Turn:
    """A request: ``cached_tokens`` lie in storage, ``new_tokens`` are computed, ``output_tokens`` are answered.

    ``pooled_tokens`` of the cached ones lie in DRAM as well, when the system has a pool.

    Submitted -> placed -> reading, as soon as there is memory for it -> ready -> computing, in passes until
    ``left_tokens`` is 0 -> prefilled -> handed over -> decoding -> done. Who has nothing to read is ready when placed.
    """

    __slots__ = (
        "agent",
        "begun_decode_s",
        "cached_tokens",
        "computing_s",
        "decode_rank",
        "decode_side_tokens",
        "left_tokens",
        "new_tokens",
        "num_reads_left",
        "number",
        "output_tokens",
        "placed_s",
        "pooled_tokens",
        "prefill_rank",
        "prefilled_s",
        "reading_s",
        "ready_s",
        "submitted_s",
    )

    prefill_rank: PrefillRank
    decode_rank: DecodeRank

    def __init__(self, agent: Agent, number: int, now_s: float) -> None:
        trajectory, step = agent.trajectory, agent.next_turn
        self.agent = agent
        self.number = number
        self.cached_tokens = agent.context_tokens
        self.new_tokens = trajectory.appends[step]
        self.output_tokens = trajectory.outputs[step]
        self.left_tokens = self.new_tokens
        self.decode_side_tokens = 0
        self.num_reads_left = 0
        self.pooled_tokens = 0
        self.submitted_s = now_s
        self.placed_s = self.reading_s = self.ready_s = UNREACHED
        self.computing_s = self.prefilled_s = self.begun_decode_s = UNREACHED

    @property
    def prompt_tokens(self) -> int:
        return self.cached_tokens + self.new_tokens

    @property
    def stored_tokens(self) -> int:
        """Cached tokens that only storage has."""
        return self.cached_tokens - self.pooled_tokens
