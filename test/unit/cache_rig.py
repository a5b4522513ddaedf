# SPDX-License-Identifier: Apache-2.0
"""A rank's cache on a node of two, without SGLang."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from banyan.arena.prefetch import Prefetch
from banyan.cache import PrefixCache
from banyan.core import Fetch, Outcome, Refusal, Run
from banyan.layout import Layout, MemberSlots
from banyan.planner import RequestFacts
from banyan.restorable import KindPages, WindowPages
from banyan.supply import Supply
from banyan.telemetry import Counters

NUM_RANKS = 2
LAYOUT = Layout(dp=NUM_RANKS, attn_dp=1, attn_cp=1, attn_tp=1)
PAGE_TOKENS = 16


class Notes:
    """A planner that finds everything worth reading, and writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def num_to_read(self, request: RequestFacts, num_missing: int, found: Run, /) -> int:
        return found.num_pages

    def became(self, request: str, outcome: Outcome) -> None:
        self.told.append((request, outcome))

    def refused(self, request: str, why: Refusal) -> None:
        self.told.append((request, why))

    def started(self, fetches: Sequence[Fetch]) -> None:
        self.told.append(("started", tuple(fetches)))

    def moved(self, fetches: Sequence[Fetch], copy_s: float) -> None:
        self.told.append(("moved", tuple(fetches)))

    def was_read(self, came: Run, read_s: float) -> None:
        self.told.append(("was_read", came))


def request(rid: str) -> RequestFacts:
    return RequestFacts(rid, None, PAGE_TOKENS, None)


def make_cache(
    frame_table: Any,
    peers: Any,
    *,
    slot: int = 0,
    slots: Sequence[int] | None = None,
    counters: Counters | None = None,
    prefetch: Prefetch | None = None,
    planner: Notes | None = None,
    agreed: Callable[[bool], bool] = bool,
    layout: Layout = LAYOUT,
    is_sent_for: Callable[[str], bool] = lambda rid: False,
    send_for: Callable[[str], bool] = lambda rid: False,
    windows: WindowPages | None = None,
) -> PrefixCache:
    """The cache of the rank in ``slot``; it asks the other one's pool unless ``slots`` says otherwise."""
    cache = PrefixCache(
        member_slots=MemberSlots(layout, slot, 0),
        page_tokens=PAGE_TOKENS,
        full=KindPages(frame_table, Supply(peers, [1 - slot] if slots is None else slots, prefetch)),
        beside=() if windows is None else (windows,),
        planner=planner or Notes(),
        agreed=agreed,
        counters=counters or Counters(),
    )
    cache.read_elsewhere(SimpleNamespace(is_sent_for=is_sent_for, send_for=send_for))
    return cache
