# SPDX-License-Identifier: Apache-2.0
"""The prefixes that a rank was told to keep: for whom, how firmly, until when. Pure; one thread.

All ranks of a server are told the same in the same order. Each keeps of it what it has, in its pool, its part of the
arena and its part of the store.

Invariants
  1. Nothing is kept beyond its time: ``expire`` is called all the time.
  2. A pin that was granted stays until its time or its session is over or it is released. What is retained makes room
     for pins, and for what is retained later, the oldest first.
  3. A tenant keeps at most its share of the pages, and its share of ``MOST_PREFIXES`` prefixes that have
     ``MOST_KEYS`` keys; all tenants together ``MOST_TOLD_SHARE`` of the pages, and all of the others.
  4. In the pool a prefix is kept whole or not at all, as far as the share of the pool goes. What is retained makes
     room there as well: it stays kept in the other tiers.

A prefix: kept -> (told again, for the same session) kept -> let go: released, expired, its session closed, displaced,
or part of one of the same tenant and session that is kept at least as firmly, as near and as long.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, takewhile

from banyan.config import MOST_TOLD_SHARE
from banyan.features.told.prefix import Prefix, is_one_chain, takes_in
from banyan.features.told.tenant_pages import TenantPages
from banyan.latest import Latest

MOST_PREFIXES = 4096
MOST_PAGES = 1 << 18
"""For all tenants: their keys take some 100 MB."""

MOST_KEYS = 1 << 20
"""Of all prefixes, each with its own: pages count once, and the keys of a beginning are there in every prompt that has
it. Some 100 MB, too."""


MOST_LATEST = 64
"""Each HTTP worker tells one at a time, and takes it back before it tells the next."""


class Refused(ValueError):
    """What is not kept: one line."""


class Told:
    """One rank's.

    Args:
        kept, kept_in_pool, ends_in_pool: read by those who evict; the last has the last key of each prefix in the
            pool.
        sizes: pages that the largest tier of the node may come to have room for, and those that the rank's pool has; 0
            where it keeps nothing.
        share: of either, for a tenant.
        changed: told of pages that are kept from now on, and of those that are not any more.
        clock: seconds.
    """

    def __init__(
        self,
        kept: set[str],
        kept_in_pool: set[str],
        ends_in_pool: set[str],
        *,
        sizes: Callable[[], tuple[int, int]],
        share: float,
        changed: Callable[[list[str], list[str]], None],
        clock: Callable[[], float],
    ) -> None:
        self._all, self._pool = TenantPages(kept), TenantPages(kept_in_pool)
        self._ends = TenantPages(ends_in_pool)
        self._pinned, self._pinned_in_pool = TenantPages(set()), TenantPages(set())
        self._sizes = sizes
        self._share = share
        self._changed = changed
        self._clock = clock
        self._prefixes: dict[tuple[str, str, str | None, bool], Prefix] = {}  # by row, the oldest first
        self._num_prefixes: Counter[str] = Counter()
        self._num_keys: Counter[str] = Counter()
        self._next_s = math.inf
        self._latest: Latest[str, tuple[Prefix, list[Prefix]]] = Latest(MOST_LATEST)
        """By the name of what was told: what is kept of it, and what that took in."""
        self.num_refused = 0

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self._prefixes.values())

    def __len__(self) -> int:
        return len(self._prefixes)

    @property
    def num_pages(self) -> int:
        """Pages that are kept, wherever they lie."""
        return self._all.num_kept

    @property
    def num_pool_pages(self) -> int:
        """Of these, those that the pool keeps."""
        return self._pool.num_kept

    @property
    def most_of_tenant(self) -> int:
        """Pages that may be kept for a tenant."""
        self._bound()
        return self._all.most_of_tenant

    def pin(
        self,
        tenant: str,
        keys: Sequence[str],
        ttl_s: float,
        session: str | None = None,
        *,
        space: str = "",
        name: str = "",
    ) -> None:
        """Keep a chain of pages for so long. ``name``: by which it can be taken back.

        Raises:
            Refused: when it is more than the tenant may keep, or more than is left.
        """
        self._begin()
        pin = Prefix(tenant, keys, True, self._clock() + ttl_s, session, space)
        if not self._may_have_place(pin):
            self.num_refused += 1
            raise Refused(self._too_many(tenant))
        # All that is only retained would make room for it.
        if self._pinned.num_new(tenant, keys) > self._pinned.room(tenant):
            self.num_refused += 1
            raise Refused(self._too_much(tenant, self._all.num_new(tenant, keys)))
        self._make_room(self._all, tenant, keys, self._drop)
        self._make_place(pin)
        self._latest.put(name, (pin, self._add(pin)))

    def take_back(self, name: str) -> None:
        """Another rank has refused what was told lately: what it took in is kept as before, but for what has been
        pinned since. Where it was refused here too, or is kept no more, nothing is taken."""
        kept, taken_in = self._latest.pop(name, (None, []))
        if kept is None or self._prefixes.get(kept.row) is not kept:
            return
        self._drop([kept])
        for one in taken_in:
            if not any(takes_in(other, one) for other in self):
                self._add(one)
        self.expire()

    def retain(
        self,
        tenant: str,
        keys: Sequence[str],
        ttl_s: float,
        session: str | None = None,
        *,
        space: str = "",
        name: str = "",
    ) -> int:
        """Keep as much of the beginning of a chain as there is room for; how many pages. ``name``: as of a pin."""
        self._begin()
        kept = Prefix(tenant, keys, False, self._clock() + ttl_s, session, space)
        if self._is_pinned(kept):
            return len(keys)
        if not self._may_have_place(kept):
            return 0
        self._make_room(self._all, tenant, keys, self._drop)
        num_new = self._all.num_new(tenant, keys)
        kept.keys = keys = keys[: len(keys) - num_new + min(num_new, max(0, self._all.room(tenant)))]
        # What there is room for may be all that is pinned already.
        if not keys or self._is_pinned(kept):
            return len(keys)
        self._make_place(kept)
        self._latest.put(name, (kept, self._add(kept)))
        return len(keys)

    def release(self, tenant: str, keys: Sequence[str]) -> int:
        """Keep nothing any more of what begins a chain, or continues it; how many prefixes that were."""
        return self._drop([one for one in self if one.tenant == tenant and is_one_chain(one.keys, keys)])

    def close(self, session: str) -> int:
        """A session is over: what was kept for it is kept no longer; how many prefixes that were."""
        return self._drop([one for one in self if one.session == session])

    def expire(self) -> None:
        """Let go of what has been kept for its time."""
        now_s = self._clock()
        if now_s >= self._next_s:
            self._drop([one for one in self if one.expires_s <= now_s])
            self._next_s = min((one.expires_s for one in self), default=math.inf)

    def _begin(self) -> None:
        self.expire()
        self._bound()

    def _bound(self) -> None:
        num_pages, pool_pages = self._sizes()
        for pages in (self._all, self._pinned):
            pages.bound(min(MOST_PAGES, int(MOST_TOLD_SHARE * num_pages)), int(self._share * num_pages))
        for pages in (self._pool, self._pinned_in_pool):
            pages.bound(int(MOST_TOLD_SHARE * pool_pages), int(self._share * pool_pages))

    def _is_pinned(self, new: Prefix) -> bool:
        """Whether a pin for the same session keeps it for as long."""
        known = self._prefixes.get((new.tenant, new.keys[-1], new.session, True))
        return known is not None and known.expires_s >= new.expires_s

    def _may_have_place(self, new: Prefix) -> bool:
        """Whether there may be one prefix more, with its keys, once all that is retained has made place. One that is
        there already takes its own."""
        retained = [one for one in self if not one.is_pin]
        own = [one for one in retained if one.tenant == new.tenant]
        return new.row in self._prefixes or not (
            self._has_used_its_share(new.tenant, len(new.keys), own) or self._is_full(len(new.keys), retained)
        )

    def _make_place(self, new: Prefix) -> None:
        """Let go of what is retained until there is a place, as there may be."""
        if new.row not in self._prefixes:
            self._let_go(
                new.tenant,
                new.keys,
                self._drop,
                while_own=lambda: self._has_used_its_share(new.tenant, len(new.keys)),
                while_any=lambda: self._is_full(len(new.keys)),
            )

    def _has_used_its_share(self, tenant: str, num_keys: int, without: Sequence[Prefix] = ()) -> bool:
        most_keys = max(num_keys, int(self._share * MOST_KEYS))
        num_left = self._num_keys[tenant] - sum(len(one.keys) for one in without)
        has_most = self._num_prefixes[tenant] - len(without) >= self._most_of_tenant
        return has_most or num_left + num_keys > most_keys

    def _is_full(self, num_keys: int, without: Sequence[Prefix] = ()) -> bool:
        num_left = self._num_keys.total() - sum(len(one.keys) for one in without)
        return len(self._prefixes) - len(without) >= MOST_PREFIXES or num_left + num_keys > MOST_KEYS

    @property
    def _most_of_tenant(self) -> int:
        """Prefixes."""
        return max(1, int(self._share * MOST_PREFIXES))

    def _add(self, new: Prefix) -> list[Prefix]:
        """Keep it; the prefixes that it takes in, which go."""
        # All that is only retained would make room for it there.
        num_new = self._pinned_in_pool.num_new(new.tenant, new.keys)
        new.is_in_pool = num_new <= self._pinned_in_pool.room(new.tenant)
        if new.is_in_pool:
            self._make_room(self._pool, new.tenant, new.keys, self._leave_pool)
        superfluous = [one for one in self if takes_in(new, one)]
        came = self._all.keep(new.tenant, new.keys)
        for pages in self._where_kept(new):
            pages.keep(new.tenant, new.keys)
        self._drop(superfluous)
        if new.is_in_pool:
            self._ends.keep(new.tenant, new.keys[-1:])
        self._prefixes[new.row] = new
        self._num_prefixes[new.tenant] += 1
        self._num_keys[new.tenant] += len(new.keys)
        self._next_s = min(self._next_s, new.expires_s)
        if came:
            self._changed(came, [])
        return superfluous

    def _where_kept(self, one: Prefix) -> Iterator[TenantPages]:
        """The accounts that have it beside that of all."""
        if one.is_pin:
            yield self._pinned
        if one.is_in_pool:
            yield self._pool
        if one.is_pin and one.is_in_pool:
            yield self._pinned_in_pool

    def _leave_pool(self, retained: Iterable[Prefix]) -> None:
        """The pool keeps them no longer; they may be chosen one after the other."""
        for one in retained:
            if one.is_in_pool:
                one.is_in_pool = False
                self._pool.let_go(one.tenant, one.keys)
                self._ends.let_go(one.tenant, one.keys[-1:])

    def _drop(self, prefixes: Iterable[Prefix]) -> int:
        """They are kept no longer; they may be chosen one after the other. How many they were."""
        num_dropped = 0
        gone: list[str] = []
        for one in prefixes:
            num_dropped += 1
            del self._prefixes[one.row]
            self._num_keys[one.tenant] -= len(one.keys)
            self._num_prefixes[one.tenant] -= 1
            if not self._num_prefixes[one.tenant]:
                del self._num_prefixes[one.tenant], self._num_keys[one.tenant]
            for pages in self._where_kept(one):
                pages.let_go(one.tenant, one.keys)
            if one.is_in_pool:
                self._ends.let_go(one.tenant, one.keys[-1:])
            gone += self._all.let_go(one.tenant, one.keys)
        if gone:
            self._changed([], gone)
        return num_dropped

    def _make_room(
        self, pages: TenantPages, tenant: str, keys: Sequence[str], let_go: Callable[[Iterable[Prefix]], object]
    ) -> None:
        """Have what is retained make room for a chain of a tenant, as far as it can: ``let_go`` takes it out of
        ``pages``. Others make room for no more than the tenant may keep: what its own share has no room for they
        cannot make."""

        def num_new() -> int:
            return pages.num_new(tenant, keys)

        self._let_go(
            tenant,
            keys,
            let_go,
            while_own=lambda: num_new() > pages.own_room(tenant),
            while_any=lambda: min(num_new(), pages.own_room(tenant)) > pages.common_room,
        )

    def _let_go(
        self,
        tenant: str,
        keys: Sequence[str],
        let_go: Callable[[Iterable[Prefix]], object],
        *,
        while_own: Callable[[], bool],
        while_any: Callable[[], bool],
    ) -> None:
        """Let go of what was retained first: of the tenant ``while_own``, of all ``while_any``. What begins the chain
        that this is done for goes last: its pages would be new then."""
        if not (while_own() or while_any()):
            return
        retained = [one for one in self if not one.is_pin]
        retained.sort(key=lambda one: is_one_chain(one.keys, keys))
        own = [one for one in retained if one.tenant == tenant]
        left = (one for one in retained if one.row in self._prefixes)
        let_go(chain(takewhile(lambda _: while_own(), own), takewhile(lambda _: while_any(), left)))

    def _too_much(self, tenant: str, num_new: int) -> str:
        most, num_kept = self._all.most_of_tenant, self._all.num_of(tenant)
        if num_new + num_kept > most:
            return (
                f"{num_new} pages more are over the budget of {most} pages that a tenant may pin, of which {num_kept} "
                f"are kept: release some, or start the server with more than --banyan-told-share {self._share:g}"
            )
        return (
            f"{num_new} pages more are over what all tenants together may pin, {self.num_pages} of which are kept: "
            "try again when some have expired"
        )

    def _too_many(self, tenant: str) -> str:
        return (
            f"{self._num_prefixes[tenant]} prefixes of the tenant's and {len(self)} of all tenants are pinned, and "
            f"that is the most: {self._most_of_tenant} and {MOST_PREFIXES}, or fewer of long prompts: release some"
        )
