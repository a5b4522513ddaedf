# SPDX-License-Identifier: Apache-2.0
"""The pools of a rank by kind of page: one of full pages and, of some models, one of a second kind beside it.

Each ``TakeApart`` that a feature registers looks at what SGLang has built, and says which pools these are where it
knows how to take them apart. The last, this module's own, knows a pool that has the KV of all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from banyan.layout import MemberSlots
from banyan.refusals import pool_refusal
from banyan.refusals.speculation import draft_pool_refusal
from banyan.refusals.start import components_refusal, pool_layout_refusal
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools.allocator import QuarantiningAllocator
from banyan.sglang_plugin.pools.choose import POOLS
from banyan.sglang_plugin.pools.drafts import drafts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class KindPools:
    """The pool of the pages of one kind, and what these are.

    Attributes:
        sglang_name: what SGLang calls the pool.
        name: of the kind; "all" where there is no other, for a page then has all layers.
        drafts: pools with a row for each of the pool's own: more extents of every page.
        layers: in words, which layers a page has; "all" has no words.
        share: of what the flags give one rank, in the arena and in the store.
        num_needed: how many pages of this kind a prefix needs before its end; None: all.
        reached: beside full pages, for each layer of the model, how many layers of full pages and of this kind's there
            are up to it (``restorable.reached_in_turn``).
        num_draft_layers: beside full pages, of drafts: how many lie behind the model's in a full page, and in one of
            this kind. ``two_kinds`` tells.
        is_one_slot: a page is one slot, however many tokens it is of.
    """

    pool: Any
    allocator: QuarantiningAllocator
    sglang_name: PoolName = PoolName.KV
    name: str = "all"
    drafts: Sequence[Any] = ()
    layers: tuple[str, ...] = ()
    share: float = 1.0
    num_needed: int | None = None
    reached: tuple[tuple[int, int], ...] = ()
    num_draft_layers: tuple[int, int] = (0, 0)
    is_one_slot: bool = False

    @property
    def identity(self) -> tuple[str, ...]:
        """For the namespace: pages of both kinds may be equal in size."""
        return () if self.name == "all" else (self.name, *self.layers)

    def member_slots(self, member_slots: MemberSlots) -> MemberSlots:
        return member_slots if self.num_needed is None else member_slots.of_windows()

    def slots_of_a_page(self, page_tokens: int) -> int:
        return 1 if self.is_one_slot else page_tokens

    @property
    def num_pools(self) -> int:
        """That go with a page: its own, those of drafts, and of another kind."""
        return len((self.pool, *self.drafts)) + (self.name != "all")


@dataclass(frozen=True, slots=True)
class RankPools:
    """What a rank keeps KV in: ``kinds``, the full pages first. ``waiting`` are pools of SGLang's besides, that have to
    be told whom to wait for before a layer is read."""

    kinds: tuple[KindPools, ...]
    num_layers: int
    waiting: tuple[Any, ...] = ()


LEAST_SHARE = 0.1
"""Of arena and store, for either kind: where SGLang was told the size of one pool, the other may have any."""


TakeApart = Callable[[set[Any], Any], RankPools | None]
"""Takes the components of SGLang's tree and its parameters; None for pools that it does not know."""


def whole_pool(components: set[Any], params: Any) -> RankPools:
    """One pool with the KV of all layers. Refuses any other."""
    if components != {ComponentType.FULL}:
        runtime.refuse(components_refusal([component.name for component in components]))
    allocator = params.token_to_kv_pool_allocator
    pool, drafts = allocator.get_kvcache(), drafts_of(params)
    check_pool(pool, allocator)
    check_drafts(*drafts, *params.mtp_draft_mamba_pools)
    return RankPools((KindPools(pool=pool, allocator=allocator, drafts=drafts),), pool.layer_num)


def check_pool(pool: Any, allocator: Any) -> None:
    """Refuse a pool of keys and values, or its allocator, that is not one of Banyan's."""
    if not isinstance(pool, POOLS) or not isinstance(allocator, QuarantiningAllocator):
        runtime.refuse(pool_refusal(pool_class=type(pool).__name__, supported=("MHA", "MLA", "DSA")))
    if not hasattr(pool, "banyan_geometry"):
        runtime.refuse(pool_layout_refusal())


def check_drafts(*pools: Any) -> None:
    """Refuse a draft's pool of keys and values that is not one of Banyan's."""
    for pool in pools:
        if not isinstance(pool, POOLS) or not hasattr(pool, "banyan_geometry"):
            runtime.refuse(draft_pool_refusal(f"a {type(pool).__name__}"))


def share_of_memory(full: Any, beside: Any) -> float:
    """What is due to the second of two pools, where one of its pages belongs to many full pages or to few, as prompts
    are: SGLang has divided the rank's memory between both."""
    full_bytes, beside_bytes = (pool.banyan_geometry.num_bytes for pool in (full, beside))
    return float(min(max(beside_bytes / (full_bytes + beside_bytes), LEAST_SHARE), 1.0 - LEAST_SHARE))


def two_kinds(full: KindPools, beside: KindPools) -> tuple[KindPools, KindPools]:
    """Full pages and pages of a second kind. What the flags give a rank is divided between them."""
    num_behind, num_behind_beside = (sum(draft.layer_num for draft in kind.drafts) for kind in (full, beside))
    return (
        replace(full, name="full", layers=beside.layers, share=1.0 - beside.share),
        replace(beside, num_draft_layers=(num_behind, num_behind_beside)),
    )
