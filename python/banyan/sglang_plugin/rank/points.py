# SPDX-License-Identifier: Apache-2.0
"""Where a rank takes in features: each registers here what it brings, before the rank is put together.

The rank asks these lists and knows no feature by name. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from banyan import _native, feature_list
from banyan.arena.owners import Owners
from banyan.arena.page_source import Source
from banyan.arena.partner import Partner
from banyan.arena.prefetch import Prefetch
from banyan.arena.residency import Residency
from banyan.arena.store_tier import StoreTier
from banyan.sglang_plugin import runtime
from banyan.sglang_plugin.pools.kind_pools import RankPools, TakeApart, whole_pool
from banyan.telemetry import Counters

if TYPE_CHECKING:
    from banyan.sglang_plugin.rank.kind import Kind
    from banyan.sglang_plugin.rank.one_rank import Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class TierParts:
    """Of a tier, what sources have to do with; for one namespace. ``store``: where there is one, and it is known
    without asking what it holds. ``files``: the same one, where it is of Banyan's own files."""

    namespace: bytes
    memory: _native.SharedBytes
    prefetch: Prefetch
    residency: Residency
    store: StoreTier | None
    files: _native.Store | None
    counters: Counters


class SourceAccess:
    """What opens sources for one kind of pages, namespace after namespace. What is not overridden is nothing.

    States: apart -> ``sources`` (a namespace) -> joined -> ``call_in`` -> ``leave`` -> apart -> ... -> ``close``.
    """

    def sources(self, parts: TierParts, nearer: Sequence[Source]) -> list[Source]:
        """All sources of a tier, the nearest first: ``nearer``, or what takes their place, and what is behind them."""
        return list(nearer)

    def call_in(self) -> None:
        """Lend nothing any more: the frames are about to be given up."""

    def leave(self) -> None:
        """The tier has been left."""

    def close(self) -> None:
        """It has been left for good."""

    def count(self, counters: Counters) -> None:
        """Bring this rank's counters up to date."""

    def store_troubles(self) -> Mapping[str, int]:
        """What it has met at the drives of the rank's store: to be counted with what the store has met itself."""
        return {}

    def state(self) -> Mapping[str, Any]:
        """The part of ``/server_info``."""
        return {}


class Attachment:
    """What a feature has at a rank. What is not overridden is nothing."""

    def poll(self) -> None:
        """Go on with what is under way. Called all the time; never waits."""

    def stop(self) -> None:
        """Something that keeps wrong pages from being shared has failed: promise nothing any more."""

    def quiesce(self) -> None:
        """Nothing is to be queued or under way any more."""

    def figures(self) -> Mapping[str, Any]:
        """What changes and is cheap to tell: for ``/metrics``, and with ``state`` for ``/server_info``."""
        return {}

    def state(self) -> Mapping[str, Any]:
        """The part of ``/server_info``."""
        return {}


@dataclass(slots=True)
class Points:
    """What features have registered.

    Attributes:
        kinds: each looks at the pools that SGLang has built.
        sources: each makes, for a kind of pages with an arena, what opens sources; or None. It has not joined yet.
        partner: who has a part in requests beside this rank, for a kind of pages.
        attach: each is given the rank that was put together.
        owners: who asks whose pages are whose, for all kinds of pages.
        kept: keys of pages that go last from the arena; ``kept_in_pool``: from the rank's pool, where
            ``ends_in_pool`` are the last ones of what is kept as one. They change.
    """

    kinds: list[TakeApart] = field(default_factory=list)
    sources: list[Callable[[Kind], SourceAccess | None]] = field(default_factory=list)
    partner: Callable[[Kind], Partner] = lambda kind: Partner()
    attach: list[Callable[[Rank], Attachment]] = field(default_factory=list)
    owners: Owners = field(default_factory=Owners)
    kept: set[str] = field(default_factory=set)
    kept_in_pool: set[str] = field(default_factory=set)
    ends_in_pool: set[str] = field(default_factory=set)

    def take_apart(self, components: set[Any], params: Any) -> RankPools:
        """The pools of this rank by kind. Refuses those that nobody knows."""
        for take_apart in self.kinds:
            pools = take_apart(components, params)
            if pools is not None:
                return pools
        return whole_pool(components, params)


def of_features() -> Points:
    """What the features that are on in this process bring to a rank."""
    points = Points()
    for name, parts in feature_list.installed().items():
        if parts.rank and runtime.is_on(name):
            feature_list.part(parts.rank)(points)
    return points
