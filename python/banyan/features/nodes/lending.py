# SPDX-License-Identifier: Apache-2.0
"""What a page server says to each message: no socket, no thread of its own.

Invariants
  1. What is lent is leased, and no more than a part of the arena (`RemoteLeases`). No more is promised.
  2. A page server that lends nothing answers all the same: that it refuses.
  3. After ``withdraw`` nothing of the export is held here. It waits for the checksums of one layer at most.
  4. Only ``borrow`` takes long, for its checksums, and nobody waits for it but who borrows.

States: lending nothing <-> lending an export (one namespace) -> ended. Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

from banyan import _native
from banyan.features.nodes.exported_arena import ExportedArena
from banyan.features.nodes.nixl_pulls import LentByNixl
from banyan.features.nodes.path_probe import MOST_PROBES_AT_ONCE, PROBES_PER_S, TOO_MANY, ProbeBytes
from banyan.features.nodes.remote_leases import RemoteLeases
from banyan.features.nodes.wire import (
    Answer,
    Ask,
    Borrow,
    BorrowToRead,
    Probe,
    ReadableLease,
    Refused,
    RemoteLease,
    Return,
    ToBorrower,
    pack_sums,
    unpack_keys,
)
from banyan.pacing.allowance import Allowance

OTHER_WEIGHTS = "other weights, or another layout of KV"


class Lending:
    """One page server's."""

    def __init__(self, *, max_pages: int, clock: Callable[[], float], by_nixl: LentByNixl | None = None) -> None:
        """``max_pages``: lent at once."""
        self.by_nixl = by_nixl
        self.remote_leases = RemoteLeases(max_pages=max_pages, clock=clock)
        self.num_pages = 0
        """Pages lent so far."""
        self.num_refused = 0
        self._clock = clock
        self._lock = threading.Condition()
        self._num_borrowing = 0
        self._probes = Allowance(per_s=PROBES_PER_S, burst=MOST_PROBES_AT_ONCE, now_s=clock())
        self._exported: ExportedArena | None = None
        self._has_ended = False

    def lend(self, exported: ExportedArena) -> None:
        """From now on lend from ``exported``."""
        with self._lock:
            if self._has_ended:
                return
            self._exported = exported
        if self.by_nixl is not None:
            self.by_nixl.lend(self._memories)

    def withdraw(self) -> None:
        """Lend nothing any more; what was lent is called in."""
        with self._lock:
            self._exported = None
            self.remote_leases.call_in()
            self._lock.wait_for(lambda: not self._num_borrowing)
        if self.by_nixl is not None:
            self.by_nixl.withdraw()

    def end(self) -> None:
        """A thread that lends has ended by a fault: lend nothing any more, after the next change of weights neither."""
        self._has_ended = True
        self.withdraw()

    def _memories(self) -> Sequence[_native.PeerMemory]:
        with self._lock:
            return [] if self._exported is None else self._exported.memories()

    def lends(self, namespace: bytes) -> bool:
        """Whether pages of that namespace are lent now."""
        exported = self._exported
        return exported is not None and exported.namespace == namespace

    def answer(self, message: Ask | Return | Probe, *, port: int) -> ToBorrower | None:
        """What to say to who sent ``message``, if anything; the bytes of a remote lease come from ``port``."""
        if isinstance(message, Return):
            self.remote_leases.give_back(message.token)
            return None
        if isinstance(message, Probe):
            return self._probe(message, port)
        with self._lock:
            exported = self._exported_to(message)
            num_pages = None if exported is None else exported.num_pages(unpack_keys(message.keys))
            # Not held beyond the lock, behind which `withdraw` takes it for gone.
            del exported
        if num_pages is None:
            self.num_refused += 1
            return Refused(message.number, OTHER_WEIGHTS)
        return Answer(message.number, min(num_pages, self.remote_leases.num_to_lend))

    def borrow(self, message: Borrow, *, port: int, num_reserved: int = 0) -> ToBorrower:
        """As ``answer``, for who borrows; ``num_reserved`` pages of room were kept for it."""
        with self._borrowing():
            answer = self._borrow(message, port, num_reserved)
        self.num_refused += isinstance(answer, Refused)
        return answer

    def _exported_to(self, message: Ask | Borrow) -> ExportedArena | None:
        return self._exported if self.lends(message.namespace) else None

    def _probe(self, message: Probe, port: int) -> ToBorrower:
        """Whether or not anything else is lent."""
        with self._lock:
            if not self._probes.take(1, self._clock()):
                return Refused(message.number, TOO_MANY)
        probe = ProbeBytes(message.num_bytes)
        lent = self.remote_leases.lend(probe, probe)
        return RemoteLease(message.number, lent.token, port, b"")

    @contextmanager
    def _borrowing(self) -> Iterator[None]:
        """Somebody may hold something of the export."""
        with self._lock:
            self._num_borrowing += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_borrowing -= 1
                self._lock.notify_all()

    def _borrow(self, message: Borrow, port: int, num_reserved: int) -> ToBorrower:
        if not self.lends(message.namespace):
            return Refused(message.number, OTHER_WEIGHTS)
        keys = unpack_keys(message.keys)
        num_to_reserve = max(0, len(keys) - num_reserved)
        if self.remote_leases.is_full or not self.remote_leases.reserve(num_to_reserve):
            return Refused(message.number, "too much is lent")
        try:
            return self._lend(message, keys, port)
        finally:
            self.remote_leases.unreserve(num_to_reserve)

    def _lend(self, message: Borrow, keys: list[str], port: int) -> ToBorrower:
        with self._lock:
            exported = self._exported_to(message)
            leased = None if exported is None else exported.lease(keys)
        if leased is None:
            return Refused(message.number, "gone")
        lease, leased_frames = leased
        layers = leased_frames.sums(message.namespace, keys)
        sums = list(takewhile(lambda layer: self._exported is exported, layers))
        with self._lock:
            if self._exported is not exported:
                lease.release()
                return Refused(message.number, OTHER_WEIGHTS)
            lent = self.remote_leases.lend(lease, leased_frames)
        self.num_pages += len(keys)
        readable = None
        if isinstance(message, BorrowToRead) and self.by_nixl is not None and message.backend == self.by_nixl.backend:
            readable = self.by_nixl.readable(leased_frames)
        said = message.number, lent.token, port, pack_sums(sums)
        return RemoteLease(*said) if readable is None else ReadableLease(*said, *readable)
