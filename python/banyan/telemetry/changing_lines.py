# SPDX-License-Identifier: Apache-2.0
"""Where a session's prompts part, and whether a line that is another one in every turn is to blame.

A page's key covers all tokens before it, so one line that changes near a prompt's head voids what every cache has of
the prompt. That it is a line is told by what follows: behind it, the new prompt goes on as the one before did.

Invariants
  1. At most ``MOST_TOKENS`` tokens of prompts are remembered, of ``MOST_SESSIONS`` sessions; the oldest go first.
  2. Sessions go by hashes. Of one, the last prompts of ``MOST_THREADS`` threads are known: several agents, or several
     conversations of one user, may have one name.

One thread.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import dataclass

MOST_SESSIONS = 1024
MOST_THREADS = 4
MOST_TOKENS = 1 << 21
"""16 MB."""

MOST_SHOWN = 8
"""Of a rank: the last ones."""

MANY_PROMPTS = 3
"""In a row that differ in one line: not by chance."""

NEAR_TOKENS = 16
"""A line changes in the same place, give or take: two stamps of time may begin alike."""

WINDOW_TOKENS = 32
SHIFTS = (1, 8, 32, 128, 512)
"""Behind the place where prompts part, in the older one: there it may go on as the newer one does."""

MOST_GROWN = 512
"""Tokens by which a line may grow."""

_TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True)
class Parting:
    """``place``: how many tokens are as in the prompt before. ``num_prompts``: in a row that differ in one line there,
    this one too; 1 where it is no line."""

    place: int
    num_prompts: int

    @property
    def is_line(self) -> bool:
        """Whether a line changes in every turn."""
        return self.num_prompts >= MANY_PROMPTS


@dataclass(slots=True)
class _Thread:
    """The last prompt of a thread, as bytes, and where it has parted from the one before."""

    row: bytes
    parting: Parting | None = None


class ChangingLines:
    """Of the prompts that come to one rank."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[bytes, list[_Thread]] = OrderedDict()
        self._num_tokens = 0

    def asked(self, session: str, tokens: array[int]) -> Parting | None:
        """A prompt of a session has come. None where it goes on from one of the last ones, or is the first. Tokens have
        64 bits."""
        name = hashlib.blake2b(session.encode(errors="surrogatepass"), digest_size=16).digest()
        threads = self._sessions.pop(name, [])
        parting = self._place(threads, tokens.tobytes())
        self._sessions[name] = threads
        while self._num_tokens > MOST_TOKENS or len(self._sessions) > MOST_SESSIONS:
            _, forgotten = self._sessions.popitem(last=False)
            for thread in forgotten:
                self._num_tokens -= len(thread.row) // _TOKEN_BYTES
        return parting

    def _place(self, threads: list[_Thread], row: bytes) -> Parting | None:
        """Put the prompt in the place of the one that it is most like, or beside them all."""
        parting = None
        if threads:
            num_bytes, last = max(((num_common(one.row, row), one) for one in threads), key=lambda found: found[0])
            if num_bytes < min(len(last.row), len(row)):
                parting = _parting(last, row, num_bytes // _TOKEN_BYTES)
            if parting is None or parting.num_prompts > 1:
                self._drop(threads, last)
            elif len(threads) == MOST_THREADS:
                self._drop(threads, threads[0])
        threads.append(_Thread(row, parting))
        self._num_tokens += len(row) // _TOKEN_BYTES
        return parting

    def _drop(self, threads: list[_Thread], thread: _Thread) -> None:
        threads[:] = [one for one in threads if one is not thread]
        self._num_tokens -= len(thread.row) // _TOKEN_BYTES


def _parting(last: _Thread, row: bytes, place: int) -> Parting:
    if not _goes_on(last.row, row, place):
        return Parting(place, 1)
    before = last.parting
    is_same = before is not None and before.num_prompts > 1 and abs(before.place - place) <= NEAR_TOKENS
    return Parting(place, before.num_prompts + 1 if before is not None and is_same else 2)


def _goes_on(old: bytes, new: bytes, place: int) -> bool:
    """Whether what stands a little behind a place of the old prompt stands there in the new one, too."""
    for shift in SHIFTS:
        start = (place + shift) * _TOKEN_BYTES
        window = old[start : start + WINDOW_TOKENS * _TOKEN_BYTES]
        if len(window) < WINDOW_TOKENS * _TOKEN_BYTES:
            return False
        end = start + (MOST_GROWN + WINDOW_TOKENS) * _TOKEN_BYTES
        at = new.find(window, place * _TOKEN_BYTES, end)
        if at >= 0 and at % _TOKEN_BYTES == 0:
            return True
    return False


def num_common(one: bytes, other: bytes) -> int:
    """How many leading bytes of two rows are equal."""
    short, long = sorted((one, other), key=len)
    if long.startswith(short):
        return len(short)
    # Most part early or late: each comparison ends at the first difference.
    low, high = 0, len(short)
    while high - low > 1:
        middle = (low + high) // 2
        if long.startswith(short[low:middle], low):
            low = middle
        else:
            high = middle
    return low
