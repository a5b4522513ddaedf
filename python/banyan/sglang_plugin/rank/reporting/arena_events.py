# SPDX-License-Identifier: Apache-2.0
"""SGLang's KV events for this rank's part of the host arena: its pages are in ``CPU_PINNED``, those of the pool in
``GPU``.

Invariants
  1. What was told to be there and is there no more is told to be gone.
  2. Nobody is told of pages where SGLang tells nobody of its own.
  3. What has come and gone between two calls is not told: however late the next one is, no more is remembered than
     what was there at the last one, and what is there now.

An event carries the tokens of its pages where SGLang has told them of the pool (``page_tokens``), and otherwise names
them alone (``block_size`` 0). Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.disaggregation.kv_events import StorageMedium
from sglang.srt.mem_cache.utils import hash_str_to_int64

from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.rank.reporting.page_tokens import PageEvent, PageTokens, gone


class ArenaEvents:
    """Watches a residency, and tells of its pages. Implements ``FrameWatch``."""

    def __init__(self) -> None:
        self._changes: dict[int, bool] = {}
        """Of each page that is there and was not when this was told last, or was and is not: whether it is there."""
        self._emptied: list[int] = []
        """What was there when this was told last, and all of which went since."""
        self._tokens = PageTokens()

    def taken(self, frames: Sequence[int]) -> None:
        """Nothing that was not told when its page was evicted."""

    def filled(self, frames: Sequence[int], keys: Sequence[str]) -> None:
        self.has(keys)

    def has(self, keys: Sequence[str]) -> None:
        """These pages are in the arena."""
        self._note(keys, is_there=True)

    def evicted(self, keys: Sequence[str]) -> None:
        self._note(keys, is_there=False)

    def _note(self, keys: Sequence[str], *, is_there: bool) -> None:
        for name in _names(keys):
            if self._changes.setdefault(name, is_there) != is_there:
                del self._changes[name]

    def emptied(self) -> None:
        """All of it was evicted. SGLang, which does the same with its tree, tells routers to forget everything: what
        comes back is told again."""
        self._emptied += self._changes
        self._changes = {}

    def take(self, own: Sequence[PageEvent] = ()) -> list[PageEvent]:
        """What has happened since the last call. ``own``: what SGLang tells of the pool since then."""
        now_known = self._tokens.learn(own)
        changes, self._changes = self._changes, {}
        emptied, self._emptied = self._emptied, []
        removed = [*emptied, *(name for name, is_there in changes.items() if not is_there)]
        self._tokens.gone(removed)
        stored = [name for name, is_there in changes.items() if is_there]
        still_there = [name for name in now_known if name not in changes]
        events = [*gone(removed, StorageMedium.CPU), *self._tokens.there([*still_there, *stored], StorageMedium.CPU)]
        self._tokens.forget()
        return events


def _names(keys: Sequence[str]) -> list[int]:
    return [hash_str_to_int64(key) for key in keys]


def after_take_events(events: list[Any], cache: Any) -> list[Any]:
    """SGLang publishes what has happened to its tree: with it, what has happened in the tiers below. Of one batch, they
    come last: a flush, with which everything is forgotten, empties them too."""
    take = getattr(getattr(cache.linker, "cache_linker", None), "take_events", None)
    return events if take is None else [*events, *take(events)]


def events_for(params: Any, *, has_windows: bool) -> ArenaEvents | None:
    """What tells routers of the arena, where SGLang tells them of the pool and both mean the same by a page: not where
    keys are made of bigrams, nor where a page is worth nothing without its window."""
    is_told = params.enable_kv_cache_events and not params.disable and runtime.is_on("56-arena-events")
    return ArenaEvents() if is_told and not params.is_eagle and not has_windows else None
