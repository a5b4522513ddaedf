# SPDX-License-Identifier: Apache-2.0
"""One run as a trace for chrome://tracing or Perfetto: a process for each node, a thread for each rank."""

from __future__ import annotations

import json
from typing import Any

from banyan_lab.sim.turn import Turn

MAX_TURNS = 20_000


class TurnSpans:
    """Collects the phases of finished turns. Pass ``add`` as the cluster's ``on_turn``."""

    def __init__(self) -> None:
        self._num_turns = 0
        self._pids: dict[str, int] = {}
        self._events: list[dict[str, Any]] = []

    def add(self, turn: Turn, now_s: float) -> None:
        self._num_turns += 1
        if self._num_turns > MAX_TURNS:
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
                self._span(turn, phase, node, rank, start_s, end_s)

    def _span(self, turn: Turn, phase: str, node: str, rank: int, start_s: float, end_s: float) -> None:
        """Turns overlap on a rank, so that a phase is a pair of asynchronous events under the turn's number."""
        common = {"name": phase, "cat": "simulated", "id": turn.number, "pid": self._pid(node), "tid": rank}
        tokens = {
            "cached_tokens": turn.cached_tokens,
            "new_tokens": turn.new_tokens,
            "output_tokens": turn.output_tokens,
            "decode_side_tokens": turn.decode_side_tokens,
        }
        self._events.append({**common, "ph": "b", "ts": start_s * 1e6, "args": tokens})
        self._events.append({**common, "ph": "e", "ts": end_s * 1e6})

    def _pid(self, node: str) -> int:
        if node not in self._pids:
            self._pids[node] = len(self._pids) + 1
            name = {"name": "process_name", "ph": "M", "pid": self._pids[node], "args": {"name": f"{node} (simulated)"}}
            self._events.append(name)
        return self._pids[node]

    def as_json(self) -> str:
        """The file's content. Times are microseconds of the simulated clock."""
        return json.dumps({"traceEvents": self._events, "otherData": {"kind": "simulated"}})
