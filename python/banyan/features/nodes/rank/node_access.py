# SPDX-License-Identifier: Apache-2.0
"""This rank's dealings with other nodes: the page server that it may keep for all ranks, and what it borrows for
itself.

The first rank of a server keeps the page servers, one on each shard: each lends from the arena parts of all ranks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from banyan import _native
from banyan.arena.page_source import Source
from banyan.config import Config
from banyan.core import Address
from banyan.features.nodes.borrower import Borrower
from banyan.features.nodes.dual_path import DualPath, Part
from banyan.features.nodes.exported_arena import ExportedArena
from banyan.features.nodes.nixl_pulls import LentByNixl, ReadByNixl
from banyan.features.nodes.node_tier import Choose, NodeTier, the_first
from banyan.features.nodes.page_server import PageServer
from banyan.features.nodes.rank import said
from banyan.features.nodes.remote_prefetch_tier import RemotePrefetchTier
from banyan.features.nodes.remote_prefetches import RemotePrefetches
from banyan.features.nodes.tcp import TcpCarrier
from banyan.layout import BlockGeometry
from banyan.layout.member_slots import MemberSlots
from banyan.owner import read_secret
from banyan.refusals import secret_refusal
from banyan.refusals.start import page_server_refusal
from banyan.routing.reads import LEAST_PART_TOKENS
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank.points import SourceAccess, TierParts
from banyan.telemetry import Counters
from banyan.transport.sealed.secret import Keys

logger = logging.getLogger("banyan")

MAX_LENT_SHARE = 4
"""What is lent stays: a quarter of the frames of the arena at most. So does what is read for other nodes: a quarter of
those of the part that it comes into."""


class NodeAccess(SourceAccess):
    """One rank's side of the page server and of the other nodes'. Scheduler thread only.

    States: apart -> ``join`` (a namespace) -> joined -> ``leave`` -> apart -> ... -> ``close``.
    """

    def __init__(
        self, config: Config, *, member_slots: MemberSlots, rank_table: _native.RankTable, block: BlockGeometry
    ) -> None:
        """Refuses a secret that cannot be used."""
        self._config = config
        self._member_slots = member_slots
        self._rank_table = rank_table
        self._block = block
        self._page_server: PageServer | None = None
        self._borrower: Borrower | None = None
        self.remote_prefetches: RemotePrefetches | None = None
        self.path: DualPath | None = None
        """Of the present namespace: this rank's store and the other nodes as one source, where it has both."""
        self.reads: Callable[[str], Part | None] = lambda request: None
        """Who is to read what of a request's prompt."""
        self.choose: Choose = the_first
        try:
            self._keys = Keys.of(read_secret(Path(config.secret_file)))
        except (OSError, ValueError) as error:
            runtime.refuse(secret_refusal(path=config.secret_file, error=error))

    def join(self, namespace: bytes, memory: _native.SharedBytes) -> Borrower | None:
        """Lend and borrow pages of ``namespace``; ``memory`` is this rank's part of the arena. What borrows, if there
        is anybody to borrow from."""
        if self._config.listen and self._member_slots.is_of_first_rank:
            self._lend(namespace, memory)
        plugin = self._config.nixl_plugin
        if self._config.peers:
            self._borrower = Borrower(
                [Address.parse(peer).of_shard(self._member_slots.shard) for peer in self._config.peers],
                self._keys,
                namespace=namespace,
                block=self._block,
                carrier=TcpCarrier(self._config.dscp),
                by_nixl=[ReadByNixl(plugin, memory) for _ in self._config.peers] if plugin else (),
            )
            logger.info("banyan: pages of other nodes come by %s", _carrier_in_words(plugin))
        return self._borrower

    def sources(self, parts: TierParts, nearer: Sequence[Source]) -> list[Source]:
        """Behind the store the other nodes, or, where a prompt may be divided among both, the two as one; and what this
        rank's store is to bring for other nodes."""
        sources, self.path = list(nearer), None
        borrower = self.join(parts.namespace, parts.memory)
        if borrower is not None:
            nodes = NodeTier(
                borrower,
                prefetch=parts.prefetch,
                counters=parts.counters,
                clock=time.monotonic,
                told=self._told,
                choose=lambda request, num_missing, found: self.choose(request, num_missing, found),
            )
            sources = self._behind(sources, nodes, parts)
        if self.remote_prefetches is not None:
            sources.append(
                RemotePrefetchTier(
                    self.remote_prefetches,
                    prefetch=parts.prefetch,
                    residency=parts.residency,
                    counters=parts.counters,
                    clock=time.monotonic,
                )
            )
        return sources

    def _behind(self, nearer: list[Source], nodes: NodeTier, parts: TierParts) -> list[Source]:
        store = parts.store
        if store is None:
            # What a store knows only when it is asked cannot be divided when the request comes.
            return [*nearer, nodes]
        least_pages = LEAST_PART_TOKENS // self._rank_table.page_tokens
        path = self.path = DualPath(store, nodes, parts.prefetch, least_pages, lambda request: self.reads(request))
        return [path if source is store else source for source in nearer]

    def _told(self, request: str) -> Sequence[str] | None:
        """The page servers that were named for the request. A hint names a node by its first shard's."""
        source = said.source_of(request)
        return (
            None
            if source is None
            else [str(page_server.of_shard(self._member_slots.shard)) for page_server in source.page_servers]
        )

    def _lend(self, namespace: bytes, memory: _native.SharedBytes) -> None:
        plugin = self._config.nixl_plugin
        if self._page_server is None:
            address = Address.parse(self._config.listen).of_shard(self._member_slots.shard)
            num_own = self._block.num_frames(memory.num_bytes)
            num_frames = len(self._member_slots.arenas) * num_own
            try:
                self._page_server = PageServer(
                    address,
                    self._keys,
                    max_pages=max(1, num_frames // MAX_LENT_SHARE),
                    num_layers=len(self._block.layer_bytes),
                    dscp=self._config.dscp,
                    in_flight_bytes=self._config.in_flight_kb << 10,
                    by_nixl=LentByNixl(plugin) if plugin else None,
                )
            except OSError as error:
                runtime.refuse(page_server_refusal(address=address, error=error))
            logger.info(
                "banyan: the page server for other nodes is at %s, and lends by %s", address, _carrier_in_words(plugin)
            )
            if self._config.store:
                self.remote_prefetches = self._page_server.take_remote_prefetches(
                    max_pages=max(1, num_own // MAX_LENT_SHARE)
                )
        reader_bit = self._member_slots.layout.num_slots(has_arena=True) + self._member_slots.shard
        table, frame_bytes = self._block.table(), self._block.frame_bytes
        view = _native.Peers(self._rank_table, None, reader_bit, namespace, table, memory, frame_bytes)
        self._page_server.lending.lend(
            ExportedArena(view, namespace=namespace, arena_slots=self._member_slots.arenas, block=self._block)
        )

    def call_in(self) -> None:
        """Lend nothing any more: the frames are about to be given up."""
        if self._page_server is not None:
            self._page_server.withdraw()

    def leave(self) -> None:
        """No pull is under way any more: let the other nodes go."""
        if self._borrower is not None:
            self._borrower.close()
            self._borrower = self.path = None

    def close(self) -> None:
        self.leave()
        if self._page_server is not None:
            self._page_server.close()
            self._page_server = None

    def count(self, counters: Counters) -> None:
        """Bring this rank's counters up to date."""
        if self._page_server is not None:
            counters.lent_pages = self._page_server.lending.num_pages
            counters.lent_bytes = self._page_server.sent_bytes
            counters.remote_leases_refused = self._page_server.lending.num_refused

    def state(self) -> dict[str, Any]:
        """The part of ``/server_info``."""
        state: dict[str, Any] = {}
        if self._page_server is not None:
            state["page_server"] = {
                "address": str(self._page_server.address),
                "num_remote_leases": self._page_server.lending.remote_leases.num_remote_leases,
                "num_remote_lease_pages": self._page_server.lending.remote_leases.num_pages,
                "num_foreign_messages": self._page_server.num_foreign,
                "most_read_tokens": self._page_server.most_remote_prefetch_pages * self._rank_table.page_tokens,
            }
            by_nixl = self._page_server.lending.by_nixl
            if by_nixl is not None:
                state["page_server"] |= {"num_lent_by_nixl": by_nixl.num_lent, "has_nixl": by_nixl.is_ready}
        if self._borrower is not None:
            state["nodes"] = {
                "num_nodes": len(self._config.peers),
                "asked": list(self._config.peers),
                "num_listening": self._borrower.num_listening,
                "num_lost_pulls": self._borrower.num_lost,
                "num_foreign_messages": self._borrower.num_foreign,
            }
            if self._config.nixl_plugin:
                state["nodes"] |= self._borrower.carriers.nixl_state()
        return state


def _carrier_in_words(plugin: str) -> str:
    return f"NIXL ({plugin}), or TCP where the other node has none" if plugin else "TCP"
