# SPDX-License-Identifier: Apache-2.0
"""What a page server says to each message: no socket, no thread of its own.

Invariants
  1. What is lent is leased, and no more than a part of the arena (`RemoteLeases`).
  2. A page server that lends nothing answers all the same: that it refuses.
  3. After ``withdraw`` nothing of the export is held here.

States: lending nothing <-> lending an export (one namespace). Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from banyan.features.nodes.exported_arena import ExportedArena
from banyan.features.nodes.limits import Allowance
from banyan.features.nodes.path_probe import MOST_PROBES_AT_ONCE, PROBES_PER_S, ProbeBytes, ProbeLease
from banyan.features.nodes.remote_leases import RemoteLeases
from banyan.features.nodes.wire import (
    Answer,
    Ask,
    Borrow,
    Probe,
    Refused,
    RemoteLease,
    Return,
    ToBorrower,
    pack_sums,
    unpack_keys,
)

OTHER_WEIGHTS = "other weights, or another layout of KV"


class Lending:
    """One page server's."""

    def __init__(self, *, max_pages: int, clock: Callable[[], float]) -> None:
        """``max_pages``: lent at once."""
        self.remote_leases = RemoteLeases(max_pages=max_pages, clock=clock)
        self.num_pages = 0
        """Pages lent so far."""
        self.num_refused = 0
        self._lock = threading.Lock()
        self._probes = Allowance(per_s=PROBES_PER_S, burst=MOST_PROBES_AT_ONCE, clock=clock)
        self._exported: ExportedArena | None = None

    def lend(self, exported: ExportedArena) -> None:
        """From now on lend from ``exported``."""
        with self._lock:
            self._exported = exported

    def withdraw(self) -> None:
        """Lend nothing any more; what was lent is called in."""
        with self._lock:
            self._exported = None
            self.remote_leases.call_in()

    def lends(self, namespace: bytes) -> bool:
        """Whether pages of that namespace are lent now."""
        exported = self._exported
        return exported is not None and exported.namespace == namespace

    def answer(self, message: Ask | Borrow | Return | Probe, *, port: int, num_reserved: int = 0) -> ToBorrower | None:
        """What to say to who sent ``message``, if anything; the bytes of a remote lease come from ``port``.
        ``num_reserved`` pages of room were kept for it."""
        if isinstance(message, Return):
            self.remote_leases.give_back(message.token)
            return None
        if isinstance(message, Probe):
            return self._probe(message, port)
        with self._lock:
            answer = self._answer(message, port, num_reserved)
        self.num_refused += isinstance(answer, Refused)
        return answer

    def _probe(self, message: Probe, port: int) -> ToBorrower:
        """Whether or not anything else is lent."""
        with self._lock:
            if not self._probes.take():
                return Refused(message.number, "too many probes")
        lent = self.remote_leases.lend(ProbeLease(), ProbeBytes(message.num_bytes))
        return RemoteLease(message.number, lent.token, port, b"")

    def _answer(self, message: Ask | Borrow, port: int, num_reserved: int) -> ToBorrower:
        exported = self._exported
        if exported is None or exported.namespace != message.namespace:
            return Refused(message.number, OTHER_WEIGHTS)
        keys = unpack_keys(message.keys)
        if isinstance(message, Ask):
            return Answer(message.number, exported.num_pages(keys))
        if not self.remote_leases.has_room(len(keys) - num_reserved):
            return Refused(message.number, "too much is lent")
        leased = exported.lease(keys)
        if leased is None:
            return Refused(message.number, "gone")
        lease, leased_frames = leased
        sums = pack_sums(leased_frames.sums(exported.namespace, keys))
        lent = self.remote_leases.lend(lease, leased_frames)
        self.num_pages += len(keys)
        return RemoteLease(message.number, lent.token, port, sums)
