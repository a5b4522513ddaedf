# SPDX-License-Identifier: Apache-2.0
"""What other routers are told of the arena: pages with their tokens, behind the page that they follow."""

from __future__ import annotations

import time

import pytest
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, StorageMedium
from sglang.srt.mem_cache.utils import get_hash_str, hash_str_to_int64

from banyan.sglang_plugin.rank.reporting.arena_events import ArenaEvents
from banyan.sglang_plugin.rank.reporting.page_tokens import KEPT_S

PAGE, NUM_PAGES = 4, 4
TOKENS = list(range(100, 100 + NUM_PAGES * PAGE))
KEYS = get_hash_str(TOKENS, None, page_size=PAGE)
NAMES = [hash_str_to_int64(key) for key in KEYS]


def in_pool(first=0, last=NUM_PAGES, salt=None):
    """SGLang's event: these pages have entered its pool."""
    return BlockStored(
        block_hashes=NAMES[first:last],
        parent_block_hash=NAMES[first - 1] if first else None,
        token_ids=TOKENS[first * PAGE : last * PAGE],
        block_size=PAGE,
        lora_id=None,
        medium=StorageMedium.GPU,
        cache_salt=salt,
    )


def out_of_pool(*places):
    return BlockRemoved(block_hashes=[NAMES[place] for place in places], medium=StorageMedium.GPU)


def told_of(events):
    """``{page: (tokens, the page before it)}`` as a router reads it; None for a page without tokens."""
    told = {}
    for event in events:
        if isinstance(event, BlockStored) and event.medium == StorageMedium.CPU:
            before = event.parent_block_hash
            for place, name in enumerate(event.block_hashes):
                tokens = event.token_ids[place * event.block_size : (place + 1) * event.block_size]
                told[name] = (tokens, before) if event.block_size else None
                before = name
    return told


WHOLE = {
    name: (TOKENS[place * PAGE : (place + 1) * PAGE], NAMES[place - 1] if place else None)
    for place, name in enumerate(NAMES)
}


@pytest.fixture
def arena():
    return ArenaEvents()


def test_page_when_the_pool_had_it_then_its_tokens_and_the_page_before_it_are_told(arena):
    arena.filled(range(NUM_PAGES), KEYS)
    events = arena.take([in_pool(0, 2, salt="theirs"), in_pool(2, salt="theirs")])
    assert told_of(events) == WHOLE and len(events) == 1, "one chain, one event"
    assert events[0].cache_salt == "theirs"


def test_page_when_it_leaves_the_pool_as_it_enters_the_arena_then_its_tokens_are_told_all_the_same(arena):
    assert arena.take([in_pool()]) == []
    arena.filled([0, 1], KEYS[2:])
    assert told_of(arena.take([out_of_pool(0, 1, 2, 3)])) == {name: WHOLE[name] for name in NAMES[2:]}


def test_pages_when_they_are_of_several_chains_then_each_has_an_event_of_its_own(arena):
    arena.filled(range(3), [KEYS[0], KEYS[3], KEYS[1]])
    events = arena.take([in_pool()])
    assert told_of(events) == {NAMES[place]: WHOLE[NAMES[place]] for place in (0, 1, 3)} and len(events) == 3


def test_page_when_only_later_its_tokens_are_known_then_it_is_told_again(arena):
    arena.has(KEYS)
    assert told_of(arena.take()) == dict.fromkeys(NAMES)
    assert told_of(arena.take([in_pool(0, 2)])) == {name: WHOLE[name] for name in NAMES[:2]}
    assert arena.take([in_pool(0, 2)]) == [], "once"
    arena.evicted(KEYS[2:3])
    assert told_of(arena.take([in_pool()])) == {NAMES[3]: WHOLE[NAMES[3]]}, "what has gone is not told to be there"


def num_remembered(arena):
    return len(arena._tokens._pages) + len(arena._tokens._unknown)


def forgotten(arena):
    """So long later."""
    late_s = time.monotonic() + KEPT_S
    arena._tokens._clock = lambda: late_s
    arena.take()
    arena._tokens._clock = time.monotonic


def test_pages_when_pool_and_arena_have_lost_them_then_nothing_is_remembered(arena):
    arena.filled(range(NUM_PAGES), KEYS)
    arena.take([in_pool()])
    assert num_remembered(arena) == NUM_PAGES
    arena.evicted(KEYS[:2])
    arena.take([out_of_pool(0, 2)])
    forgotten(arena)
    assert num_remembered(arena) == 3, "one is gone, one is in the pool, one in the arena, one in both"
    arena.evicted(KEYS[2:])
    arena.take([out_of_pool(1, 3)])
    forgotten(arena)
    assert num_remembered(arena) == 0
    arena.has(KEYS)
    arena.take()
    arena.emptied()
    arena.evicted(KEYS)
    arena.take()
    forgotten(arena)
    assert num_remembered(arena) == 0


def test_page_when_it_lands_in_the_arena_some_steps_behind_its_end_in_the_pool_then_its_tokens_are_known(arena):
    arena.take([in_pool()])
    arena.take([out_of_pool(0, 1, 2, 3)])
    for _ in range(1_000):
        arena.take()
    arena.filled(range(NUM_PAGES), KEYS)
    assert told_of(arena.take()) == WHOLE


def test_page_when_it_left_the_pool_and_came_back_between_two_calls_then_its_tokens_are_known(arena):
    arena.take([in_pool()])
    arena.take([out_of_pool(0, 1, 2, 3), in_pool()])
    arena.filled(range(NUM_PAGES), KEYS)
    assert told_of(arena.take()) == WHOLE


def test_pages_when_everything_is_cleared_then_what_comes_behind_it_is_told_anew(arena):
    arena.filled(range(NUM_PAGES), KEYS)
    arena.take([in_pool()])
    arena.evicted(KEYS)
    arena.emptied()
    arena.filled([0], KEYS[:1])
    assert told_of(arena.take([AllBlocksCleared(), in_pool(0, 1)])) == {NAMES[0]: WHOLE[NAMES[0]]}
    assert num_remembered(arena) == 1
