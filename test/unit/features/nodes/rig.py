# SPDX-License-Identifier: Apache-2.0
"""Two nodes in one process: each has a rank table, a rank with an arena part, and what it needs to lend or to
borrow."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from test.unit.arena.test_backup import ARENAS, Host
from test.unit.cache_rig import LAYOUT, make_cache
from test.unit.directory.rig import NAMESPACE, frames, keys

from banyan import _native
from banyan.arena.owners import Owners
from banyan.arena.page_source import Wanted, Worth
from banyan.arena.prefetch import Prefetch
from banyan.arena.store_tier import StoreTier
from banyan.core import Address, Run, SourceKind
from banyan.features.nodes.borrower import Borrower
from banyan.features.nodes.dual_path import DualPath, Part
from banyan.features.nodes.exported_arena import ExportedArena
from banyan.features.nodes.nixl_pulls import LentByNixl, ReadByNixl
from banyan.features.nodes.node_tier import NodeTier
from banyan.features.nodes.page_server import PageServer
from banyan.features.nodes.remote_prefetch_tier import RemotePrefetchTier
from banyan.features.nodes.tcp import TcpCarrier
from banyan.layout import BlockGeometry
from banyan.pacing.admission import Admission, WriteAdmission
from banyan.transport.sealed.secret import Keys

LAYER_BYTES = 4096
NUM_LAYERS = 3
KEYS = Keys.of(b"a secret of all nodes")
PAGE_SERVER_BIT = 2 * LAYOUT.num_ranks
LEAST_PAGES = 1
"""That another node reads."""


def block_of(layer_bytes: int) -> BlockGeometry:
    """Pages of as many layers as those of the pool."""
    return BlockGeometry(((layer_bytes // 2, layer_bytes // 2),) * NUM_LAYERS)


BLOCK = block_of(LAYER_BYTES)


def whole(num_missing: int, found: Run) -> int:
    assert found.kind is SourceKind.REMOTE
    return found.num_pages


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
        self.rank_table = _native.RankTable.create(2 * LAYOUT.num_ranks)
        self.block = block_of(layer_bytes)
        super().__init__(self.rank_table, 0, num_frames=num_frames, page_bytes=layer_bytes // 2, block=self.block)
        self.store: _native.Store | None = None
        self.page_server: PageServer | None = None
        self.borrower: Borrower | None = None

    def keep(self, numbers: Sequence[int], targets: Sequence[int]) -> list[list[bytes]]:
        """Publish pages of the pool and copy them down to the arena; their bytes."""
        self.rank.frame_table.publish(frames(*targets), keys(*numbers))
        self.backup.offer(keys(*numbers))
        assert self.wait_landed()
        return [self.rank.pages(target) for target in targets]

    def exported(self, namespace: bytes = NAMESPACE) -> ExportedArena:
        view = _native.Peers(
            self.rank_table, None, PAGE_SERVER_BIT, namespace, self.block.table(), self.memory, self.block.frame_bytes
        )
        return ExportedArena(view, namespace=namespace, arena_slots=ARENAS, block=self.block)

    def lend(
        self,
        *,
        max_pages: int = 100,
        keys: Keys = KEYS,
        address: Address | None = None,
        by_nixl: LentByNixl | None = None,
    ) -> Address:
        address = free_address() if address is None else address
        self.page_server = PageServer(address, keys, max_pages=max_pages, num_layers=NUM_LAYERS, by_nixl=by_nixl)
        self.page_server.lending.lend(self.exported())
        return address

    def borrow_from(
        self, *nodes: Address, keys: Keys = KEYS, carrier: Any = None, by_nixl: Sequence[ReadByNixl] = ()
    ) -> None:
        self.borrower = Borrower(
            nodes,
            keys,
            namespace=NAMESPACE,
            block=self.block,
            carrier=carrier if carrier is not None else TcpCarrier(),
            by_nixl=by_nixl,
        )
        self.borrow_through(self.borrower)

    def make_prefetch(self) -> Prefetch:
        return Prefetch(
            store=self.store,
            residency=self.residency,
            peers=self.view,
            arena_slots=ARENAS,
            memory=self.memory,
            frame_bytes=self.block.frame_bytes,
            max_pages=1000,
            layers_per_read=1,
            counters=self.counters,
        )

    def borrow_through(self, nodes: Any) -> None:
        self.prefetch = self.make_prefetch()
        self.remote = NodeTier(nodes, prefetch=self.prefetch, counters=self.counters, clock=time.monotonic)
        self.cache = make_cache(
            self.rank.frame_table,
            self.rank.peers,
            slot=0,
            slots=[1, *ARENAS],
            counters=self.counters,
            prefetch=self.prefetch,
            is_sent_for=self.remote.is_sent_for,
            send_for=self.remote.is_sent_for,
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
        if self.page_server is not None:
            self.page_server.close()


class StoreNode(Node):
    """A node with a store behind its arena. Two of them may share ``folder``."""

    def __init__(self, folder: Path, *, num_frames: int = 8, read_bytes_per_s: int | None = None) -> None:
        super().__init__(num_frames=num_frames)
        self.store = _native.Store.open(
            [str(folder)],
            NAMESPACE,
            self.block.layer_bytes,
            quota_bytes=64 << 20,
            share_bytes=32 << 20,
            floor_bytes=0,
            read_bytes_per_s=read_bytes_per_s,
        )
        self.remote_prefetches: RemotePrefetchTier | None = None
        self.remote: NodeTier | None = None
        self.prefetch = self.make_prefetch()
        self.tier = self._make_tier()

    def _make_tier(self) -> StoreTier:
        return StoreTier(
            store=self.store,
            residency=self.residency,
            prefetch=self.prefetch,
            memory=self.memory,
            block=self.block,
            admission=WriteAdmission(Admission.FIRST_ACCESS, budget=None),
            owners=Owners(),
            counters=self.counters,
        )

    def save(self, numbers: Sequence[int], targets: Sequence[int]) -> list[list[bytes]]:
        """Bring pages of the pool to the store, and nowhere else; their bytes."""
        self.tier.learn([keys(*numbers)])
        pages = self.keep(numbers, targets)
        self.tier.landed(keys(*numbers))
        until(lambda: self.poll() or self.counters.archived_pages == len(numbers))
        self.rank.frame_table.reset()
        self.residency.reset()
        return pages

    def take_remote_prefetches(self) -> None:
        self.remote_prefetches = RemotePrefetchTier(
            self.page_server.take_remote_prefetches(max_pages=self.page_server.lending.remote_leases.max_pages),
            prefetch=self.prefetch,
            residency=self.residency,
            counters=self.counters,
            clock=time.monotonic,
        )

    def borrow_through(self, nodes: Any) -> None:
        super().borrow_through(nodes)
        self.tier = self._make_tier()
        self.path = DualPath(self.tier, self.remote, self.prefetch, LEAST_PAGES, lambda request: self.said)

    def arrive(self, request: str, keys: Sequence[str], num_held: int, worth: Worth, **said: Any) -> None:
        """A request has come of which was said who reads."""
        self.said = Part(**said)
        self.path.ask(Wanted(request, keys, num_held, worth))

    def look_again(self, request: str, keys: Sequence[str], num_held: int, worth: Worth, **said: Any) -> None:
        self.said = Part(**said)
        self.path.start_read(Wanted(request, keys, num_held, worth))

    def poll(self) -> None:
        if self.remote is not None:
            self.remote.poll()
        self.prefetch.poll()
        self.tier.poll()
        if self.remote_prefetches is not None:
            self.remote_prefetches.poll()

    def close(self) -> None:
        self.prefetch.quiesce()
        super().close()
        self.store.close()
