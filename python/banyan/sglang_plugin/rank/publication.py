# SPDX-License-Identifier: Apache-2.0
"""What becomes of pages that are complete: the peers may fetch them, and the tiers below take them down.

Invariants
  1. What was computed with weights of before, or on top of such pages, is published to nobody.
  2. What outlives the server holds no page of a LoRA adapter that was not told by its content: its keys mean nothing
     to the next server, or another adapter. A chain whose owner is not remembered any more is not kept.
  3. Window pages, and states, go where the full pages of their chain go, and not further. Where one shard takes the
     full pages down for all, each takes down its own.

States: publishing -> ``hold_back`` (pages in use are of other weights, or these are being updated) -> silent ->
``start_anew`` (no page is in use) -> publishing. From any -> stopped, as the cache is, for good.
"""

from __future__ import annotations

import logging
from typing import Any

from banyan.cache import PrefixCache
from banyan.latest import Latest
from banyan.sglang_plugin.pools.access import Window
from banyan.sglang_plugin.rank import requests
from banyan.sglang_plugin.rank.all_kinds import Kinds

logger = logging.getLogger("banyan")

MAX_ANNOUNCED = 1 << 16
"""Chains that are on their way to be published. More is of offloads that were refused or given up."""


class Publication:
    """Between a rank's pool, which knows when pages are complete, and who wants them."""

    def __init__(self, cache: PrefixCache, kinds: Kinds, page_tokens: int) -> None:
        self._cache = cache
        self._full, self._beside = kinds.full, kinds.beside
        self._page_tokens = page_tokens
        self._lasting: Latest[str, int] = Latest(MAX_ANNOUNCED)
        """Of a server with adapters: how many chains with this first key are on their way and may be kept, the oldest
        first."""
        self.why_silent = ""
        """Why nothing is published; "" while something is."""
        self._has_said = False

    def announce(self, keys: list[str]) -> None:
        """A chain of pages of a request will be complete soon; whose they are is known now only."""
        if self._full.guards_adapters:
            if not requests.is_lasting_inserted():
                return
            self._lasting.put(keys[0], self._lasting.get(keys[0], 0) + 1)
        store = None if self._full.tier is None else self._full.tier.store
        if store is not None and store.is_rootless(keys[-1]):
            # No prompt that arrived goes on like this, as far as is remembered: it follows an answer, mostly.
            chain = requests.inserted_chain(self._page_tokens)
            if chain is not None and keys[-1] in chain:
                store.learn([chain])

    def publish(self, frames: Any, keys: list[str], window: Window | None = None) -> None:
        """A chain of complete pages of this rank's tree, with its window pages."""
        if self._cache.is_stopped:
            return
        may_be_kept = not self._full.guards_adapters or self._take_lasting(keys[0])
        if self.why_silent:
            self._say_why()
            return
        self._cache.publish(frames, keys)
        beside = [] if window is None else [(kind, *window) for kind in self._beside]
        for kind, window_keys, window_frames in beside:
            kind.publish(window_keys, window_frames)
        self._full.residency_report.published(keys)
        if not may_be_kept:
            return
        tier = self._full.tier
        if tier is not None and (kept := list(tier.partner.to_keep(keys))):
            tier.backup.offer(kept)
        for kind, window_keys, _ in beside:
            kind.back_up(window_keys)

    def _take_lasting(self, first_key: str) -> bool:
        """Whether such a chain was announced as one that may be kept; it is on its way no more."""
        num_left = self._lasting.pop(first_key, 0) - 1
        if num_left > 0:
            self._lasting[first_key] = num_left
        return num_left >= 0

    def hold_back(self, why: str) -> None:
        """Publish nothing until the tree has been emptied. Any thread."""
        self.why_silent = why

    def start_anew(self) -> None:
        """No page is in use."""
        self.why_silent, self._has_said = "", False
        self._lasting.clear()

    def _say_why(self) -> None:
        if not self._has_said:
            self._has_said = True
            logger.warning(
                "banyan: %s: nothing is shared from this rank until its cache is flushed after that (/flush_cache)",
                self.why_silent,
            )
