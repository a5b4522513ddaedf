# SPDX-License-Identifier: Apache-2.0
"""What moves through the cluster: agents, and one turn of an agent as a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from banyan.lab.sim.workload import Trajectory

if TYPE_CHECKING:
    from banyan.lab.sim.decode import DecodeRank
    from banyan.lab.sim.prefill import PrefillRank


class Agent:
    """One trajectory being played: its turns follow each other without a pause."""

    __slots__ = ("context_tokens", "next_turn", "started_s", "trajectory")

    def __init__(self, trajectory: Trajectory, started_s: float) -> None:
        self.trajectory = trajectory
        self.next_turn = 0
        self.context_tokens = 0
        self.started_s = started_s


class Turn:
    """A request: ``cached_tokens`` lie in storage, ``new_tokens`` are computed, ``output_tokens`` are answered.

    Submitted -> placed -> reading -> ready -> in passes until ``left_tokens`` is 0 -> handed over -> decoding -> done.
    """

    __slots__ = (
        "agent",
        "begun_decode_s",
        "buffered_bytes",
        "cached_tokens",
        "decode_rank",
        "decode_side_tokens",
        "left_tokens",
        "new_tokens",
        "num_reads_left",
        "number",
        "output_tokens",
        "placed_s",
        "prefill_rank",
        "prefilled_s",
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
        self.buffered_bytes = 0.0
        self.submitted_s = now_s
        self.placed_s = self.ready_s = self.prefilled_s = self.begun_decode_s = now_s

    @property
    def prompt_tokens(self) -> int:
        return self.cached_tokens + self.new_tokens
