# SPDX-License-Identifier: Apache-2.0
"""The pools of peers, opened in this process: of GPUs through their handles, of the host as registered memory.

Invariants
  1. A peer is a slot and an epoch: the same rank in another life is another peer.
  2. A mapping is closed when its peer is gone and no copy uses it, and never before: unmapping what a kernel reads is
     a fault of the whole context.
  3. A peer that could not be opened is not tried again: its epoch would have to change first.
  4. What lies in this process is used where it is: nobody opens a handle of his own.

States of a peer: unknown --acquire--> open --gone--> leaving --last release--> closed; unknown --refused--> barred.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from banyan.transport.cuda_ipc.description import PoolDescription
from banyan.transport.cuda_ipc.driver import CopyDriver, DriverError
from banyan.transport.cuda_ipc.places import PlaceTable

logger = logging.getLogger("banyan")

Peer = tuple[int, int]
"""Slot and epoch."""


class HostMemory(Protocol):
    """A peer's pool as the native core maps it; mapped for as long as the object lives."""

    @property
    def address(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def extents(self) -> list[tuple[int, int]]:
        """``(base_bytes, stride_bytes)`` of each."""
        ...


class Announcements(Protocol):
    """What peers say about their pools: the part of ``banyan._native.Peers`` that this needs."""

    def description(self, slot: int, epoch: int) -> bytes | None: ...

    def mapping(self, slot: int, epoch: int) -> HostMemory | None: ...


@dataclass(frozen=True, slots=True)
class Opened:
    """A pool that kernels can read: address and stride of each extent, and how to let go of it."""

    bases: Sequence[int]
    strides: Sequence[int]
    num_pages: int
    close: Callable[[], None]


@dataclass(slots=True)
class _Mapping:
    row: int
    opened: Opened
    num_users: int = 0
    is_leaving: bool = False


class PeerMappings:
    """Opens each peer once and closes it when it is gone. One thread."""

    def __init__(
        self,
        *,
        driver: CopyDriver,
        places: PlaceTable,
        page_bytes: tuple[int, ...],
        alignment_bytes: int,
        announcements: Announcements,
        own_rows: Mapping[int, int],
    ) -> None:
        """``page_bytes`` of each extent, alike for all of a namespace; ``own_rows``: slot -> row of what is our own.

        ``alignment_bytes`` is what the kernel was compiled for: a peer whose pages lie otherwise is not opened.
        """
        self._driver = driver
        self._places = places
        self._page_bytes = page_bytes
        self._alignment_bytes = alignment_bytes
        self._announcements = announcements
        self._own_rows = dict(own_rows)
        self._open: dict[Peer, _Mapping] = {}
        self._barred: set[Peer] = set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def acquire(self, peer: Peer, last_page: int) -> int | None:
        """The row of the peer's pool, kept open until ``release``.

        None when it cannot be opened, or when it is too small for ``last_page``: such a peer is not to be believed.
        """
        if peer[0] in self._own_rows:
            return self._own_rows[peer[0]]
        mapping = self._open.get(peer)
        if mapping is None:
            mapping = self._try_open(peer)
        if mapping is None or mapping.is_leaving or last_page >= mapping.opened.num_pages:
            return None
        mapping.num_users += 1
        return mapping.row

    def release(self, peer: Peer) -> None:
        if peer[0] not in self._own_rows:
            mapping = self._open[peer]
            mapping.num_users -= 1
            self._close_if_unused(peer, mapping)

    def keep(self, present: Collection[Peer]) -> None:
        """Close the peers that are not ``present`` any more, those in use as soon as they are not."""
        for peer, mapping in list(self._open.items()):
            if peer not in present:
                mapping.is_leaving = True
                self._close_if_unused(peer, mapping)
        self._barred.intersection_update(present)

    def close(self) -> None:
        """Close all. Nothing may be in use."""
        self.keep(())
        assert not self._open, f"{len(self._open)} mapping(s) are in use"

    def _close_if_unused(self, peer: Peer, mapping: _Mapping) -> None:
        if not mapping.is_leaving or mapping.num_users:
            return
        del self._open[peer]
        self._places.give_row(mapping.row)
        mapping.opened.close()
        logger.info("banyan: closed the pool of slot %d", peer[0])

    def _try_open(self, peer: Peer) -> _Mapping | None:
        if peer in self._barred:
            return None
        try:
            opened = self._opened(peer)
        except (DriverError, ValueError) as error:
            self._barred.add(peer)
            logger.warning("banyan: the pool of slot %d cannot be opened, its pages are computed: %s", peer[0], error)
            return None
        if opened is None:
            return None
        try:
            self._check_alignment(opened)
            row = self._places.take_row()
            self._places.write(row, opened.bases, opened.strides)
        except (DriverError, ValueError) as error:
            opened.close()
            self._barred.add(peer)
            logger.warning("banyan: no place for the pool of slot %d, its pages are computed: %s", peer[0], error)
            return None
        mapping = self._open[peer] = _Mapping(row, opened)
        return mapping

    def _check_alignment(self, opened: Opened) -> None:
        if any(number % self._alignment_bytes for number in (*opened.bases, *opened.strides)):
            raise ValueError(f"its pages are not aligned to {self._alignment_bytes} bytes")

    def _opened(self, peer: Peer) -> Opened | None:
        """Open the pool of ``peer``; None when it has left.

        Raises:
            DriverError: when the driver refuses.
            ValueError: when what it announced does not fit this rank's pool.
        """
        described = self._announcements.description(*peer)
        if described is not None:
            return open_described(self._driver, PoolDescription.decode(described), self._page_bytes)
        memory = self._announcements.mapping(*peer)
        return None if memory is None else open_host(self._driver, memory, self._page_bytes)


def open_described(driver: CopyDriver, description: PoolDescription, page_bytes: Sequence[int]) -> Opened:
    """Open a peer's pool on a GPU through its handles. See ``PeerMappings._opened`` for errors."""
    if len(description.extents) != len(page_bytes):
        raise ValueError(f"{len(description.extents)} extents, this rank's pool has {len(page_bytes)}")
    bases: list[int] = []

    def close() -> None:
        for base in bases:
            _let_go(driver.close_handle, base)

    try:
        for segment in description.segments:
            bases.append(driver.open_handle(segment.handle))
    except DriverError:
        close()
        raise
    pairs = zip(description.extents, page_bytes, strict=True)
    return Opened(
        bases=[bases[extent.segment] + extent.offset_bytes for extent in description.extents],
        strides=page_bytes,
        num_pages=min(extent.num_bytes // size for extent, size in pairs),
        close=close,
    )


def open_host(driver: CopyDriver, memory: HostMemory, page_bytes: Sequence[int]) -> Opened:
    """Register a peer's memory of the host, so that kernels read it. See ``PeerMappings._opened`` for errors."""
    if len(memory.extents) != len(page_bytes):
        raise ValueError(f"{len(memory.extents)} extents, this rank's pool has {len(page_bytes)}")
    address = driver.register_host_reading(memory.address, memory.num_bytes)
    triples = zip(memory.extents, page_bytes, strict=True)
    return Opened(
        bases=[address + base for base, _ in memory.extents],
        strides=[stride for _, stride in memory.extents],
        num_pages=min((memory.num_bytes - base - size) // stride + 1 for (base, stride), size in triples),
        # The closure holds `memory`: it is unregistered before it is unmapped.
        close=lambda: _let_go(driver.unregister_host, memory.address),
    )


def _let_go(close: Callable[[int], None], address: int) -> None:
    try:
        close(address)
    except DriverError as error:
        # The memory stays mapped until this process ends; there is nothing else that it would break.
        logger.warning("banyan: a mapping of a peer's pool could not be closed: %s", error)
