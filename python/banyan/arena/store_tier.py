# SPDX-License-Identifier: Apache-2.0
"""The store behind a rank's part of the arena: what comes up from it, what goes down to it, which page follows which.

One thread calls; the store reads and writes on its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from banyan.arena.archive import Archive
from banyan.arena.lineage import Lineage
from banyan.arena.owners import Owners
from banyan.arena.page_source import Source, Wanted
from banyan.arena.prefetch import Prefetch
from banyan.arena.residency import Residency
from banyan.layout import BlockGeometry
from banyan.pacing.admission import WriteAdmission
from banyan.ports import PageStore
from banyan.telemetry import Counters


class StoreTier(Source):
    """One rank's traffic with the store. ``memory``, its part of the arena, has frames of ``block``.

    The store outlives it: a namespace later the rank's next one has the same."""

    def __init__(
        self,
        *,
        store: PageStore,
        residency: Residency,
        prefetch: Prefetch,
        memory: object,
        block: BlockGeometry,
        admission: WriteAdmission,
        owners: Owners,
        counters: Counters,
        orphaned: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        """``prefetch`` reads this store. ``orphaned``: is given the chains that the store refuses for want of
        the page before them, where another server may write that; without it they are counted as refused."""
        store.register(memory)
        self._store = store
        self._counters = counters
        self._orphaned = orphaned
        self._owners = owners
        self._lineage = Lineage()
        self._prefetch = prefetch
        self._archive = Archive(
            store=store,
            residency=residency,
            lineage=self._lineage,
            owners=owners,
            admission=admission,
            memory=memory,
            frame_bytes=block.frame_bytes,
            # Of a store that keeps values by name, what it says itself.
            record_bytes=getattr(store, "value_bytes", block.record_bytes),
            counters=counters,
            clock=time.monotonic_ns,
        )

    def ask(self, wanted: Wanted) -> int:
        """A request has come. What it wants again is written down, and what only the store has is read as far as that
        is worth it. How many leading pages node and store hold."""
        self._lineage.learn(wanted.keys)
        found = self._store.lookup(list(wanted.keys))
        self._owners.stored(self._store, wanted.keys, found.num_pages)
        self._note_access(wanted.keys, found.num_pages)
        behind = found.after(wanted.num_held)
        self._prefetch.start_reads(wanted.missing, wanted.worth, behind, behind=wanted.behind)
        return max(wanted.num_held, found.num_pages)

    def num_stored(self, keys: Sequence[str]) -> int:
        """How many leading pages of ``keys`` the store holds."""
        return self._store.lookup(list(keys)).num_pages

    def start_read(self, wanted: Wanted) -> None:
        """Read what only the store has of a prompt that came before others had announced it."""
        self._prefetch.start_reads(wanted.missing, wanted.worth, behind=wanted.behind)

    def offer_again(self, keys: Sequence[str]) -> Sequence[str]:
        """A chain that was orphaned; what of it still is."""
        return self._archive.note_access(keys, self._store.lookup(list(keys)).num_pages)

    def take_news(self) -> int:
        """Begin to take in what others have announced; a number that differs when a lookup may answer differently."""
        self._store.lookup([])
        return self._store.version

    def is_rootless(self, key: str) -> bool:
        """Whether nobody has told yet which page comes before this one: it could not be written."""
        return self._lineage.parent(key) is None

    def learn(self, chains: Iterable[Sequence[str]]) -> None:
        """Chains of pages, each from its root."""
        for chain in chains:
            self._lineage.learn(chain)

    def landed(self, keys: Sequence[str]) -> None:
        """A chain of pages has become resident in the arena."""
        self._note_access(keys, self._store.lookup(list(keys)).num_pages)

    def _note_access(self, keys: Sequence[str], num_stored: int) -> None:
        rest = self._archive.note_access(keys, num_stored)
        if rest and self._orphaned is not None:
            self._orphaned(rest)
        else:
            self._counters.archive_refused_pages += len(rest)

    def poll(self) -> None:
        """Collect what the store has written. Never blocks."""
        self._archive.poll()

    @property
    def num_left_behind(self) -> int:
        """Behind ``quiesce``: pages that the store may still read from their frames."""
        return self._archive.num_left_behind

    def quiesce(self) -> None:
        """Wait for the writes under way."""
        self._archive.quiesce()
