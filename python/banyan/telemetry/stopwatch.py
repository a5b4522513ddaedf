# SPDX-License-Identifier: Apache-2.0
"""Time spent inside a set of functions, nested calls counted once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from banyan.ports import Clock

P = ParamSpec("P")
R = TypeVar("R")


class Stopwatch:
    """Accumulates the time of wrapped calls on one thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._depth = 0
        self.elapsed_ns = 0

    def wrap(self, function: Callable[P, R]) -> Callable[P, R]:
        """``function``, timed. An exception is timed as well and passes through."""

        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            started_ns = self._clock()
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.elapsed_ns += self._clock() - started_ns

        return timed
