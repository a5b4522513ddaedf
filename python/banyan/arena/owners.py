# SPDX-License-Identifier: Apache-2.0
"""Whose pages are whose, for those who make room. A feature may put another one in the place of ``Owners``."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from banyan.arena.residency import Residency
from banyan.ports import ArenaFrameTable, Frames, PageStore


class Owners:
    """Nobody asks. One thread."""

    def asked(self, cache_salt: str | None, keys: Sequence[str]) -> None:
        """A prompt with this salt is wanted; ``keys``: of its pages."""

    def entered(self, keys: Sequence[str]) -> None:
        """A chain of pages has entered SGLang's tree."""

    def opened(self, store: PageStore) -> None:
        """This rank has a store."""

    def stored(self, store: PageStore, keys: Sequence[str], num_stored: int) -> None:
        """A prompt is wanted, and the store has so many of its first pages."""

    def put(
        self, store: PageStore, keys: Sequence[str], parent: str | None, memory: object, offsets: Frames
    ) -> list[str]:
        """Queue a chain of pages, as ``PageStore.put``."""
        return store.put(keys, parent, memory, offsets)

    def residency(self, frame_table: ArenaFrameTable, num_frames: int, kept: Collection[str]) -> Residency:
        """What decides which pages leave a part of the arena."""
        return Residency(frame_table, num_frames, kept)
