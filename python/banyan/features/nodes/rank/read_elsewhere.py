# SPDX-License-Identifier: Apache-2.0
"""Requests of a rank for which another node reads: they keep their place, and others go on.

Invariants
  1. Nobody waits here. A rank of several shards asks without waiting: they would have to agree on when to go on.
  2. What a router has said about who reads holds when the request comes, and for one more time when something is
     missing at its turn. After that this rank reads: a request does not wait over and over.

A request: come -> sent for -> answered; at its turn, if pages have left: sent for -> answered -> read here. Scheduler
thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from banyan.arena.page_source import Wanted
from banyan.features.nodes.dual_path import DualPath, Part
from banyan.features.nodes.rank import said
from banyan.features.nodes.rank.node_access import NodeAccess
from banyan.sglang_plugin.rank import requests
from banyan.sglang_plugin.rank.kind import Kind
from banyan.sglang_plugin.rank.one_rank import Rank
from banyan.sglang_plugin.rank.points import Attachment, Points


def register(points: Points) -> None:
    opened: list[NodeAccess] = []

    def open_access(kind: Kind) -> NodeAccess | None:
        if not kind.config.deals_with_nodes:
            return None
        opened.append(
            NodeAccess(kind.config, member_slots=kind.member_slots, rank_table=kind.rank_table, block=kind.block)
        )
        return opened[-1]

    def attach(rank: Rank) -> Attachment:
        elsewhere = ReadElsewhere(rank, lambda: opened[-1].path if opened else None)
        for access in opened:
            access.reads = elsewhere.part_of
            access.choose = rank.choose_read
        return elsewhere

    points.sources.append(open_access)
    points.attach.append(attach)


class ReadElsewhere(Attachment):
    """One rank's. ``path``: its store and the other nodes' beside it, where it has both."""

    def __init__(self, rank: Rank, path: Callable[[], DualPath | None]) -> None:
        self.can_wait = rank.can_hold_back
        self._rank = rank
        self._path = path
        rank.cache.read_elsewhere(self)

    def part_of(self, request: str) -> Part | None:
        """Who is to read what of the request's prompt, where that can be waited for."""
        reads = said.reads_of(request) if self.can_wait else None
        return None if reads is None else Part(reads.node, reads.first_token // self._rank.page_tokens)

    def is_sent_for(self, request: str) -> bool:
        """Whether another node is reading for the request."""
        path = self._path()
        return path is not None and path.is_sent_for(request)

    def send_for(self, request: str) -> bool:
        """For a request of whose prompt something is missing, and all may have been here when it came: whether another
        node reads it, or this one has just begun to, as a router has said."""
        path, tier = self._path(), self._rank.kinds.full.tier
        if path is None or tier is None or path.is_sent_for(request) or self.part_of(request) is None:
            return self.is_sent_for(request)
        keys = requests.prompt_keys(request, self._rank.page_tokens)
        if not keys:
            return False
        path.start_read(Wanted(request, keys, tier.num_on_node(keys), self._rank.worth_of(request)))
        said.forget_reads(request)
        return True

    def state(self) -> Mapping[str, Any]:
        return {"waits_for_remote_prefetches": self.can_wait}
