# SPDX-License-Identifier: Apache-2.0
"""What a rank keeps because it was told to, and what else it does when it is told something of a prefix.

Every rank of a server gets every command: the pages of a prefix may lie in any pool, and in any part of arena and
store. One of them reads what is to be prefetched. Scheduler thread only.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from banyan.arena.page_source import all_that_is_found
from banyan.features.told.command import Action, Command
from banyan.features.told.prefix import Prefix
from banyan.features.told.table import Refused, Told
from banyan.routing.tenant_secret import tenants_part
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.page_hash import namespace_seed
from banyan.sglang_plugin.rank import requests
from banyan.sglang_plugin.rank.one_rank import Rank
from banyan.sglang_plugin.rank.points import Attachment, Points
from banyan.store.backends import native_store
from banyan.telemetry import Pseudonyms

MOST_LISTED = 256
"""Prefixes, the latest."""

_at: ToldRank | None = None


def register(points: Points) -> None:
    points.attach.append(lambda rank: ToldRank(rank, points))


def installed() -> ToldRank | None:
    """That of this process; None before SGLang has built the rank."""
    return _at


class ToldRank(Attachment):
    """One rank's."""

    def __init__(self, rank: Rank, points: Points) -> None:
        global _at
        self._rank = rank
        self._is_stopped = False
        self._pool_keeps = False
        """Whether what leaves the pool is chosen by what is kept. Known with the first command."""
        self._num_untold = 0
        self._names = (f"told {number}" for number in itertools.count())
        self._told = Told(
            points.kept,
            points.kept_in_pool,
            points.ends_in_pool,
            sizes=self._sizes,
            share=rank.kinds.full.config.told_share,
            changed=self._changed,
            clock=time.monotonic,
        )
        _at = self

    # ---- what it is told ---------------------------------------------------------------------------------------

    def obey(self, command: Command, cache: Any) -> dict[str, Any]:
        """Do as told; ``cache`` is SGLang's. What becomes of it; nothing where this rank has stopped to share.

        Raises:
            Refused: with the line for whoever has told it.
        """
        self._num_untold += command.num_untold
        if self._is_stopped:
            return {}
        if command.action is Action.LIST:
            return {"prefixes": self._listed(command)}
        self._pool_keeps = getattr(cache, "banyan_victims", None) is not None
        page_tokens = self._rank.page_tokens
        keys = requests.page_keys(
            command.input_ids, page_tokens, extra_key=command.extra_key, cache_salt=command.cache_salt
        )
        if not keys:
            raise Refused(f"the prompt is shorter than a page of {page_tokens} tokens: there is nothing to keep")
        answer = self._do(command, keys)
        if command.action in (Action.PIN, Action.RETAIN):
            self._split_pool(command, cache, answer["num_pages"])
        return {**answer, "num_tokens": answer["num_pages"] * page_tokens}

    def close(self, session: str) -> None:
        """A session is over."""
        self._told.close(session)

    def _do(self, command: Command, keys: list[str]) -> dict[str, Any]:
        tenant, space = self._tenant(command), _space(command)
        match command.action:
            case Action.PIN:
                self._told.pin(tenant, keys, command.ttl_s, command.session, space=space, name=command.name)
            case Action.RETAIN:
                num_pages = self._told.retain(
                    tenant, keys, command.ttl_s, command.session, space=space, name=command.name
                )
                return {"num_pages": num_pages, "num_pages_asked": len(keys)}
            case Action.RELEASE if command.takes_back:
                self._told.take_back(command.takes_back)
            case Action.RELEASE:
                return {"num_pages": len(keys), "num_prefixes": self._told.release(tenant, keys)}
            case Action.PREFETCH:
                self._rank.owners.asked(command.cache_salt, keys)
                return {"num_pages": len(keys), "num_pages_found": self._prefetch(keys)}
            case Action.DEMOTE:
                self._rank.kinds.demote(keys)
        return {"num_pages": len(keys)}

    def _prefetch(self, keys: list[str]) -> int:
        full = self._rank.kinds.full
        if not self._rank.kinds.have_tiers:
            raise Refused("there is no arena to bring pages to: start the server with --banyan-host-gb")
        slots = sorted(full.member_slots.with_peers)
        # Where another server of a pair reads, nothing would come, and these pages would pass for that one's to write.
        reads = full.tier is None or full.tier.partner.reads_ahead
        if reads and slots[int(keys[0][:8], 16) % len(slots)] == full.member_slots.own:
            self._rank.kinds.arrive(next(self._names), keys, all_that_is_found)
        return 0 if full.tier is None else full.tier.num_there(keys)

    def _split_pool(self, command: Command, cache: Any, num_pages: int) -> None:
        """Have what is kept end a node of SGLang's tree, where the pool's victims are Banyan's."""
        if not (num_pages and self._pool_keeps):
            return
        num_tokens = num_pages * self._rank.page_tokens + requests.tokens_ahead()
        key = RadixKey(
            array("q", command.input_ids[:num_tokens]),
            extra_key=command.extra_key,
            cache_salt=command.cache_salt,
        )
        cache.match_prefix(MatchPrefixParams(key=key))

    # ---- what it keeps -----------------------------------------------------------------------------------------

    def _sizes(self) -> tuple[int, int]:
        full, pool_pages = self._rank.kinds.full, self._rank.num_frames
        # Of an arena that grows, all that it may have: ranks have grown theirs by different amounts.
        arena_pages = full.most_arena_frames * len(full.member_slots.with_peers)
        return max(pool_pages, arena_pages), pool_pages if self._pool_keeps else 0

    def _changed(self, came: list[str], gone: list[str]) -> None:
        for kind in self._rank.kinds:
            store = native_store(kind.store)
            if store is not None:
                store.keep(came)
                store.let_go(gone)
            if kind.tier is not None:
                kind.tier.residency.kept_no_more(gone)

    def poll(self) -> None:
        self._told.expire()

    def stop(self) -> None:
        self._is_stopped = True

    # ---- what it tells -----------------------------------------------------------------------------------------

    def _listed(self, command: Command) -> list[dict[str, Any]]:
        """What is kept of prompts with this salt and extra key."""
        space = _space(command)
        return [self._row(one) for one in [one for one in self._told if one.space == space][-MOST_LISTED:]]

    def _tenant(self, command: Command) -> str:
        """Who pays for it: whatever a client may choose besides makes no other tenant of it."""
        salt = command.cache_salt
        if not salt:
            return _seed(command.extra_key, None)
        return _seed(None, tenants_part(salt, self._rank.kinds.full.config.tenant_secret_file))

    @cached_property
    def _pseudonyms(self) -> Pseudonyms:
        return Pseudonyms(runtime.server_id())

    def _row(self, one: Prefix) -> dict[str, Any]:
        return {
            "action": Action.PIN if one.is_pin else Action.RETAIN,
            "key": self._pseudonyms.of_key(one.keys[-1]),
            "num_tokens": len(one.keys) * self._rank.page_tokens,
            "expires_in_s": round(one.expires_s - time.monotonic(), 1),
            "in_pool": one.is_in_pool,
        }

    def figures(self) -> Mapping[str, Any]:
        told = self._told
        tenants = {one.tenant for one in told}
        return {
            "told": {
                "num_prefixes": len(told),
                "num_pages": told.num_pages,
                "num_pool_pages": told.num_pool_pages,
                "num_tenants": len(tenants),
                "most_pages_of_tenant": told.most_of_tenant,
                "num_refused": told.num_refused,
                "num_untold": self._num_untold,
            }
        }


def _space(command: Command) -> str:
    """What its pages' keys begin with."""
    return _seed(command.extra_key, command.cache_salt)


def _seed(extra_key: str | None, cache_salt: str | None) -> str:
    try:
        seed = namespace_seed(extra_key, cache_salt)
    except ValueError as error:
        raise Refused("cache_salt, extra_key: no Unicode") from error
    return "" if seed is None else seed.hex()
