# SPDX-License-Identifier: Apache-2.0
"""Which sizes of attention TP beside its own a rank's store has pages of.

They are looked for when the rank starts, of the weights that it has loaded: those that have changed since have names of
this size alone. Another size that begins to store after that is not found before the next start.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from banyan._native import SharedBytes, Store
from banyan.arena.page_source import Source
from banyan.features.resharding.heads import Piece, heads_of, pieces, rows_of, sizes
from banyan.features.resharding.rank.stored_shards import Division, Shape, StoredShards
from banyan.layout import BlockGeometry, Namespace
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank.kind import Kind
from banyan.sglang_plugin.rank.points import Points, SourceAccess, TierParts

logger = logging.getLogger("banyan")

MOST_SHARDS = 64
MEMORY_BYTES = 64 << 20
"""For pages of others, before this rank's are made of them."""
TROUBLES = ("checksum_failures", "read_errors", "stalls")
"""What a store counts that says something of the drive."""


def register(points: Points) -> None:
    points.sources.append(lambda kind: OtherSizes(kind) if kind.config.store else None)


class OtherSizes(SourceAccess):
    """One rank's access to them."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._sizes: list[int] = []
        self._stores: list[Store] = []
        self._troubles: Counter[str] = Counter()
        """Of those that were read before."""

    def sources(self, parts: TierParts, nearer: Sequence[Source]) -> list[Source]:
        """Behind the rank's own store what other sizes have in it."""
        sources, kind = list(nearer), self._kind
        divisions: list[Division] = []
        try:
            if parts.files is not None:
                divisions += self._divisions(parts.files, kind.namespace())
        except (OSError, ValueError) as error:
            logger.warning("banyan: what was stored with another --tp is not read: %s", error)
        self._sizes = [division.size for division in divisions]
        self._troubles = Counter(self.store_troubles())
        self._stores = [store for division in divisions for _, store in division.shards]
        if parts.store is not None and divisions:
            logger.info("banyan: pages that were stored with attention TP %s are found, too", self._sizes)
            own = Shape(kind.block, kind.pools.pool.head_num, divisions[0].shape.num_rows)
            source = StoredShards(divisions, shape=own, prefetch=parts.prefetch, counters=parts.counters)
            sources.insert(sources.index(parts.store) + 1, source)
        return sources

    def _divisions(self, files: Store, namespace: Namespace) -> Iterator[Division]:
        num_heads, own_size, num_rows = self._kind.num_kv_heads, namespace.attn_tp_size, rows_of(namespace)
        if not num_heads or not num_rows or namespace.weights_epoch:
            return
        # On a CPU SGLang divides heads over more shards than there are by adding some.
        possible = sizes(num_heads, MOST_SHARDS if runtime.is_on_gpu() else num_heads)
        own = heads_of(num_heads, own_size, namespace.attn_tp_rank)
        if own_size not in possible or len(own) != self._kind.pools.pool.head_num:
            return
        for size in possible:
            needed = list(pieces(num_heads, own, size))
            division = self._division(files, namespace, num_rows, size, needed) if size != own_size else None
            if division is not None:
                yield division

    def _division(
        self, files: Store, namespace: Namespace, num_rows: int, size: int, needed: Sequence[Piece]
    ) -> Division | None:
        """None where one of its shards has stored nothing."""
        shards: list[tuple[Piece, Store]] = []
        num_own, num_theirs = self._kind.pools.pool.head_num, needed[0].num_theirs
        page = tuple(
            tuple((name, num_bytes // num_own * num_theirs) for name, num_bytes in parts) for parts in namespace.page
        )
        block = BlockGeometry(tuple(tuple(num_bytes for _, num_bytes in parts) for parts in page))
        for piece in needed:
            theirs = replace(namespace, attn_tp_size=size, attn_tp_rank=piece.shard, page=page)
            shards.append((piece, files.beside(theirs.digest(), block.layer_bytes, len(needed))))
            if not shards[-1][1].stats()["num_records"]:
                return None
        memory = SharedBytes.create(max(MEMORY_BYTES, len(needed) * block.frame_bytes), "banyan-reshard")
        return Division(size, shards, Shape(block, num_theirs, num_rows), memory)

    def store_troubles(self) -> Mapping[str, int]:
        found = self._troubles.copy()
        for store in self._stores:
            stats = store.stats()
            found.update({name: stats[name] for name in TROUBLES})
        return found

    def state(self) -> Mapping[str, Any]:
        return {"resharding": {"attn_tp_sizes": self._sizes}} if self._sizes else {}
