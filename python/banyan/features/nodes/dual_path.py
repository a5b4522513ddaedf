# SPDX-License-Identifier: Apache-2.0
"""A prompt of which another node reads the last part from its store, and this rank what comes before.

This rank reads the first part, and not the last: pages behind a hole are worth nothing. If the other node fails,
what was read here is a whole prefix. In the order of layers neither part comes before the other: a layer needs the
pages of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from banyan.arena.page_source import Source, Wanted, Worth
from banyan.arena.prefetch import Prefetch
from banyan.arena.store_tier import StoreTier
from banyan.core import Run, SourceKind
from banyan.features.nodes.node_tier import NodeTier


@dataclass(frozen=True, slots=True)
class Part:
    """What a router has said: ``node`` reads a prompt's pages from ``first_page`` on."""

    node: str
    first_page: int


class DualPath(Source):
    """One rank's store, and the other nodes beside it, as one source. Of a request of which nothing was said it is the
    one and then the other.

    Args:
        reads: what was said of a request, None where nothing was.
        least_pages: a part of less is not worth a second reader.
    """

    def __init__(
        self,
        store: StoreTier,
        nodes: NodeTier,
        prefetch: Prefetch,
        least_pages: int,
        reads: Callable[[str], Part | None],
    ) -> None:
        self._store = store
        self._nodes = nodes
        self._prefetch = prefetch
        self._least_pages = least_pages
        self._reads = reads

    def ask(self, wanted: Wanted) -> int:
        """The node that was named reads its part, this rank what is missing before it. Where that node cannot be asked,
        or is not worth it, this rank reads all."""
        part = self._reads(wanted.request)
        if part is None:
            return self._nodes.ask(wanted.after(self._store.ask(wanted)))
        self._divide(self._store.ask, wanted, part)
        return wanted.num_held

    def start_read(self, wanted: Wanted) -> None:
        """As ``ask``, unless the other node is reading already. What was here then may have left."""
        if self._nodes.is_sent_for(wanted.request):
            return
        part = self._reads(wanted.request)
        if part is None:
            self._store.start_read(wanted)
        else:
            self._divide(self._store.start_read, wanted, part)

    def _divide(self, read: Callable[[Wanted], object], wanted: Wanted, part: Part) -> None:
        keys, num_held, worth = wanted.keys, wanted.num_held, wanted.worth
        start = max(num_held, part.first_page)
        # What was asked for before and is on its way is nobody's to read again.
        theirs = start + self._prefetch.num_arriving(keys[start:])
        rest, num_theirs = keys[theirs:], self._store.num_stored(keys) - theirs
        if num_theirs < self._least_pages or not worth(len(rest), Run(SourceKind.REMOTE, num_theirs, part.node)):
            read(wanted)
            return
        read(replace(wanted, worth=partial(_up_to, start, len(keys), worth)))
        is_whole = num_held + self._prefetch.num_arriving(keys[num_held:start]) == start
        if not is_whole or not self._nodes.send(wanted.after(theirs), part.node, num_theirs):
            self._store.start_read(wanted)

    def is_awaited(self, request: str) -> bool:
        return self._nodes.is_awaited(request)

    def is_sent_for(self, request: str) -> bool:
        """Whether another node is reading for this request."""
        return self._nodes.is_sent_for(request)

    def poll(self) -> None:
        self._nodes.poll()
        self._store.poll()

    def forget(self) -> None:
        self._nodes.forget()
        self._store.forget()

    def close(self) -> None:
        self._nodes.close()
        self._store.close()


def _up_to(end: int, num_all: int, worth: Worth, num_missing: int, found: Run) -> int:
    """As ``worth``, for pages before ``end`` of a prompt of ``num_all``."""
    room = end - (num_all - num_missing)
    return min(worth(num_missing, found), room) if room > 0 else 0
