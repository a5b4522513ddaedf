# SPDX-License-Identifier: Apache-2.0
"""Whose pages are whose on a server with tenants: pure.

An owner is the part of a salt that a router has signed. What a client puts behind it makes no other owner. Pages that
tenants have in common have a salt of their own, so they are one more owner's.

A page's key tells whose it is to nobody who does not know the prompt, so keys are remembered from when a prompt comes,
or its pages enter SGLang's tree, until they have a frame, which has its owner from then on. A bounded number of keys
is remembered; what was forgotten is nobody's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from banyan._native import SharedBytes
from banyan.arena.owners import Owners
from banyan.features.tenant_share.frame_owners import NOBODY
from banyan.features.tenant_share.shared_residency import SharedResidency
from banyan.ports import ArenaFrameTable, Frames, PageStore
from banyan.routing.tenant_secret import SALT_CHARS
from banyan.store.backends import native_store

REMEMBERED_KEYS = 1 << 17
"""At least so many, and at most twice: some 30 MB. At 16 tokens a page two million tokens of prompts."""


class TenantOwners(Owners):
    """One rank's. ``share``: of each tier, for an owner."""

    def __init__(self, share: float, remembered_keys: int = REMEMBERED_KEYS) -> None:
        self._share = share
        self._remembered_keys = remembered_keys
        self._lately: dict[str, str] = {}
        self._before: dict[str, str] = {}
        self._entering = NOBODY
        self._numbers: dict[str, int] = {NOBODY: 0}
        """By which a store knows owners. There are as many as tenants, and things that they have in common."""

    @contextmanager
    def entering(self, cache_salt: str | None) -> Iterator[None]:
        """The pages that enter the tree meanwhile are of prompts with this salt."""
        self._entering = _owner(cache_salt)
        try:
            yield
        finally:
            self._entering = NOBODY

    def asked(self, cache_salt: str | None, keys: Sequence[str]) -> None:
        self._remember(_owner(cache_salt), keys)

    def entered(self, keys: Sequence[str]) -> None:
        self._remember(self._entering, keys)

    def _remember(self, owner: str, keys: Sequence[str]) -> None:
        if owner == NOBODY:
            return
        self._lately.update(dict.fromkeys(keys, owner))
        if len(self._lately) >= self._remembered_keys:
            self._before, self._lately = self._lately, {}

    def owner_of(self, keys: Sequence[str]) -> str:
        """Of a chain of pages. Its first page tells: whatever follows has the same salt."""
        if not keys:
            return NOBODY
        return self._lately.get(keys[0]) or self._before.get(keys[0], NOBODY)

    # ---- the store ---------------------------------------------------------------------------------------------

    def opened(self, store: PageStore) -> None:
        if (native := native_store(store)) is not None:
            native.share_out(self._share)

    def stored(self, store: PageStore, keys: Sequence[str], num_stored: int) -> None:
        native, number = native_store(store), self._number(keys)
        if native is not None and number and num_stored:
            native.adopt(number, list(keys[:num_stored]))

    def put(
        self, store: PageStore, keys: Sequence[str], parent: str | None, memory: object, offsets: Frames
    ) -> list[str]:
        native = native_store(store)
        if native is None:
            return super().put(store, keys, parent, memory, offsets)
        return native.put_for(self._number(keys), keys, parent, cast(SharedBytes, memory), offsets)

    def _number(self, keys: Sequence[str]) -> int:
        return self._numbers.setdefault(self.owner_of(keys), len(self._numbers))

    # ---- the arena ---------------------------------------------------------------------------------------------

    def residency(self, frame_table: ArenaFrameTable, num_frames: int, kept: Collection[str]) -> SharedResidency:
        return SharedResidency(frame_table, num_frames, kept, share=self._share, owner_of=self.owner_of)


def _owner(cache_salt: str | None) -> str:
    return (cache_salt or NOBODY)[:SALT_CHARS]
