# SPDX-License-Identifier: Apache-2.0
"""A recorded workload: who asked when, how much, and which parts of the prompts were equal. No text, no tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

Runs = tuple[tuple[int, int], ...]
"""Block ids, run-length coded: ``(first, count)`` stands for ``first, first + 1, ...``."""


MAX_TOKENS = 1 << 24
"""Of a prompt or an answer: more than any model takes, and few enough to be made."""
MAX_S = 1e10
"""Before or after the beginning of a trace."""


class TraceError(ValueError):
    """A file is not the trace it should be; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    Attributes:
        session: the conversation it belongs to; its turns are asked one after the other.
        turn: place in the session, from 0.
        at_s: arrival, seconds since the trace began.
        think_s: pause between the answer before and this request; None where the trace does not tell.
        num_input_tokens: length of the prompt.
        num_output_tokens: length of the answer.
        scope: equal block ids mean equal tokens within a scope only.
        blocks: what the prompt is made of, from its front. What they do not cover is shared with nobody.
    """

    session: str
    turn: int
    at_s: float
    num_input_tokens: int
    num_output_tokens: int
    blocks: Runs = ()
    scope: str = ""
    think_s: float | None = None

    def __post_init__(self) -> None:
        for num_tokens in (self.num_input_tokens, self.num_output_tokens):
            if not 1 <= num_tokens <= MAX_TOKENS:
                raise ValueError(f"a prompt or an answer of {num_tokens} tokens: at least 1, at most {MAX_TOKENS}")
        for time_s in (self.at_s, self.think_s or 0.0):
            if not abs(time_s) <= MAX_S:
                raise ValueError(f"a time of {time_s} s: at most {MAX_S:g}")

    def block_ids(self) -> Iterator[int]:
        for first, count in self.blocks:
            yield from range(first, first + count)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival; each block stands for ``block_tokens`` tokens."""

    name: str
    block_tokens: int
    requests: tuple[TraceRequest, ...]

    @property
    def span_s(self) -> float:
        """From the first to the last arrival."""
        return self.requests[-1].at_s - self.requests[0].at_s if self.requests else 0.0

    def sessions(self) -> dict[str, list[TraceRequest]]:
        """Requests of each session in order of their turns, sessions in order of their first arrival."""
        sessions: dict[str, list[TraceRequest]] = {}
        for request in self.requests:
            sessions.setdefault(request.session, []).append(request)
        return sessions

    def of(self, requests: Iterable[TraceRequest]) -> Trace:
        """A part of this trace: in order of arrival from 0, with the turns of each session counted anew.

        The first turn that is left of a session has no answer before it, so its think time goes too.
        """
        ordered = sorted(requests, key=lambda request: (request.at_s, request.session, request.turn))
        start_s = ordered[0].at_s if ordered else 0.0
        num_turns: dict[str, int] = {}
        part = []
        for request in ordered:
            turn = num_turns.get(request.session, 0)
            num_turns[request.session] = turn + 1
            think_s = request.think_s if turn else None
            part.append(replace(request, turn=turn, at_s=request.at_s - start_s, think_s=think_s))
        return Trace(self.name, self.block_tokens, tuple(part))


def runs_of(ids: Sequence[int]) -> Runs:
    """Run-length code of block ids."""
    runs: list[tuple[int, int]] = []
    for block in ids:
        if runs and runs[-1][0] + runs[-1][1] == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return tuple(runs)
