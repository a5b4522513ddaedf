# SPDX-License-Identifier: Apache-2.0
"""Memory of the host that a device knows, piece by piece, and as late as it can be.

Registering takes a tenth of a second to a second for each GiB, under locks that the driver has once for the machine,
and memory of the device for page tables: what nobody reads is not registered.

Invariants
  1. No single call registers more than ``PIECE_BYTES``: others wait for its end, and some kernels and drivers refuse
     more. A rank that serves rests between two of them (``Pinned``).
  2. All pieces of one memory have one address on the device: that of the first, which is registered first.
  3. A piece is registered once, and let go before its memory is unmapped.

States of a piece: unknown --pin--> pinned --close--> let go; unknown --refused--> unknown. ``pin`` and ``close`` come
from one thread; any thread may ask what is pinned.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from banyan import _native
from banyan.transport.cuda_ipc.driver import CudaDriver, DriverError

logger = logging.getLogger("banyan")

PIECE_BYTES = 64 << 20
"""Held up by one are others for some 60 ms at most. An arena of 59 GiB has 944: they are looked up, never walked, but
where one more is pinned."""

AHEAD_PIECES = 16
"""Of a peer's memory, behind one that is wanted: it is filled from the front, and who wants a page of a piece that is
not pinned yet does not have it."""

SAID_PIECES = 16
"""A line of the log for so many."""

RESTS = 4
"""So many times as long as a piece took, the driver's locks are left to others."""

KEEP_S = 60.0
"""How long a peer's memory stays registered after the last use: it is announced again when the weights have changed."""

LEAST_FREE_BYTES = 256 << 20
"""Of the device. A forward that finds no memory ends the server; pages that are not had are computed."""


def look_at_room(driver: CudaDriver) -> None:
    """
    Raises:
        DriverError: where the device has no room for page tables beside what forwards need.
    """
    if driver.free_bytes() < LEAST_FREE_BYTES:
        raise DriverError("cuMemHostRegister", f"less than {LEAST_FREE_BYTES >> 20} MiB of the device are free")


Identity = tuple[int, int]


@dataclass(slots=True)
class Pinned:
    """What a rank has registered so far. ``device_bytes``: by how much the device's free memory fell meanwhile."""

    num_bytes: int = 0
    took_s: float = 0.0
    device_bytes: int = 0
    rests_until_s: float = 0.0

    def add(self, num_bytes: int, took_s: float, device_bytes: int) -> None:
        """A piece was registered just now."""
        self.num_bytes += num_bytes
        self.took_s += took_s
        # Others allocate meanwhile: what they gave back is not ours.
        self.device_bytes += max(0, device_bytes)
        self.rests_until_s = max(self.rests_until_s, time.monotonic() + RESTS * took_s)

    @property
    def is_resting(self) -> bool:
        """Whether no thread of this rank may register another piece yet."""
        return time.monotonic() < self.rests_until_s


