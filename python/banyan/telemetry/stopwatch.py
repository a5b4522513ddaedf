# SPDX-License-Identifier: Apache-2.0
"""What a thread spends in a set of functions, by name: what they call of somebody else's is not theirs.

Invariants
  1. A moment counts once: for the innermost timed call that it lies in, or for nobody while ``elsewhere`` runs.
  2. Only the thread that made the stopwatch is timed. Calls on others pass through.

Two looks at a clock and less than a microsecond for each call; what is called for each stream in each step takes less
than that itself, and is timed at one call in ``SAMPLED``.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from banyan.ports import Clock

SAMPLED = 64

P = ParamSpec("P")
R = TypeVar("R")


class Spent:
    """What calls of one name took themselves."""

    __slots__ = ("num_calls", "own_ns")

    def __init__(self) -> None:
        self.num_calls = 0
        self.own_ns = 0


class Stopwatch:
    """Accumulates the time of wrapped calls on one thread. ``clock``: nanoseconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._thread = threading.get_ident()
        self._not_own_ns = 0
        """Of the call under way: spent in other timed calls, and elsewhere."""
        self._spent: dict[str, Spent] = {}

    @property
    def elapsed_ns(self) -> int:
        """In all names together."""
        return sum(spent.own_ns for spent in self._spent.values())

    def by_name(self) -> dict[str, Spent]:
        """Of each name that was called."""
        return {name: spent for name, spent in self._spent.items() if spent.num_calls}

    def wrap(self, name: str, function: Callable[P, R]) -> Callable[P, R]:
        """``function``, timed as ``name``. An exception is timed as well and passes through."""
        spent = self._spent.setdefault(name, Spent())
        clock, thread, this_thread = self._clock, self._thread, threading.get_ident

        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            if this_thread() != thread:
                return function(*args, **kwargs)
            outer_ns, self._not_own_ns = self._not_own_ns, 0
            began_ns = clock()
            try:
                return function(*args, **kwargs)
            finally:
                whole_ns = clock() - began_ns
                spent.num_calls += 1
                spent.own_ns += whole_ns - self._not_own_ns
                self._not_own_ns = outer_ns + whole_ns

        return timed

    def sample(self, name: str, function: Callable[P, R]) -> Callable[P, R]:
        """``function``, of which one call in ``SAMPLED`` is timed as ``name`` and counts for as many. It is called on
        the stopwatch's thread, from nothing that is timed, and calls nothing that is."""
        spent, clock, calls = self._spent.setdefault(name, Spent()), self._clock, itertools.count(1)

        @functools.wraps(function)
        def sampled(*args: P.args, **kwargs: P.kwargs) -> R:
            if next(calls) % SAMPLED:
                return function(*args, **kwargs)
            began_ns = clock()
            try:
                return function(*args, **kwargs)
            finally:
                spent.num_calls += SAMPLED
                spent.own_ns += SAMPLED * (clock() - began_ns)

        return sampled

    def elsewhere(self, function: Callable[P, R]) -> Callable[P, R]:
        """``function``, whose time is nobody's: it is not Banyan's."""
        return _Elsewhere(self, function)


class _Elsewhere:
    """Somebody else's function: called, or asked for its attributes."""

    __slots__ = ("_function", "_stopwatch")

    def __init__(self, stopwatch: Stopwatch, function: Callable[..., Any]) -> None:
        self._stopwatch, self._function = stopwatch, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        watch = self._stopwatch
        if threading.get_ident() != watch._thread:
            return self._function(*args, **kwargs)
        before_ns, began_ns = watch._not_own_ns, watch._clock()
        try:
            return self._function(*args, **kwargs)
        finally:
            # What was timed within it has counted for itself.
            watch._not_own_ns = before_ns + watch._clock() - began_ns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)
