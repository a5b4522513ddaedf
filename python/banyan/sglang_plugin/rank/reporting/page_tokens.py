# SPDX-License-Identifier: Apache-2.0
"""The tokens of pages, as SGLang's own events tell them.

The arena knows keys alone, and Banyan's router needs no more. Other routers (Dynamo's, llm-d's) know a page by its
tokens and by the page before it: an event without them tells them nothing.

Invariant: a page is remembered while the pool or the arena has it, and for ``KEPT_S``: what goes down when it leaves
the pool lands later. Scheduler thread only.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium

KEPT_S = 5.0
"""Longer than a copy down, and a forward before it."""

PageEvent = Any
"""SGLang's: a ``BlockStored`` or a ``BlockRemoved``."""


@dataclass(slots=True)
class _Page:
    parent: int | None
    tokens: array[int]
    salt: str | None
    is_in_pool: bool = True
    is_in_arena: bool = False


class PageTokens:
    """What pages are of, by their names."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pages: dict[int, _Page] = {}
        self._unknown: set[int] = set()
        """Pages in the arena that came without tokens: read from a store, from another node, or kept."""
        self._left: list[int] = []
        """Pages that have left the pool or the arena since the last ``forget``."""
        self._to_forget: deque[tuple[float, list[int]]] = deque()
        """When, and which."""

    def learn(self, own: Iterable[PageEvent]) -> list[int]:
        """What SGLang tells of the pool; the pages in the arena of which only now the tokens are known."""
        now_known: list[int] = []
        for event in own:
            if isinstance(event, AllBlocksCleared):
                # With the pool the arena was emptied: what is in it now is told as new.
                self._pages.clear()
                self._unknown.clear()
                now_known = []
            elif event.medium != StorageMedium.GPU:
                continue
            elif isinstance(event, BlockStored):
                now_known += self._stored(event)
            elif isinstance(event, BlockRemoved):
                self._left += event.block_hashes
                for name in event.block_hashes:
                    if (page := self._pages.get(name)) is not None:
                        page.is_in_pool = False
        return now_known

    def _stored(self, event: BlockStored) -> Iterator[int]:
        parent, size = event.parent_block_hash, event.block_size
        for place, name in enumerate(event.block_hashes):
            page = self._pages.get(name)
            if page is None:
                tokens = array("q", event.token_ids[place * size : (place + 1) * size])
                page = self._pages[name] = _Page(parent, tokens, event.cache_salt)
            page.is_in_pool = True
            parent = name
            if name in self._unknown:
                self._unknown.remove(name)
                page.is_in_arena = True
                yield name

    def there(self, names: Iterable[int], medium: StorageMedium) -> list[PageEvent]:
        """That the arena has these pages now: an event for each chain of them, and one for all that are not known."""
        chains: list[list[int]] = []
        unknown = []
        last = None
        for name in names:
            page = self._pages.get(name)
            if page is None:
                unknown.append(name)
                self._unknown.add(name)
                continue
            page.is_in_arena = True
            if not chains or page.parent != last:
                chains.append([])
            chains[-1].append(name)
            last = name
        return [*(self._chain(chain, medium) for chain in chains), *there(unknown, medium)]

    def _chain(self, names: Sequence[int], medium: StorageMedium) -> BlockStored:
        pages = [self._pages[name] for name in names]
        return BlockStored(
            block_hashes=list(names),
            parent_block_hash=pages[0].parent,
            token_ids=[token for page in pages for token in page.tokens],
            block_size=len(pages[0].tokens),
            lora_id=None,
            medium=medium,
            cache_salt=pages[0].salt,
        )

    def gone(self, names: Iterable[int]) -> None:
        """These pages have left the arena."""
        for name in names:
            self._unknown.discard(name)
            if (page := self._pages.get(name)) is not None:
                page.is_in_arena = False
                self._left.append(name)

    def forget(self) -> None:
        """What has left both places, and not lately, is remembered no longer."""
        now_s = self._clock()
        if self._left:
            self._to_forget.append((now_s + KEPT_S, self._left))
            self._left = []
        while self._to_forget and self._to_forget[0][0] <= now_s:
            for name in self._to_forget.popleft()[1]:
                page = self._pages.get(name)
                if page is not None and not page.is_in_pool and not page.is_in_arena:
                    del self._pages[name]


def there(names: Sequence[int], medium: StorageMedium) -> list[PageEvent]:
    """That pages of these names are in a medium, whatever they are of; of none, nothing."""
    if not names:
        return []
    return [
        BlockStored(
            block_hashes=list(names), parent_block_hash=None, token_ids=[], block_size=0, lora_id=None, medium=medium
        )
    ]


def gone(names: Sequence[int], medium: StorageMedium) -> list[PageEvent]:
    """That they are there no more."""
    return [BlockRemoved(block_hashes=list(names), medium=medium)] if names else []
