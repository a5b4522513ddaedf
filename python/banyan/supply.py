# SPDX-License-Identifier: Apache-2.0
"""Where pages of one kind come from: the frame tables that a rank asks, and behind them what is on its way from the
store.

A list of pages is supplied from its beginning: what was matched on the frame tables is leased, the rest is taken over
from reads. All of it or nothing. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from banyan.arena.prefetch import InFlightRead, Prefetch
from banyan.core import Refusal, Run
from banyan.ports import Copy, Frames, Lease, Match, Peers


@dataclass(frozen=True, slots=True)
class Held:
    """What a fetch copies from, and where to: leased pages first, then what is on its way from the store."""

    lease: Lease | None
    in_flight_reads: Sequence[InFlightRead]
    frames: Frames

    @property
    def num_leased(self) -> int:
        return 0 if self.lease is None else self.lease.num_pages


@dataclass(slots=True)
class Nothing:
    """What nobody holds."""

    num_pages: int = 0
    runs: list[tuple[int, int]] = field(default_factory=list)


class Nobody:
    """The peers of a rank that has left them."""

    def version(self) -> int:
        return 0

    def lookup(self, keys: Sequence[str], slots: Sequence[int] | None = None) -> Match:
        return Nothing()

    def holders(self, keys: Sequence[str], slots: Sequence[int]) -> Sequence[int | None]:
        return [None] * len(keys)

    def read_access_logs(self, slots: Sequence[int]) -> Sequence[bytes]:
        return ()

    def touch(self, match: Match) -> None:
        pass

    def lease(self, match: Match, keys: Sequence[str]) -> Lease | None:
        return None

    def start_copy(self, loads: object, arrivals: object = ()) -> Copy:
        raise RuntimeError("this rank has left its peers")


class Supply:
    """One rank's.

    Args:
        slots: the rank table slots to ask, the preferred first.
        prefetch: brings pages up from the store; None without one.
    """

    def __init__(self, peers: Peers, slots: Sequence[int], prefetch: Prefetch | None) -> None:
        self.peers = peers
        self.slots = slots
        self.prefetch = prefetch

    @property
    def version(self) -> tuple[int, int]:
        """Differs from the last answer when a page may be found that was not, or the other way round."""
        return self.peers.version(), self.prefetch.version if self.prefetch is not None else 0

    def lookup(self, keys: Sequence[str], slots: Sequence[int] | None = None) -> Match:
        """The leading pages that the frame tables hold; of equally long runs the first of ``slots`` supplies."""
        return self.peers.lookup(keys, self.slots if slots is None else slots)

    def holders(self, keys: Sequence[str]) -> Sequence[int | None]:
        """For each page by itself the first of the frame tables that holds it."""
        return self.peers.holders(keys, self.slots)

    def arriving(self, keys: Sequence[str]) -> Sequence[Run]:
        """The leading pages that are on their way from the store."""
        return () if self.prefetch is None or not keys else self.prefetch.arriving(keys)

    @property
    def on_their_way(self) -> Container[str]:
        """Pages that a read from the store may bring; ``arriving`` knows which have failed."""
        return () if self.prefetch is None else self.prefetch.on_their_way

    def hold(self, match: Match, keys: Sequence[str], frames: Frames) -> Held | Refusal:
        """All pages of ``keys``: leases on what was matched, and behind them what comes from the store."""
        num_leased = min(match.num_pages, len(keys))
        in_flight_reads = self._attach(keys[num_leased:], frames[num_leased:])
        if in_flight_reads is None:
            return Refusal.IN_FLIGHT_READ
        try:
            lease = self.peers.lease(match, keys[:num_leased]) if num_leased else None
        except BaseException:
            self.detach(in_flight_reads)
            raise
        if num_leased and lease is None:
            self.detach(in_flight_reads)
            return Refusal.LEASE
        return Held(lease, in_flight_reads, frames[:num_leased])

    def _attach(self, keys: Sequence[str], frames: Frames) -> Sequence[InFlightRead] | None:
        """What comes from the store, nothing for no keys, or None when it is not coming."""
        if not keys:
            return ()
        return None if self.prefetch is None else self.prefetch.attach(keys, frames)

    def let_go(self, held: Held) -> None:
        """It will not be copied."""
        if held.lease is not None:
            held.lease.release()
        self.detach(held.in_flight_reads)

    def detach(self, in_flight_reads: Sequence[InFlightRead]) -> None:
        """Their copies have ended, or will not start."""
        for in_flight_read in in_flight_reads:
            assert self.prefetch is not None
            self.prefetch.detach(in_flight_read)

    def take_unfollowed(self) -> Sequence[tuple[Run, float]]:
        """Reads that no copy has followed, as ``Prefetch`` has them."""
        return () if self.prefetch is None else self.prefetch.take_unfollowed()

    def start_copy(self, held: Sequence[Held]) -> Copy:
        """Start to copy all of it into the frames that it was held for."""
        loads = [(item.lease, item.frames) for item in held if item.lease is not None]
        in_flight_reads = [in_flight_read for item in held for in_flight_read in item.in_flight_reads]
        return self.peers.start_copy(loads, [(item.read, item.positions, item.frames) for item in in_flight_reads])

    def are_good(self, in_flight_reads: Sequence[InFlightRead]) -> bool:
        """Whether every page was verified; waits for the reads. Each is looked at: a page that failed may have been
        copied as if it were good."""
        return all([self.prefetch.is_good(item) for item in in_flight_reads if self.prefetch is not None])

    def look_at_ended(self, in_flight_reads: Sequence[InFlightRead]) -> None:
        """From now on nobody counts on the pages that failed of reads that are over, or late."""
        self.are_good([item for item in in_flight_reads if item.read.has_ended or item.read.is_late])
