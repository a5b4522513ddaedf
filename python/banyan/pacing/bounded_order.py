# SPDX-License-Identifier: Apache-2.0
"""How long a waiting request may be passed over for others that came later: as long as it takes to compute its own.

An order by what is cached puts every warm prompt in front of a cold one, which waits for as long as warm ones come.
Here others may pass it with as many tokens to compute as it has itself, all together. So it waits no longer for them
than for itself, and whoever comes with little to compute still goes first nearly always. Pure.

Invariants
  1. What passes one of the ``MOST_GUARDED`` requests that have waited longest has, since it is one of them, no more
     tokens to compute than it has itself, or ``LEAST_TOKENS``.
  2. While nobody has been passed over by that much, the order is the one that was wanted.
  3. Nothing is remembered of a request that waits no longer, and no clock is read: shards of a rank that see the same
     queue decide alike.
  4. No request is held: SGLang asks no more once its queue is empty, and who has been answered may be large.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

MOST_GUARDED = 64
"""Each is looked at once for each that waits."""

LEAST_TOKENS = 256
"""As good as nothing to compute: so much may pass also who has less himself."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request, what it has to compute now, and what has passed it."""

    request: weakref.ref[Any]
    number: int
    num_tokens: int = 0
    passed_by: int = 0


class Queue:
    """The requests that wait at one rank. ``num_tokens`` of a request: what it has to compute, one at least."""

    def __init__(self, num_tokens: Callable[[Any], int]) -> None:
        self._num_tokens = num_tokens
        self._waiting: dict[int, _Waiting] = {}
        self._came = 0

    def come(self, requests: Sequence[Any]) -> None:
        """These wait now, new ones in the order in which they came. Who is not among them has gone."""
        present = {id(request): request for request in requests}
        # One that has gone may have left its id to another.
        gone = {key: one for key, one in self._waiting.items() if one.request() is not present.get(key, self)}
        for key in gone:
            del self._waiting[key]
        for request in requests:
            if id(request) not in self._waiting:
                self._waiting[id(request)] = _Waiting(weakref.ref(request), self._came)
                self._came += 1
        for guarded in self._guarded():
            guarded.passed_by += sum(one.num_tokens for one in gone.values() if one.number > guarded.number)

    def order(self, wanted: Sequence[Any]) -> list[Any]:
        """The same requests, none of them in front of one that it may not pass any more."""
        for request in wanted:
            self._waiting[id(request)].num_tokens = max(1, self._num_tokens(request))
        if all(one.number < other.number for one, other in pairwise(self._waiting[id(each)] for each in wanted)):
            return list(wanted)
        ordering = _Ordering(self._guarded())
        for request in wanted:
            ordering.place(self._waiting[id(request)])
        requests = {self._waiting[id(request)].number: request for request in wanted}
        return [requests[waiting.number] for waiting in ordering.placed]

    def _guarded(self) -> list[_Waiting]:
        """Those that have waited longest, in the order in which they came: the order of the dictionary."""
        return [waiting for waiting, _ in zip(self._waiting.values(), range(MOST_GUARDED), strict=False)]


class _Ordering:
    """One order in the making: it counts what passes whom, should all of it go."""

    def __init__(self, guarded: Sequence[_Waiting]) -> None:
        self.placed: list[_Waiting] = []
        self._left = list(guarded)
        self._passed = {id(one): one.passed_by for one in guarded}
        self._is_placed: set[int] = set()

    def place(self, one: _Waiting) -> None:
        """Put it behind those that have been placed, and behind whom it may not pass."""
        if id(one) in self._is_placed:
            return
        while (first := next((other for other in self._left if self._is_due(other, one)), None)) is not None:
            self.place(first)
        self._is_placed.add(id(one))
        self.placed.append(one)
        self._left = [other for other in self._left if other is not one]
        for other in self._left:
            if other.number < one.number:
                self._passed[id(other)] += one.num_tokens

    def _is_due(self, waiting: _Waiting, one: _Waiting) -> bool:
        allowed = max(waiting.num_tokens, LEAST_TOKENS)
        return waiting.number < one.number and self._passed[id(waiting)] + one.num_tokens > allowed
