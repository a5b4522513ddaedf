# SPDX-License-Identifier: Apache-2.0
"""A small part of a trace that keeps what makes it hard: a contiguous window, thinned by whole sessions.

Drawing single requests at random, or squeezing hours into minutes, destroys what prompts share; "Elastic P2P vs
PD-Combined" (2.3) lost two thirds of it that way. So a sample is reported with what survived it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from banyan_lab.replay.sharing import sharing_of
from banyan_lab.replay.trace import Trace, TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What to keep.

    Attributes:
        window_s: length of the window; None: the whole trace.
        start_s: where it begins; None: drawn with the seed.
        sample_ratio: part of the window's sessions that is kept, drawn with the seed.
        max_single_turn_ratio: at most this part of the kept sessions has one turn only.
        num_requests: at most so many, the earliest ones; None: all.
    """

    window_s: float | None = None
    start_s: float | None = None
    sample_ratio: float = 1.0
    max_single_turn_ratio: float = 1.0
    num_requests: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.window_s is not None and not self.window_s > 0:
            raise ValueError(f"--window-seconds {self.window_s}: above 0")
        if not 0 < self.sample_ratio <= 1:
            raise ValueError(f"--sample-ratio {self.sample_ratio}: above 0, at most 1")
        if not 0 <= self.max_single_turn_ratio <= 1:
            raise ValueError(f"--max-single-turn-ratio {self.max_single_turn_ratio}: between 0 and 1")
        if self.num_requests is not None and self.num_requests < 1:
            raise ValueError(f"--num-requests {self.num_requests}: at least 1")


@dataclass(frozen=True, slots=True)
class SampleReport:
    """What sampling left: of the window and of the sample, requests, sessions, and the part of tokens shared."""

    start_s: float
    num_window_requests: int
    num_window_sessions: int
    window_shared_ratio: float
    num_requests: int
    num_sessions: int
    shared_ratio: float

    @property
    def survived_ratio(self) -> float:
        """How much of the window's sharing the thinning left; 1.0 where there was none."""
        return self.shared_ratio / self.window_shared_ratio if self.window_shared_ratio else 1.0


def sampled(trace: Trace, wanted: Sampling) -> tuple[Trace, SampleReport]:
    """The sample, and what it cost. Equal arguments, equal samples."""
    rng = random.Random(wanted.seed)
    start_s, window = _window(trace, wanted, rng)
    sessions = window.sessions()
    names = list(sessions)
    kept = rng.sample(names, max(1, round(wanted.sample_ratio * len(names)))) if names else []
    kept = _without_excess_singles(kept, sessions, wanted.max_single_turn_ratio, rng)
    chosen = sorted((request for name in kept for request in sessions[name]), key=lambda request: request.at_s)
    sample = window.of(chosen[: wanted.num_requests])
    report = SampleReport(
        start_s=start_s,
        num_window_requests=len(window.requests),
        num_window_sessions=len(sessions),
        window_shared_ratio=sharing_of(window).shared_ratio,
        num_requests=len(sample.requests),
        num_sessions=len(sample.sessions()),
        shared_ratio=sharing_of(sample).shared_ratio,
    )
    return sample, report


def _window(trace: Trace, wanted: Sampling, rng: random.Random) -> tuple[float, Trace]:
    if wanted.window_s is None:
        return 0.0, trace
    first_s = trace.requests[0].at_s if trace.requests else 0.0
    latest_s = max(0.0, trace.span_s - wanted.window_s)
    start_s = first_s + (rng.uniform(0, latest_s) if wanted.start_s is None else wanted.start_s)
    end_s = start_s + wanted.window_s
    return start_s, trace.of(request for request in trace.requests if start_s <= request.at_s < end_s)


def _without_excess_singles(
    names: list[str], sessions: dict[str, list[TraceRequest]], max_ratio: float, rng: random.Random
) -> list[str]:
    """Drop sessions of one turn, drawn at random, until they are at most ``max_ratio`` of what is left."""
    singles = [name for name in names if len(sessions[name]) == 1]
    num_others = len(names) - len(singles)
    if max_ratio >= 1:
        return names
    num_allowed = int(max_ratio * num_others / (1 - max_ratio))
    dropped = set(rng.sample(singles, max(0, len(singles) - num_allowed)))
    return [name for name in names if name not in dropped]
