# SPDX-License-Identifier: Apache-2.0
"""The pools of peers, opened in this process: of GPUs through their handles, of the host as registered memory.

Invariants
  1. A peer is a slot and an epoch: the same rank in another life is another peer.
  2. A mapping is closed when its peer is gone and no copy uses it, and never before: unmapping what a kernel reads is
     a fault of the whole context.
  3. A peer that could not be opened is not tried again: its epoch would have to change first.
  4. What lies in this process is used where it is: nobody opens a handle of his own.
  5. A peer is used when it is open and its row of the table has reached the device; until then, and where it could not
     be opened, its slot is not ``reachable`` and nothing is looked for there. The caller never waits for an opening,
     nor for a closing.
  6. Of a peer's memory of the host the device knows what was wanted before. A page in a piece that it does not know is
     not had this time: the piece is registered on the executor's thread, for the next one, as soon as the rank does not
     rest, and behind it those that follow. After a refusal the peer's are not asked for again before ``RETRY_S``.

States of a peer: unknown --attend--> opening (on the executor's thread) --poll--> placed --poll--> open --gone-->
leaving --last release--> closed; opening --refused--> barred; placed --other bytes than announced--> barred; opening
--gone--> given up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Event

from banyan import _native
from banyan.transport.cuda_ipc.description import PoolDescription
from banyan.transport.cuda_ipc.driver import CudaDriver, DriverError
from banyan.transport.cuda_ipc.host_pieces import KeptPieces
from banyan.transport.cuda_ipc.opening import (
    GivenUpError,
    HostFrames,
    Opened,
    open_host,
    p2p_fix_rebuild_cuda_tensor,
)
from banyan.transport.cuda_ipc.places import PlaceTable
from banyan.transport.cuda_ipc.probe import ProbeReader

logger = logging.getLogger("banyan")

RETRY_S = 30.0
"""After a refusal, until the device is asked again to know pieces of that memory."""

PATIENCE_S = 5.0
"""For the device to come past what placing a peer takes."""

Peer = tuple[int, int]
"""Slot and epoch."""


@dataclass(slots=True)
class _Opening:
    future: Future[Opened | None]
    given_up: Event


@dataclass(slots=True)
class _Mapping:
    row: int
    opened: Opened
    placed: int | None
    """An event behind the row's way to the device; None once it is there."""
    num_users: int = 0
    is_leaving: bool = False
    asks_from_s: float = 0.0
    """Of the host's memory: until then no piece is asked for, since one was refused."""


