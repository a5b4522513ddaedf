# SPDX-License-Identifier: Apache-2.0
"""Two nodes in one process: each has a roster, a rank with an arena part, and what it needs to lend or to borrow."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from test.unit.arena.test_backup import ARENAS, Host
from test.unit.cache_rig import LAYOUT, make_cache
from test.unit.directory.rig import NAMESPACE, frames, keys

from banyan import _native
from banyan.arena.prefetch import Prefetch
from banyan.arena.remote_tier import OtherNodes, RemoteTier
from banyan.core import Address, SourceKind
from banyan.layout import BlockGeometry
from banyan.nodes.borrower import Borrower
from banyan.nodes.door import Door
from banyan.nodes.goods import ArenaStock
from banyan.nodes.secret import Keys
from banyan.nodes.tcp import Carrier, TcpCarrier

LAYER_BYTES = 4096
NUM_LAYERS = 3
KEYS = Keys.of(b"a secret of all nodes")
DOOR_BIT = 2 * LAYOUT.num_ranks


def block_of(layer_bytes: int) -> BlockGeometry:
    """Pages of as many layers as those of the pool."""
    return BlockGeometry(((layer_bytes // 2, layer_bytes // 2),) * NUM_LAYERS)


BLOCK = block_of(LAYER_BYTES)


def whole(num_missing: int, num_found: int, kind: SourceKind) -> int:
    assert kind is SourceKind.REMOTE
    return num_found


def free_address() -> Address:
    """Two free ports in a row, as far as can be told."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = one.getsockname()[1]
            try:
                with socket.create_server(("127.0.0.1", port + 1)):
                    return Address("127.0.0.1", port)
            except OSError:
                continue


def until(condition: Callable[[], Any], *, timeout_s: float = 10) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "timed out"
        time.sleep(0.001)


class Node(Host):
    """A node of one rank with pages of its own making."""

    def __init__(self, *, num_frames: int = 8, layer_bytes: int = LAYER_BYTES) -> None:
        self.roster = _native.Roster.create(2 * LAYOUT.num_ranks)
        self.block = block_of(layer_bytes)
        super().__init__(self.roster, 0, num_frames=num_frames, page_bytes=layer_bytes // 2, block=self.block)
        self.door: Door | None = None
        self.borrower: Borrower | None = None

    def keep(self, numbers: Sequence[int], targets: Sequence[int]) -> list[list[bytes]]:
        """Publish pages of the pool and copy them down to the arena; their bytes."""
        self.rank.shelf.publish(frames(*targets), keys(*numbers))
        self.backup.offer(keys(*numbers))
        assert self.wait_landed()
        return [self.rank.pages(target) for target in targets]

    def stock(self, namespace: bytes = NAMESPACE) -> ArenaStock:
        view = _native.Peers(
            self.roster, None, DOOR_BIT, namespace, self.block.table(), self.memory, self.block.frame_bytes
        )
        return ArenaStock(view, namespace=namespace, arena_slots=ARENAS, block=self.block)

    def lend(self, *, max_pages: int = 100, keys: Keys = KEYS, address: Address | None = None) -> Address:
        address = free_address() if address is None else address
        self.door = Door(address, keys, max_pages=max_pages, num_layers=NUM_LAYERS)
        self.door.lending.lend(self.stock())
        return address

    def borrow_from(self, *nodes: Address, keys: Keys = KEYS, carrier: Carrier | None = None) -> None:
        self.borrower = Borrower(
            nodes, keys, namespace=NAMESPACE, block=self.block, carrier=carrier if carrier is not None else TcpCarrier()
        )
        self.borrow_through(self.borrower)

    def borrow_through(self, nodes: OtherNodes) -> None:
        self.prefetch = Prefetch(
            store=None,
            residency=self.residency,
            peers=self.view,
            arena_slots=ARENAS,
            memory=self.memory,
            frame_bytes=self.block.frame_bytes,
            max_pages=1000,
            layers_per_read=1,
            counters=self.counters,
        )
        self.remote = RemoteTier(
            nodes,
            bring=lambda keys, worth, found: self.prefetch.start_pull(keys, worth, found, nodes.read, found.origin),
            prefetch=self.prefetch,
            counters=self.counters,
            clock=time.monotonic,
        )
        self.cache = make_cache(
            self.rank.shelf,
            self.rank.peers,
            slot=0,
            slots=[1, *ARENAS],
            counters=self.counters,
            prefetch=self.prefetch,
        )

    def poll(self) -> None:
        self.remote.poll()
        self.prefetch.poll()

    def wait_answered(self, rid: str) -> None:
        """Until nobody can answer for this request any more."""

        def is_over() -> bool:
            self.poll()
            return not self.remote.is_awaited(rid)

        until(is_over)

    def close(self) -> None:
        if self.borrower is not None:
            self.prefetch.quiesce()
            self.borrower.close()
        if self.door is not None:
            self.door.close()
