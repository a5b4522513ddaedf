# SPDX-License-Identifier: Apache-2.0
"""Pages of a remote lease that the borrower reads where they lie, by NIXL: both ends. Neither runs NIXL itself: a
process does, one for what is lent and one for each node that is borrowed from (``banyan.transport.nixl``).

Invariants
  1. What another node says of places goes to NIXL as where to read from, and never as where to write to.
  2. A pull has ended when its process has said that nothing is written for it any more, or is dead.
  3. Where a process cannot be had now, bytes go over TCP: nothing waits for it.

The lender's process maps the arena read-only, where its network takes that. A process that ends lets go of whatever was
read through it: so lending ends.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Generator, Sequence
from functools import partial

from banyan import _native
from banyan.core import Address
from banyan.features.nodes.exported_arena import LeasedFrames, PartFrames
from banyan.features.nodes.tcp import SLOW_S, STALL_S, Pace
from banyan.features.nodes.wire import PLACE_BYTES, Foreign, ReadableLease
from banyan.transport.nixl.process import Declined, Kept, NixlProcess

logger = logging.getLogger("banyan")

MAX_PLACE = 1 << 63

Memories = Callable[[], Sequence[_native.PeerMemory]]
"""The parts of the arena that are lent from now. A process may take longer to start than they are: who starts it holds
their memory at most, and no claim on a reader bit."""


class LentByNixl:
    """The lender's end. Any thread."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.num_lent = 0
        """Remote leases that could be read so."""
        self._kept: Kept | None = None

    def lend(self, memories: Memories) -> None:
        self.withdraw()
        self._kept = Kept(partial(self._start, memories), what="lending by NIXL")

    def withdraw(self) -> None:
        """When this returns nobody reads any more."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()

    @property
    def is_ready(self) -> bool:
        kept = self._kept
        return kept is not None and kept.get() is not None

    def readable(self, leased_frames: LeasedFrames) -> tuple[bytes, bytes] | None:
        """Agent and places for a `ReadableLease`; None where it cannot be read by NIXL now."""
        kept = self._kept
        process = None if kept is None else kept.get()
        if kept is None or process is None:
            return None
        places = array("Q")
        for part in leased_frames.parts:
            base = process.addresses.get(part.memory.identity)
            if base is None:
                # A rank that came later: the next process knows its part.
                kept.renew()
                return None
            places.extend(base + offset for offset in part.offsets)
        self.num_lent += 1
        return process.metadata, places.tobytes()

    def _start(self, memories: Memories) -> NixlProcess:
        process = NixlProcess(self.backend, "lend")
        try:
            _map(process, memories, is_writable=False)
        except Declined as error:
            # Cards register memory as what may be written.
            logger.warning(
                "banyan: NIXL does not register the arena for reading alone (%s): nodes that know the secret can write "
                "to it",
                error,
            )
            process = NixlProcess(self.backend, "lend")
            _map(process, memories, is_writable=True)
        return process


def _map(process: NixlProcess, memories: Memories, *, is_writable: bool) -> None:
    with process.killed_on_error():
        for memory in memories():
            process.map(memory.path, memory.identity, memory.num_bytes, is_writable=is_writable)


class ReadByNixl:
    """The borrower's end, for one node. Any thread."""

    def __init__(self, backend: str, memory: _native.SharedBytes) -> None:
        """``memory``: this rank's part of the arena."""
        self.backend = backend
        self.num_carried = 0
        self._kept = Kept(partial(_start_to_read, backend, memory), what="borrowing by NIXL")

    @property
    def is_ready(self) -> bool:
        return self._kept.get() is not None

    @property
    def num_started(self) -> int:
        return self._kept.num_started

    def carrier(self, lease: ReadableLease) -> NixlCarrier:
        return NixlCarrier(self._kept.get, lease, carried=self._carried)

    def _carried(self) -> None:
        self.num_carried += 1

    def close(self) -> None:
        self._kept.close()


def _start_to_read(backend: str, memory: _native.SharedBytes) -> NixlProcess:
    process = NixlProcess(backend, "borrow")
    with process.killed_on_error():
        process.map(memory.path, None, memory.num_bytes, is_writable=True)
    return process


class NixlCarrier:
    """Brings the bytes of one remote lease, as ``tcp.TcpCarrier`` does."""

    def __init__(
        self,
        process: Callable[[], NixlProcess | None],
        lease: ReadableLease,
        *,
        carried: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``carried`` is called when all has come."""
        self._process = process
        self._lease = lease
        self._carried = carried
        self._clock = clock

    def pull(
        self,
        source: Address,
        token: bytes,
        target: PartFrames[_native.SharedBytes],
        num_layers: int,
        *,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Generator[int, None, None]:
        """As ``TcpCarrier.pull``.

        Raises:
            OSError: when the source or the process is gone, or no byte has come for ``STALL_S``, or it is not wanted.
            StillWriting: when it cannot be had that nothing is written any more.
        """
        _check_places(self._lease.places, len(target.offsets), sum(target.layer_bytes))
        process = self._process()
        if process is None:
            raise ConnectionError("the NIXL process has ended")
        pace = Pace(SLOW_S)
        offsets = array("Q", target.offsets).tobytes()
        channel = process.carry(self._lease.agent, self._lease.places, offsets, target.layer_bytes)
        try:
            num_landed, moved_s = 0, self._clock()
            for layer in range(num_layers):
                until_s = pace.until_s(len(target.offsets) * target.layer_bytes[layer])
                while num_landed <= layer:
                    self._check_goes_on(until_s, moved_s, is_wanted)
                    told = channel.num_landed()
                    if told is not None:
                        num_landed, moved_s = told, self._clock()
                yield layer
                # What has come meanwhile has not been heard yet.
                moved_s = self._clock()
            self._carried()
        finally:
            channel.end()

    def _check_goes_on(self, until_s: float, moved_s: float, is_wanted: Callable[[], bool]) -> None:
        now_s = self._clock()
        if not is_wanted():
            raise ConnectionAbortedError("nobody waits for it any more")
        if now_s - moved_s >= STALL_S:
            raise TimeoutError(f"no byte has come for {STALL_S} s")
        if now_s >= until_s:
            raise TimeoutError("bytes pass too slowly to be waited for")


def _check_places(packed: bytes, num_pages: int, block_bytes: int) -> None:
    """
    Raises:
        Foreign: when they are not so many, or no addresses.
    """
    if len(packed) != num_pages * PLACE_BYTES:
        raise Foreign("places of another number of pages")
    if any(place > MAX_PLACE - block_bytes for place in array("Q", packed)):
        raise Foreign("a place where nothing can lie")
