# SPDX-License-Identifier: Apache-2.0
"""Which pages a store is known to hold: what was written, what it has said, less what turned out otherwise.

A hint, and bounded: the store may evict at any time, and a page that is not remembered is asked for again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from banyan.latest import Latest

MAX_PRESENT = 1 << 17
"""Some 20 MB."""

KNOWN_S = 60.0
"""How long a page is expected to be where it was. The store evicts, and so do others of what they have in common with
this one, and tell nobody: behind that it is asked again."""

DOUBT_S = 30.0
"""So long nothing is expected of a page that has failed: a store may go on naming what died with its owner."""


class PresenceCache:
    """Pages of one namespace; what is said of another one is not heard. Any thread."""

    def __init__(self, namespace: bytes, clock: Callable[[], float], max_pages: int = MAX_PRESENT) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.namespace = namespace
        self._said_s: Latest[str, float] = Latest(max_pages)
        self._doubted_until: Latest[str, float] = Latest(max_pages)
        self.version = 0
        """Differs when an answer may."""

    def __len__(self) -> int:
        return len(self._said_s)

    def add(self, keys: Sequence[str], namespace: bytes) -> None:
        """The store has said to hold these; those in doubt stay so."""
        with self._lock:
            self._add([key for key in keys if not self._is_doubted(key)], namespace)

    def wrote(self, keys: Sequence[str], namespace: bytes) -> None:
        """These were written: there is no doubt about them."""
        with self._lock:
            for key in keys:
                self._doubted_until.pop(key, None)
            self._add(keys, namespace)

    def doubt(self, keys: Sequence[str], namespace: bytes) -> None:
        """These did not come."""
        with self._lock:
            if namespace != self.namespace:
                return
            for key in keys:
                self._said_s.pop(key, None)
                self._doubted_until.put(key, self._clock() + DOUBT_S)
            self.version += 1

    def clear(self) -> None:
        """Any of them may have been removed: each is asked for again."""
        with self._lock:
            self._said_s.clear()
            self.version += 1

    def begin(self, namespace: bytes) -> None:
        """Go on in another namespace, of which nothing is known."""
        with self._lock:
            self.namespace = namespace
            self._said_s.clear()
            self._doubted_until.clear()
            self.version += 1

    def num_leading(self, keys: Sequence[str], namespace: bytes) -> int:
        """Leading pages of ``keys`` that are known; they count as wanted."""
        with self._lock:
            if namespace != self.namespace:
                return 0
            oldest_s = self._clock() - KNOWN_S
            for number, key in enumerate(keys):
                if self._said_s.get(key, oldest_s) <= oldest_s:
                    return number
                self._said_s.move_to_end(key)
            return len(keys)

    def _add(self, keys: Sequence[str], namespace: bytes) -> None:
        if namespace != self.namespace or not keys:
            return
        for key in keys:
            self._said_s.put(key, self._clock())
        self.version += 1

    def _is_doubted(self, key: str) -> bool:
        until_s = self._doubted_until.get(key)
        if until_s is not None and until_s <= self._clock():
            del self._doubted_until[key]
            return False
        return until_s is not None
