# SPDX-License-Identifier: Apache-2.0
"""What becomes of an attempt, and what a client is told when there is no other.

A request moves to another server only before its first byte was passed on. Attempts that did not reach a server are
free, and so are those that were refused while there is another server to ask; of all others there is a limit, and of
all that go to one server. Which of those that were lost may move at all, ``suspects`` says.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

RETRYABLE_STATUSES = (429, 503)
"""The server has not begun: it is full, starting or going down. Any other answer is an answer."""

MAX_RETRY_AFTER_S = 60

MAX_EVENT_BYTES = 64 << 20
"""Of a stream: with log-probabilities of a long prompt some are megabytes."""

MARKS = (b"\n\n", b"\r\n\r\n")
"""What ends an event."""

LINE_MARKS = (b"\n",)
"""What ends it where each is a line of JSON."""


class Outcome(StrEnum):
    """How one attempt ended, in the words of the metrics."""

    ANSWERED = "answered"
    UNREACHED = "unreached"
    """No connection: nothing was sent."""
    REFUSED = "refused"
    """Answered with one of ``RETRYABLE_STATUSES``."""
    LOST = "lost"
    """The connection broke, or the server went down, before the first byte."""
    BROKEN = "broken"
    """The same, after the first byte: the client is told in the stream."""
    LEFT = "left"
    """The client went away."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One attempt that gave no answer. ``has_begun``: the server had it, and broke off in sending it. ``beside``: the
    other server of a pair, where it may be that one's fault."""

    server: str
    outcome: Outcome
    error: str
    has_begun: bool = False
    beside: str | None = None


def may_retry(
    tried: Sequence[Tried],
    *,
    max_retries: int,
    num_servers: int,
    free: Collection[Outcome] = frozenset({Outcome.UNREACHED}),
) -> bool:
    """Whether another attempt is due after those in ``tried``. ``free``: how attempts end that count for nothing."""
    num_charged = sum(one.outcome not in free for one in tried)
    # A server that cannot be reached is down from then on; the bound is for one that comes and goes.
    return num_charged <= max_retries and len(tried) <= num_servers + max_retries


def account(tried: Sequence[Tried]) -> str:
    """What was tried, for people."""
    return "; ".join(f"{one.server}: {one.outcome.value} ({one.error})" for one in tried)


def retry_after_s(num_waiting: int, completions_per_s: float) -> int:
    """When a queue of that length will have moved on, in whole seconds between 1 and ``MAX_RETRY_AFTER_S``."""
    if completions_per_s <= 0:
        return MAX_RETRY_AFTER_S if num_waiting else 1
    return max(1, min(MAX_RETRY_AFTER_S, math.ceil(num_waiting / completions_per_s)))


class TooLong(Exception):
    """An event that never ends."""


class WholeEvents:
    """Passes the events of a stream on as soon as each is whole.

    A client can do nothing with part of an event, so this delays nothing; and what is passed on can always be
    followed by another event.
    """

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES, marks: Sequence[bytes] = MARKS) -> None:
        self._max_bytes = max_bytes
        self._marks = marks
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> bytes:
        """Everything up to the end of the last whole event.

        Raises:
            TooLong: for an event of more than ``max_bytes``.
        """
        # An end may lie across two chunks; what was looked at before is not looked at again.
        start = max(0, len(self._rest) - max(map(len, self._marks)) + 1)
        self._rest += chunk
        end = max((at + len(mark) for mark in self._marks if (at := self._rest.rfind(mark, start)) >= 0), default=0)
        if len(self._rest) - end > self._max_bytes:
            raise TooLong(f"an event of more than {self._max_bytes} bytes")
        whole = bytes(self._rest[:end])
        del self._rest[:end]
        return whole

    def close(self) -> bytes:
        """What is left when the stream ended well."""
        rest, self._rest = bytes(self._rest), bytearray()
        return rest
