# SPDX-License-Identifier: Apache-2.0
"""SGLang's KV events for this rank's part of the host arena: its pages are in ``CPU_PINNED``, those of the pool in
``GPU``.

Invariants
  1. What was told to be there and is there no more is told to be gone.
  2. Nobody is told of pages where SGLang tells nobody of its own.

An event names pages and carries no tokens (``block_size`` 0): the arena knows keys alone. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.disaggregation.kv_events import BlockRemoved, BlockStored, StorageMedium
from sglang.srt.mem_cache.utils import hash_str_to_int64


class ArenaEvents:
    """Watches a residency, and tells of its pages. Implements ``FrameWatch``."""

    def __init__(self) -> None:
        self._events: list[BlockStored | BlockRemoved] = []

    def taken(self, frames: Sequence[int]) -> None:
        """Nothing that was not told when its page was evicted."""

    def filled(self, frames: Sequence[int], keys: Sequence[str]) -> None:
        self.has(keys)

    def has(self, keys: Sequence[str]) -> None:
        """These pages are in the arena."""
        if keys:
            stored = BlockStored(
                block_hashes=_names(keys),
                parent_block_hash=None,
                token_ids=[],
                block_size=0,
                lora_id=None,
                medium=StorageMedium.CPU,
            )
            self._events.append(stored)

    def evicted(self, keys: Sequence[str]) -> None:
        if keys:
            self._events.append(BlockRemoved(block_hashes=_names(keys), medium=StorageMedium.CPU))

    def emptied(self) -> None:
        """All of it was evicted."""

    def take(self) -> list[BlockStored | BlockRemoved]:
        """What has happened since the last call."""
        events, self._events = self._events, []
        return events


def _names(keys: Sequence[str]) -> list[int]:
    return [hash_str_to_int64(key) for key in keys]


def after_take_events(events: list[Any], cache: Any) -> list[Any]:
    """SGLang publishes what has happened to its tree: with it, what has happened to the arena. Of one batch, the arena
    comes last: a flush, with which everything is forgotten, empties the arena too."""
    told: ArenaEvents | None = getattr(getattr(cache.linker, "cache_linker", None), "arena_events", None)
    return events if told is None else [*events, *told.take()]
