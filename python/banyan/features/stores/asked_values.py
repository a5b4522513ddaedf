# SPDX-License-Identifier: Apache-2.0
"""Questions to a store of values: which leading pages of a prompt it holds. One thread asks; nobody waits.

Invariant: every question that was taken is answered, and no more than ``MAX_QUESTIONS`` are under way.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from time import monotonic

from banyan.features.stores.presence_cache import PresenceCache
from banyan.features.stores.values import Values
from banyan.telemetry.workers import Workers

MAX_QUESTIONS = 256
ASK_PAGES = 128
"""Pages that the store is asked for at once; the first that is not there ends a question."""
SLOW_S = 0.5
"""While a question has waited for so long, no other is asked: requests wait for answers."""
SILENCE_S = 10.0
"""So long a store that did not answer is left alone."""


@dataclass(frozen=True, slots=True)
class KeyedFound:
    """Leading pages that were known to be there. Implements ``ports.StoreFound``."""

    keys: Sequence[str]
    namespace: bytes

    @property
    def num_pages(self) -> int:
        return len(self.keys)

    def after(self, num_pages: int, /) -> KeyedFound:
        return KeyedFound(self.keys[num_pages:], self.namespace)


def name_of(namespace: bytes, key: str) -> str:
    """The name of a page's value."""
    return f"{namespace.hex()}/{key}"


class AskedValues:
    """``failed`` is told when the store does not answer."""

    def __init__(self, values: Values, presence: PresenceCache, failed: Callable[[Exception], None]) -> None:
        self._values = values
        self._presence = presence
        self._failed = failed
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._under_way: dict[int, float] = {}
        self._silent_until_s = float("-inf")
        self._over: deque[tuple[int, KeyedFound | None]] = deque()
        self._workers = Workers(1, name="banyan-store-ask", feature="a question to the store")

    def ask(self, keys: Sequence[str], namespace: bytes) -> int | None:
        """The number of the question; None where the store is not asked: it is slow, or has just failed."""
        now_s = monotonic()
        with self._lock:
            oldest_s = next(iter(self._under_way.values()), now_s)
            is_full = len(self._under_way) + len(self._over) >= MAX_QUESTIONS
            if is_full or now_s - oldest_s > SLOW_S or now_s < self._silent_until_s:
                return None
            number = next(self._numbers)
            self._under_way[number] = now_s
        try:
            self._workers.submit(partial(self._ask, number, list(keys), namespace))
        except RuntimeError as error:
            # There is no thread to be had.
            del self._under_way[number]
            self._falls_silent(error)
            return None
        return number

    @property
    def since_s(self) -> float:
        """For how long the oldest question under way has waited: since then; inf where there is none."""
        with self._lock:
            return next(iter(self._under_way.values()), inf)

    def answers(self) -> list[tuple[int, KeyedFound | None]]:
        over = []
        while self._over:
            over.append(self._over.popleft())
        return over

    def close(self, within_s: float) -> None:
        self._workers.close(within_s)

    def _ask(self, number: int, keys: Sequence[str], namespace: bytes) -> None:
        found = None
        try:
            there = self._there(keys, namespace)
            self._presence.add(there, namespace)
            num_known = self._presence.num_leading(there, namespace)
            found = KeyedFound(there[:num_known], namespace) if num_known else None
        finally:
            # Here, and not when somebody looks at the answers: that may be long after, and it has not been slow.
            with self._lock:
                del self._under_way[number]
                self._over.append((number, found))

    def _there(self, keys: Sequence[str], namespace: bytes) -> Sequence[str]:
        """The leading pages that the store says to hold."""
        for first in range(0, len(keys), ASK_PAGES):
            try:
                there = self._values.present([name_of(namespace, key) for key in keys[first : first + ASK_PAGES]])
            except Exception as error:  # noqa: BLE001 - whatever a library raises costs hits, and nothing else
                self._falls_silent(error)
                return []
            if not all(there):
                return keys[: first + there.index(False)]
        return keys

    def _falls_silent(self, error: Exception) -> None:
        self._silent_until_s = monotonic() + SILENCE_S
        self._failed(error)