class HostPieces:
    """One memory. ``register`` makes ``(address, num_bytes)`` known and returns the device's address; ``name`` is for
    the log."""

    def __init__(
        self,
        driver: CudaDriver,
        *,
        address: int,
        num_bytes: int,
        register: Callable[[int, int], int],
        name: str,
        pinned: Pinned,
    ) -> None:
        self.num_bytes = num_bytes
        self.device_address = 0
        """Known once the first piece is pinned."""
        self._driver = driver
        self._context = driver.current_context()
        self._address = address
        self._register = register
        self._name = name
        self._total = pinned
        self._pieces: frozenset[int] = frozenset()

    @property
    def num_pinned_bytes(self) -> int:
        """From the front, without a gap."""
        num_whole = 0
        while num_whole in self._pieces:
            num_whole += 1
        return min(num_whole * PIECE_BYTES, self.num_bytes)

    @property
    def is_resting(self) -> bool:
        """Whether the next piece is to wait, be it of another memory of the rank."""
        return self._total.is_resting

    @property
    def is_whole(self) -> bool:
        return len(self._pieces) * PIECE_BYTES >= self.num_bytes

    def missing(self, firsts: NDArray[np.int64], lasts: NDArray[np.int64]) -> set[int]:
        """The pieces that lie from each first byte to its last one and are not pinned. Thousands are asked for at once,
        and what a frame of states has between may be longer than a piece."""
        first, last = firsts // PIECE_BYTES, lasts // PIECE_BYTES
        spanned = np.add.outer(np.arange((last - first).max() + 1), first)
        return set(np.unique(np.minimum(spanned, last)).tolist()).difference(self._pieces)

    def ahead(self, place: int) -> list[int]:
        """The next pieces behind this byte, as far as they are not pinned."""
        first, num_pieces = place // PIECE_BYTES + 1, -(-self.num_bytes // PIECE_BYTES)
        return [piece for piece in range(first, min(first + AHEAD_PIECES, num_pieces)) if piece not in self._pieces]

    def pin_to(self, num_bytes: int) -> None:
        """Pin what lies before, all of each piece. Raises as ``pin``."""
        for piece in range(-(-num_bytes // PIECE_BYTES)):
            self.pin(piece)

    def pin(self, piece: int) -> None:
        """
        Raises:
            DriverError: when the driver refuses.
            ValueError: when the device sees it apart from the first piece.
        """
        if piece in self._pieces:
            return
        # Whichever thread grows the arena.
        self._driver.enter_context(self._context)
        offset = piece * PIECE_BYTES
        num_bytes = min(PIECE_BYTES, self.num_bytes - offset)
        free_bytes, began_s = self._driver.free_bytes(), time.monotonic()
        seen_at = self._register(self._address + offset, num_bytes) - offset
        if self._pieces and seen_at != self.device_address:
            self._let_go(offset)
            raise ValueError("its pieces are not adjacent on the device")
        self.device_address = seen_at
        self._pieces |= {piece}
        took_s = time.monotonic() - began_s
        self._total.add(num_bytes, took_s, free_bytes - self._driver.free_bytes())
        if len(self._pieces) % SAID_PIECES == 1 or self.is_whole:
            self._say(num_bytes, took_s)

    def _say(self, num_bytes: int, took_s: float) -> None:
        total = self._total
        logger.info(
            "banyan: pinned piece %d of %s, %d MiB in %.3f s; %.2f GiB in all in %.1f s, which took %d MiB of the "
            "device's memory",
            len(self._pieces),
            self._name,
            num_bytes >> 20,
            took_s,
            total.num_bytes / 2**30,
            total.took_s,
            total.device_bytes >> 20,
        )

    def close(self) -> None:
        """Let go of all pieces. Nothing on the device may use them any more."""
        for piece in self._pieces:
            self._let_go(piece * PIECE_BYTES)
            self._total.num_bytes -= min(PIECE_BYTES, self.num_bytes - piece * PIECE_BYTES)
        self._pieces = frozenset()

    def _let_go(self, offset: int) -> None:
        try:
            self._driver.unregister_host(self._address + offset)
        except DriverError as error:
            # It stays mapped until this process ends; there is nothing else that it would break.
            logger.warning("banyan: a piece of %s could not be let go: %s", self._name, error)


@dataclass(slots=True)
class _Kept:
    memory: _native.PeerMemory
    """Keeps it mapped."""
    pieces: HostPieces
    num_users: int = 0
    unused_since_s: float = 0.0


class KeptPieces:
    """The memories of peers that a rank has registered, each once, however often they are announced.

    Bound: one for each peer that is there, and those that left in the last ``KEEP_S``. Only ``has_idle`` is asked by
    another thread than the one that opens.
    """

    def __init__(self, driver: CudaDriver, pinned: Pinned) -> None:
        self._driver = driver
        self._pinned = pinned
        self._kept: dict[Identity, _Kept] = {}

    def take(self, memory: _native.PeerMemory, name: str) -> HostPieces:
        """``memory``, or the same as it was mapped before, with its first piece pinned. Raises as ``pin``."""
        kept = self._kept.get(memory.identity)
        if kept is None:
            pieces = HostPieces(
                self._driver,
                address=memory.address,
                num_bytes=memory.num_bytes,
                register=partial(self._register, memory.address),
                name=name,
                pinned=self._pinned,
            )
            pieces.pin(0)
            kept = self._kept[memory.identity] = _Kept(memory, pieces)
        kept.num_users += 1
        return kept.pieces

    def _register(self, first: int, address: int, num_bytes: int) -> int:
        """A peer's memory, as long as forwards have room beside its page tables. Without its ``first`` piece, which
        takes little, it would not be opened, and not be tried again."""
        if address != first:
            look_at_room(self._driver)
        return self._driver.register_host_reading(address, num_bytes)

    @property
    def is_resting(self) -> bool:
        """As ``HostPieces.is_resting``."""
        return self._pinned.is_resting

    def give_back(self, identity: Identity) -> None:
        """One user less."""
        kept = self._kept[identity]
        kept.num_users -= 1
        kept.unused_since_s = time.monotonic()

    @property
    def has_idle(self) -> bool:
        """Whether ``sweep`` would let go of something."""
        return any(self._is_idle(kept) for kept in list(self._kept.values()))

    def sweep(self) -> None:
        """Let go of what nobody has used for ``KEEP_S``."""
        for identity, kept in list(self._kept.items()):
            if self._is_idle(kept):
                del self._kept[identity]
                kept.pieces.close()

    def _is_idle(self, kept: _Kept) -> bool:
        return kept.num_users == 0 and time.monotonic() - kept.unused_since_s > KEEP_S
