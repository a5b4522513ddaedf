# SPDX-License-Identifier: Apache-2.0
"""The pools of peers, opened in this process.

Invariants
  1. A peer is a slot and an epoch: the same rank in another life is another peer.
  2. A mapping is closed when its peer is gone and no copy uses it, and never before: unmapping what a kernel reads is
     a fault of the whole context.
  3. A peer that could not be opened is not tried again: its epoch would have to change first.

States of a peer: unknown --acquire--> open --gone--> leaving --last release--> closed; unknown --refused--> barred.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

from banyan.transport.cuda_ipc.description import PoolDescription
from banyan.transport.cuda_ipc.driver import DriverError, Ipc
from banyan.transport.cuda_ipc.places import PlaceTable

logger = logging.getLogger("banyan")

Peer = tuple[int, int]
"""Slot and epoch."""


@dataclass(slots=True)
class _Mapping:
    row: int
    num_pages: int
    bases: list[int]
    num_users: int = 0
    is_leaving: bool = False


class PeerMappings:
    """Opens each peer once and closes it when it is gone. One thread."""

    def __init__(
        self,
        *,
        ipc: Ipc,
        places: PlaceTable,
        strides: tuple[int, ...],
        description: Callable[[int, int], bytes | None],
    ) -> None:
        """``description`` answers for a peer. ``strides``: bytes from page to page of each extent, alike for all."""
        self._ipc = ipc
        self._places = places
        self._strides = strides
        self._description = description
        self._open: dict[Peer, _Mapping] = {}
        self._barred: set[Peer] = set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def acquire(self, peer: Peer, last_page: int) -> int | None:
        """The row of the peer's pool, kept open until ``release``.

        None when it cannot be opened, or when it is too small for ``last_page``: such a peer is not to be believed.
        """
        mapping = self._open.get(peer)
        if mapping is None:
            mapping = self._try_open(peer)
        if mapping is None or mapping.is_leaving or last_page >= mapping.num_pages:
            return None
        mapping.num_users += 1
        return mapping.row

    def release(self, peer: Peer) -> None:
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
        self._unmap(mapping.bases)
        logger.info("banyan: closed the pool of slot %d", peer[0])

    def _unmap(self, bases: list[int]) -> None:
        for base in bases:
            try:
                self._ipc.close_handle(base)
            except DriverError as error:
                # The memory stays mapped until this process ends; there is nothing else that it would break.
                logger.warning("banyan: a mapping of a peer's pool could not be closed: %s", error)

    def _try_open(self, peer: Peer) -> _Mapping | None:
        if peer in self._barred:
            return None
        described = self._description(*peer)
        if described is None:
            return None
        bases: list[int] = []
        try:
            description = PoolDescription.decode(described)
            num_pages = self._num_pages(description)
            for segment in description.segments:
                bases.append(self._ipc.open_handle(segment.handle))
            row = self._places.take_row()
        except (DriverError, ValueError) as error:
            self._unmap(bases)
            self._barred.add(peer)
            logger.warning("banyan: the pool of slot %d cannot be opened, its pages are computed: %s", peer[0], error)
            return None
        addresses = [bases[extent.segment] + extent.offset_bytes for extent in description.extents]
        self._places.write(row, addresses, self._strides)
        mapping = self._open[peer] = _Mapping(row, num_pages, bases)
        return mapping

    def _num_pages(self, description: PoolDescription) -> int:
        if len(description.extents) != len(self._strides):
            raise ValueError(f"{len(description.extents)} extents, this rank's pool has {len(self._strides)}")
        pairs = zip(description.extents, self._strides, strict=True)
        return min(extent.num_bytes // stride for extent, stride in pairs)
