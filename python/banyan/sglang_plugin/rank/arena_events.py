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

PageEvent = BlockStored | BlockRemoved


class ArenaEvents:
    """Watches a residency, and tells of its pages. Implements ``FrameWatch``."""

    def __init__(self) -> None:
        self._events: list[PageEvent] = []

    def taken(self, frames: Sequence[int]) -> None:
        """Nothing that was not told when its page was evicted."""

    def filled(self, frames: Sequence[int], keys: Sequence[str]) -> None:
        self.has(keys)

    def has(self, keys: Sequence[str]) -> None:
        """These pages are in the arena."""
        self._events += there(_names(keys), StorageMedium.CPU)

    def evicted(self, keys: Sequence[str]) -> None:
        self._events += gone(_names(keys), StorageMedium.CPU)

    def emptied(self) -> None:
        """All of it was evicted."""

    def take(self) -> list[PageEvent]:
        """What has happened since the last call."""
        events, self._events = self._events, []
        return events


def there(names: list[int], medium: StorageMedium) -> list[PageEvent]:
    """That pages of these names are in a medium; of none, nothing."""
    if not names:
        return []
    stored = BlockStored(
        block_hashes=names, parent_block_hash=None, token_ids=[], block_size=0, lora_id=None, medium=medium
    )
    return [stored]


def gone(names: list[int], medium: StorageMedium) -> list[PageEvent]:
    """That they are there no more."""
    return [BlockRemoved(block_hashes=names, medium=medium)] if names else []


def _names(keys: Sequence[str]) -> list[int]:
    return [hash_str_to_int64(key) for key in keys]


def after_take_events(events: list[Any], cache: Any) -> list[Any]:
    """SGLang publishes what has happened to its tree: with it, what has happened in the tiers below. Of one batch, they
    come last: a flush, with which everything is forgotten, empties them too."""
    take = getattr(getattr(cache.linker, "cache_linker", None), "take_events", None)
    return events if take is None else [*events, *take()]


def events_for(params: Any, *, has_windows: bool) -> ArenaEvents | None:
    """What tells routers of the arena, where SGLang tells them of the pool and both mean the same by a page: not where
    keys are made of bigrams, nor where a page is worth nothing without its window."""
    is_told = params.enable_kv_cache_events and not params.disable
    return ArenaEvents() if is_told and not params.is_eagle and not has_windows else None
