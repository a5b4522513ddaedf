# SPDX-License-Identifier: Apache-2.0
"""What a page server has lent: pure but for a lock, the clock is the caller's.

Invariants
  1. A remote lease holds a lease on all its pages from ``lend`` until it is returned, runs out or is called in; each
     lease is released exactly once.
  2. No more than ``max_pages`` are lent or reserved at once.
  3. No more than ``MAX_REMOTE_LEASES`` with pages are out when one is asked for, so one more where two are asked for at
     once: each may have a connection, and there are so many.
  4. A remote lease is good for ``TERM_S`` after the last byte that was sent of it. It protects no reader: its checksums
     do.

A remote lease: lent -> returned (also by the end of its connection), run out, or called in. The page server's threads
call.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from banyan.features.nodes.wire import TOKEN_BYTES

TERM_S = 40.0
"""Longer than a pull waits for its turn and then takes (``borrower.TURN_S``, ``tcp.MOST_S``): of one by NIXL nothing is
seen here until it is over."""

MAX_REMOTE_LEASES = 32


class Held(Protocol):
    """A lease: it holds ``num_pages`` until it is released, once."""

    @property
    def num_pages(self) -> int: ...
    def release(self) -> None: ...


class Layers(Protocol):
    """The bytes of each layer, where they lie."""

    def layer(self, layer: int, /) -> list[memoryview]: ...


@dataclass(slots=True, eq=False)
class Lent:
    """Pages that somebody may read. ``leased_frames`` is what they are read from."""

    token: bytes
    lease: Held
    leased_frames: Layers
    expires_s: float


class RemoteLeases:
    """All remote leases of one page server."""

    def __init__(self, *, max_pages: int, clock: Callable[[], float]) -> None:
        self.max_pages = max_pages
        self._clock = clock
        self._lock = threading.Lock()
        self._lent: dict[bytes, Lent] = {}
        self._num_pages = 0
        self._num_with_pages = 0
        self._num_reserved = 0

    @property
    def num_remote_leases(self) -> int:
        return len(self._lent)

    @property
    def num_pages(self) -> int:
        """Pages that are lent now; one that was lent twice counts twice."""
        return self._num_pages

    @property
    def is_full(self) -> bool:
        """Whether one more, of however few pages, would be too many."""
        return self._num_with_pages >= MAX_REMOTE_LEASES

    @property
    def num_to_lend(self) -> int:
        """How many pages one more may have."""
        return 0 if self.is_full else max(0, self.max_pages - self._num_pages - self._num_reserved)

    def reserve(self, num_pages: int) -> bool:
        """Keep room for a later remote lease, if there is any; until ``unreserve``."""
        with self._lock:
            if self._num_pages + self._num_reserved + num_pages > self.max_pages:
                return False
            self._num_reserved += num_pages
            return True

    def unreserve(self, num_pages: int) -> None:
        with self._lock:
            self._num_reserved -= num_pages

    def lend(self, lease: Held, leased_frames: Layers) -> Lent:
        """Take over ``lease``."""
        lent = Lent(secrets.token_bytes(TOKEN_BYTES), lease, leased_frames, self._clock() + TERM_S)
        with self._lock:
            self._lent[lent.token] = lent
            self._num_pages += lease.num_pages
            self._num_with_pages += lease.num_pages > 0
        return lent

    def find(self, token: bytes) -> Lent | None:
        """The remote lease of this token, if it is good now; it is good for another term from now on."""
        with self._lock:
            lent = self._lent.get(token)
            if lent is not None:
                lent.expires_s = self._clock() + TERM_S
            return lent

    def holds(self, token: bytes) -> bool:
        """Whether the remote lease of this token is good now."""
        return token in self._lent

    def give_back(self, token: bytes) -> None:
        """Its reader is done, or has gone. A token that is not known is one that ran out."""
        with self._lock:
            self._end(token)

    def expire(self) -> None:
        """End what has run out."""
        now_s = self._clock()
        with self._lock:
            late = [token for token, lent in self._lent.items() if lent.expires_s <= now_s]
            for token in late:
                self._end(token)

    def call_in(self) -> None:
        """End all remote leases now."""
        with self._lock:
            for token in list(self._lent):
                self._end(token)

    def _end(self, token: bytes) -> None:
        lent = self._lent.pop(token, None)
        if lent is not None:
            self._num_pages -= lent.lease.num_pages
            self._num_with_pages -= lent.lease.num_pages > 0
            lent.lease.release()
