# SPDX-License-Identifier: Apache-2.0
"""A prompt of which another node reads the last part from its store, and this rank what comes before.

This rank reads the first part, and not the last: pages behind a hole are worth nothing. If the other node fails,
what was read here is a whole prefix. In the order of layers neither part comes before the other: a layer needs the
pages of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from banyan.arena.node_tier import NodeTier
from banyan.arena.prefetch import Prefetch, Worth
from banyan.arena.store_tier import StoreTier
from banyan.core import SourceKind


@dataclass(frozen=True, slots=True)
class DualPath:
    """One rank's store, and the other nodes' beside it. A part of less than ``least_pages`` is not worth a second
    reader."""

    store: StoreTier
    nodes: NodeTier
    prefetch: Prefetch
    least_pages: int

    def arrive(
        self, request: str, keys: Sequence[str], num_held: int, worth: Worth, *, node: str, first_page: int
    ) -> None:
        """A request has come for the prompt of ``keys``, of which the first ``num_held`` are here. ``node`` reads the
        pages from ``first_page`` on, this rank what is missing before them. Where that node cannot be asked, or is not
        worth it, this rank reads all."""
        self._read(self.store.arrive, request, keys, num_held, worth, node, first_page)

    def look_again(
        self, request: str, keys: Sequence[str], num_held: int, worth: Worth, *, node: str, first_page: int
    ) -> None:
        """As ``arrive``, a moment later: others have announced pages, and what was here then may have left."""
        self._read(self.store.look_again, request, keys, num_held, worth, node, first_page)

    def _read(
        self,
        read: Callable[[Sequence[str], int, Worth], object],
        request: str,
        keys: Sequence[str],
        num_held: int,
        worth: Worth,
        node: str,
        first_page: int,
    ) -> None:
        start = max(num_held, first_page)
        # What was asked for before and is on its way is nobody's to read again.
        theirs = start + self.prefetch.num_arriving(keys[start:])
        rest, num_theirs = keys[theirs:], self.store.num_stored(keys) - theirs
        if num_theirs < self.least_pages or not worth(len(rest), num_theirs, SourceKind.REMOTE):
            read(keys, num_held, worth)
            return
        read(keys, num_held, partial(_up_to, start, len(keys), worth))
        is_whole = num_held + self.prefetch.num_arriving(keys[num_held:start]) == start
        if not is_whole or not self.nodes.send(request, node, rest, num_theirs, worth, keys[:theirs]):
            self.store.look_again(keys, num_held, worth)


def _up_to(end: int, num_all: int, worth: Worth, num_missing: int, num_found: int, kind: SourceKind) -> int:
    """As ``worth``, for pages before ``end`` of a prompt of ``num_all``."""
    room = end - (num_all - num_missing)
    return min(worth(num_missing, num_found, kind), room) if room > 0 else 0
