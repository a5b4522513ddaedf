# SPDX-License-Identifier: Apache-2.0
"""A prompt of which another node reads the last part from its store, and this rank what comes before.

This rank reads the first part, and not the last: pages behind a hole are worth nothing. If the other node fails,
what was read here is a whole prefix. In the order of layers neither part comes before the other: a layer needs the
pages of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from banyan.arena.node_tier import NodeTier
from banyan.arena.prefetch import Prefetch, Worth
from banyan.arena.store_tier import StoreTier
from banyan.core import SourceKind


@dataclass(frozen=True, slots=True)
class DualPath:
    """One rank's store, and the other nodes' beside it."""

    store: StoreTier
    nodes: NodeTier
    prefetch: Prefetch

    def arrive(self, rid: str, keys: Sequence[str], num_held: int, worth: Worth, *, node: str, first_page: int) -> None:
        """A request has come for the prompt of ``keys``, of which the first ``num_held`` are here. ``node`` reads the
        pages from ``first_page`` on, this rank what is missing before them. Where that node cannot be asked, or is not
        worth it, this rank reads all."""
        num_stored = self.store.num_stored(keys)
        start = max(num_held, first_page)
        rest = keys[start:]
        if start >= num_stored or not worth(len(rest), num_stored - start, SourceKind.REMOTE):
            self.store.arrive(keys, num_held, worth)
            return
        self.store.arrive(keys, num_held, partial(_up_to, start, len(keys), worth))
        is_whole = num_held + self.prefetch.num_arriving(keys[num_held:start]) == start
        if not is_whole or not self.nodes.send(rid, node, rest, num_stored - start, worth, keys[:start]):
            self.store.look_again(keys, num_held, worth)


def _up_to(end: int, num_all: int, worth: Worth, num_missing: int, num_found: int, kind: SourceKind) -> int:
    """As ``worth``, for pages before ``end`` of a prompt of ``num_all``."""
    room = end - (num_all - num_missing)
    return min(worth(num_missing, num_found, kind), room) if room > 0 else 0
