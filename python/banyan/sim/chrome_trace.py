# SPDX-License-Identifier: Apache-2.0
"""One run as a trace for chrome://tracing or Perfetto: a process for each node, a thread for each rank."""

from __future__ import annotations

import json
from typing import Any

from banyan.sim.turn import Turn


class TurnSpans:
    """Collects the phases of finished turns. Pass ``add`` as the cluster's ``on_turn``."""

    def __init__(self, max_turns: int = 20_000) -> None:
        self._max_turns = max_turns
        self._num_turns = 0
        self._events: list[dict[str, Any]] = []

    def add(self, turn: Turn, now_s: float) -> None:
        self._num_turns += 1
        if self._num_turns > self._max_turns:
            return
        near, far = turn.prefill_rank, turn.decode_rank
        prefill, decode = (near.node.name, near.place), (far.node.name, far.place)
        for phase, (node, rank), start_s, end_s in (
            ("held", prefill, turn.submitted_s, turn.placed_s),
            ("read", prefill, turn.placed_s, turn.ready_s),
            ("prefill", prefill, turn.ready_s, turn.prefilled_s),
            ("hand over", decode, turn.prefilled_s, turn.begun_decode_s),
            ("decode", decode, turn.begun_decode_s, now_s),
        ):
            if end_s > start_s:
                self._events.append(self._span(turn, phase, node, rank, start_s, end_s))

    @staticmethod
    def _span(turn: Turn, phase: str, node: str, rank: int, start_s: float, end_s: float) -> dict[str, Any]:
        return {
            # Phases of different turns overlap on a rank: async spans, one track for each turn.
            "name": phase,
            "cat": "simulated",
            "ph": "X",
            "pid": node,
            "tid": f"rank {rank}",
            "ts": start_s * 1e6,
            "dur": (end_s - start_s) * 1e6,
            "args": {
                "turn": turn.number,
                "cached_tokens": turn.cached_tokens,
                "new_tokens": turn.new_tokens,
                "output_tokens": turn.output_tokens,
                "decode_side_tokens": turn.decode_side_tokens,
            },
        }

    def as_json(self) -> str:
        """The file's content. Times are microseconds of the simulated clock."""
        return json.dumps({"traceEvents": self._events, "otherData": {"kind": "simulated"}})
