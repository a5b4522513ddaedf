# SPDX-License-Identifier: Apache-2.0
"""When a request is sent: as recorded, but never before the answer it follows."""

from __future__ import annotations

from dataclasses import dataclass

from banyan_lab.replay.trace import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How recorded time becomes replay time.

    Attributes:
        time_scale: replayed seconds for each recorded one; 0.5 plays twice as fast.
        max_inflight_sessions: sessions under way at once; None, the default, is no limit. A limit hides the queues
            that the recorded arrivals would build up.
    """

    time_scale: float = 1.0
    max_inflight_sessions: int | None = None

    def __post_init__(self) -> None:
        if not self.time_scale > 0:
            raise ValueError(f"--time-scale {self.time_scale}: above 0")
        if self.max_inflight_sessions is not None and self.max_inflight_sessions < 1:
            raise ValueError(f"--max-inflight-sessions {self.max_inflight_sessions}: at least 1")

    def send_s(self, request: TraceRequest, answered_s: float | None) -> float:
        """Seconds from the start of the replay. ``answered_s``: when the turn before ended; None for a first turn."""
        arrival_s = request.at_s * self.time_scale
        if answered_s is None:
            return arrival_s
        if request.think_s is None:
            return max(arrival_s, answered_s)
        return answered_s + request.think_s * self.time_scale