class PeerMappings:
    """Opens each wanted peer once, ahead of its first use, and closes it when it is gone. One thread calls."""

    def __init__(
        self,
        *,
        driver: CudaDriver,
        places: PlaceTable,
        page_bytes: tuple[int, ...],
        alignment_bytes: int,
        announcements: _native.Peers,
        own_rows: Mapping[int, int],
        wanted_slots: Collection[int],
        executor: ThreadPoolExecutor,
        registrations: KeptPieces,
        prober: ProbeReader | None = None,
        visible_uuids: Collection[bytes] = (),
    ) -> None:
        """``page_bytes`` of each extent, alike for all of a namespace; ``own_rows``: slot -> row of what is our own.

        ``executor`` has one thread. ``registrations`` outlive this object: what they keep is not registered again.
        ``alignment_bytes`` is what the kernel was compiled for: a peer whose pages lie otherwise is not opened. With a
        ``prober`` no pool on a GPU is believed before its probe was read; ``visible_uuids``: the GPUs that this process
        sees, so that a pool that cannot be opened and lies on another is named as such.
        """
        self._prober = prober
        self._visible_uuids = frozenset(visible_uuids)
        self._driver = driver
        self._context = driver.current_context()
        self._places = places
        self._page_bytes = page_bytes
        self._alignment_bytes = alignment_bytes
        self._announcements = announcements
        self._own_rows = dict(own_rows)
        self._wanted_slots = frozenset(wanted_slots).difference(own_rows)
        self._executor = executor
        self._registrations = registrations
        self._opening: dict[Peer, _Opening] = {}
        self._open: dict[Peer, _Mapping] = {}
        self._barred: set[Peer] = set()
        self._wanted_pieces: dict[tuple[Peer, int], HostFrames] = {}
        """Of the host's memory, to be registered or being registered, the first first."""
        self._pinning: tuple[tuple[Peer, int], Future[None]] | None = None
        self._reachable: frozenset[int] = frozenset(own_rows)
        self.version = 0
        """Changes with ``reachable``."""

    def reachable(self, slots: Sequence[int]) -> list[int]:
        """Those of ``slots`` whose pools can be read now, in the same order."""
        return [slot for slot in slots if slot in self._reachable]

    def acquire(self, peer: Peer, pages: Sequence[int]) -> int | None:
        """The row of the peer's pool, kept open until ``release``.

        None when it is not open, when the device does not know these pages yet, or when the pool is too small for one
        of them: such a peer is not to be believed.
        """
        if peer[0] in self._own_rows:
            return self._own_rows[peer[0]]
        mapping = self._open.get(peer)
        if mapping is None or mapping.placed is not None or mapping.is_leaving:
            return None
        if max(pages) >= mapping.opened.num_pages:
            return None
        if mapping.opened.host is not None and not self._knows(peer, mapping, mapping.opened.host, pages):
            return None
        mapping.num_users += 1
        return mapping.row

    def _knows(self, peer: Peer, mapping: _Mapping, host: HostFrames, pages: Sequence[int]) -> bool:
        """Whether the device knows these pages; what it does not is registered for whoever asks next."""
        missing = host.missing(pages)
        now, later = ({(peer, piece): host for piece in pieces} for pieces in (sorted(missing), host.ahead(pages)))
        # The device may have had no room just then.
        if (now or later) and time.monotonic() >= mapping.asks_from_s:
            self._wanted_pieces = {**now, **self._wanted_pieces, **later}
            self._pin_next()
        return not missing

    def _pin_next(self) -> None:
        """Have the other thread register the next piece, where it registers none and the rank does not rest."""
        if self._pinning is not None:
            wanted, future = self._pinning
            if not future.done():
                return
            self._pinning = None
            self._wanted_pieces.pop(wanted, None)
            if (error := future.exception()) is not None:
                self._note_refusal(wanted[0], error)
        while self._wanted_pieces and self._pinning is None and not self._registrations.is_resting:
            wanted, host = next(iter(self._wanted_pieces.items()))
            peer, piece = wanted
            if peer in self._open and not self._open[peer].is_leaving:
                self._pinning = wanted, self._executor.submit(partial(host.pieces.pin, piece))
            else:
                # What has been closed may be unmapped.
                del self._wanted_pieces[wanted]

    def _note_refusal(self, peer: Peer, error: BaseException) -> None:
        logger.warning("banyan: some pages in the memory of slot %d are not shared: %s", peer[0], error)
        self._wanted_pieces = {wanted: host for wanted, host in self._wanted_pieces.items() if wanted[0] != peer}
        if peer in self._open:
            self._open[peer].asks_from_s = time.monotonic() + RETRY_S

    def release(self, peer: Peer) -> None:
        if peer[0] not in self._own_rows:
            mapping = self._open[peer]
            mapping.num_users -= 1
            self._close_if_unused(peer, mapping)

    def attend(self, present: Collection[Peer]) -> None:
        """Begin to open wanted peers that have come, and close those that are not ``present`` any more: what is in use
        as soon as it is not."""
        for peer, mapping in list(self._open.items()):
            if peer not in present:
                mapping.is_leaving = True
                self._close_if_unused(peer, mapping)
        for peer, opening in self._opening.items():
            if peer not in present:
                opening.given_up.set()
        self._barred.intersection_update(present)
        for peer in present:
            known = peer in self._open or peer in self._opening or peer in self._barred
            if peer[0] in self._wanted_slots and not known:
                self._begin(peer)
        if self._registrations.has_idle:
            self._executor.submit(self._registrations.sweep)
        self._tell_reachable()

    def poll(self) -> None:
        """Go on with what the other thread and the device have done. Called on every scheduling step."""
        self._pin_next()
        for peer, opening in list(self._opening.items()):
            # One probe at a time: the next peer is taken when it has been read.
            if opening.future.done() and not (self._prober is not None and self._prober.is_busy):
                del self._opening[peer]
                self._take(peer, opening)
        for peer, mapping in list(self._open.items()):
            if mapping.placed is not None and self._driver.is_event_done(mapping.placed):
                self._driver.destroy_event(mapping.placed)
                mapping.placed = None
                self._verify(peer, mapping)
                self._close_if_unused(peer, mapping)
                self._tell_reachable()

    def close(self) -> None:
        """Close all, on the other thread. Nothing may be in use."""
        self.attend(())
        deadline_s = time.monotonic() + PATIENCE_S
        while self._open and time.monotonic() < deadline_s:
            self.poll()
        for opening in self._opening.values():
            self._executor.submit(partial(_close, opening.future))
        self._opening.clear()
        assert not self._open, f"{len(self._open)} mapping(s) are in use"

    def _tell_reachable(self) -> None:
        usable = {peer[0] for peer, mapping in self._open.items() if mapping.placed is None and not mapping.is_leaving}
        reachable = usable.union(self._own_rows)
        if reachable != self._reachable:
            self._reachable = frozenset(reachable)
            self.version += 1

    def _close_if_unused(self, peer: Peer, mapping: _Mapping) -> None:
        # Until it is placed the device may be reading its probe.
        if not mapping.is_leaving or mapping.num_users or mapping.placed is not None:
            return
        del self._open[peer]
        self._places.give_row(mapping.row)
        self._executor.submit(mapping.opened.close)
        logger.info("banyan: closed the pool of slot %d", peer[0])

    def _begin(self, peer: Peer) -> None:
        given_up = Event()

        def go_on() -> None:
            if given_up.is_set():
                raise GivenUpError

        # Asked for here: the other thread only opens.
        described, memory = self._announcements.description(*peer), None
        if described is None:
            memory = self._announcements.mapping(*peer)
        if described is None and memory is None:
            return  # It has just left.

        def open_pool() -> Opened | None:
            self._driver.enter_context(self._context)
            if memory is not None:
                name = f"the memory of slot {peer[0]}"
                return open_host(self._registrations, memory, self._page_bytes, go_on, name)
            assert described is not None
            return self._open_on_gpu(PoolDescription.decode(described), go_on)

        self._opening[peer] = _Opening(self._executor.submit(open_pool), given_up)

    def _open_on_gpu(self, description: PoolDescription, go_on: Callable[[], None]) -> Opened:
        probe = description.probe
        if self._prober is not None and probe is not None and probe.extent.num_bytes < self._prober.num_bytes:
            raise ValueError(f"its probe has {probe.extent.num_bytes} bytes, of {self._prober.num_bytes}")
        try:
            return p2p_fix_rebuild_cuda_tensor(self._driver, description, self._page_bytes, go_on)
        except DriverError as error:
            # Tried all the same: the driver opens handles of GPUs that this process does not see, where it can.
            if self._visible_uuids and description.device_uuid not in self._visible_uuids:
                hidden = "it lies on a GPU that CUDA_VISIBLE_DEVICES hides from this process"
                raise ValueError(f"{error}; {hidden}") from error
            raise

    def _take(self, peer: Peer, opening: _Opening) -> None:
        """What the other thread has opened, or why it could not."""
        opened = _result(opening.future)
        if not isinstance(opened, Opened):
            if not isinstance(opened, GivenUpError):
                self._bar(peer, f"the pool of slot {peer[0]} cannot be opened", opened)
            return
        if opening.given_up.is_set():
            self._executor.submit(opened.close)
            return
        row = None
        try:
            opened.check_alignment(self._alignment_bytes)
            placed = self._driver.create_event()
            row = self._places.take_row()
            self._places.write(row, opened.bases, opened.strides)
            if self._prober is not None and opened.probe is not None:
                self._prober.begin(opened.probe[1])
            self._driver.record_event(placed, self._places.stream)
        except (DriverError, ValueError) as error:
            # Once something was enqueued it stays open: the device may be reading its probe, and nobody can tell when.
            if row is None:
                self._executor.submit(opened.close)
            self._bar(peer, f"no place for the pool of slot {peer[0]}", error)
            return
        self._open[peer] = _Mapping(row, opened, placed)

    def _verify(self, peer: Peer, mapping: _Mapping) -> None:
        """The device has read the probe: give the mapping up where it does not hold what its owner says."""
        if self._prober is None or mapping.opened.probe is None or self._prober.matches(mapping.opened.probe[0]):
            return
        self._bar(peer, f"the pool of slot {peer[0]} reads as other bytes than it holds", None)
        mapping.is_leaving = True

    def _bar(self, peer: Peer, what: str, error: BaseException | None) -> None:
        self._barred.add(peer)
        logger.warning("banyan: %s, its pages are computed: %s", what, error or "is an IOMMU in the way?")


def _close(future: Future[Opened | None]) -> None:
    """On the thread that opens, so what ``future`` is of has ended."""
    opened = _result(future)
    if isinstance(opened, Opened):
        opened.close()


def _result(future: Future[Opened | None]) -> Opened | BaseException | None:
    """What it opened, or what it raised. Waits for its end."""
    error = future.exception()
    return future.result() if error is None else error
