# SPDX-License-Identifier: Apache-2.0
"""What routers are told of the arena: the names of pages that they compute themselves, and nothing that is gone."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, KVEventBatch
from sglang.srt.mem_cache.utils import get_hash_str, hash_str_to_int64
from test.sglang_plugin.rank.hooked import hooked
from test.sglang_plugin.rank.test_linker import PAGE, make_rank, settle_kept, transfer
from test.unit.directory.rig import key
from test.unit.features.nodes.rig import until

from banyan import _native
from banyan.config import Config
from banyan.router.blocks import ARENA, BITS, block_ids, pack
from banyan.router.events import EventFeed, read_batch
from banyan.sglang_plugin.rank.reporting.arena_events import ArenaEvents

NUM_PAGES = 4
TOKENS = list(range(100, 100 + NUM_PAGES * PAGE + 1))
KEYS = get_hash_str(TOKENS[: NUM_PAGES * PAGE], None, page_size=PAGE)
IDS = list(block_ids(pack(TOKENS), PAGE))
CONFIG = Config(min_fetch_tokens=PAGE, host_gb=0.001)


def router(*batches):
    """What a router knows after these."""
    feed = EventFeed()
    for seq, events in enumerate(batches):
        feed.apply(seq, read_batch(msgspec.msgpack.encode(KVEventBatch(ts=1.0 + seq, events=events))))
    return feed


def in_arena(feed):
    return [block_id for block_id in IDS if feed.blocks.run([block_id], 0, BITS[ARENA])]


def test_events_when_pages_come_and_go_then_the_router_knows_them_by_the_names_that_it_computes():
    told = ArenaEvents()
    told.filled([5, 6], KEYS[:2])
    told.evicted(KEYS[1:2])
    told.filled([5], KEYS[2:3])
    assert in_arena(router(told.take())) == [IDS[0], IDS[2]]
    told.evicted([])
    told.has([])
    assert told.take() == []


def test_events_when_nobody_takes_them_then_only_what_differs_is_remembered_and_told():
    told, window = ArenaEvents(), 8
    keys = [key(number) for number in range(50_000)]
    told.filled(range(window), keys[:window])
    assert len(told.take()) == 1
    for number in range(window, len(keys)):
        told.evicted(keys[number - window : number - window + 1])
        told.filled([0], keys[number : number + 1])
        assert len(told._changes) <= 2 * window
    removed, stored = told.take()
    assert removed.block_hashes == [hash_str_to_int64(key) for key in keys[:window]]
    assert stored.block_hashes == [hash_str_to_int64(key) for key in keys[-window:]]
    told.evicted(keys[-1:])
    told.filled([0], keys[-1:])
    assert told.take() == [], "it was told to be there, and is"


def test_events_when_a_flush_comes_between_two_calls_then_what_is_back_is_told_again():
    told = ArenaEvents()
    told.filled([0, 1], KEYS[:2])
    told.take()
    for _ in range(3):
        told.evicted(KEYS[:2])
        told.emptied()
        told.filled([0, 1], KEYS[:2])
    removed, stored = told.take()
    assert removed.block_hashes == stored.block_hashes == [hash_str_to_int64(name) for name in KEYS[:2]]


def taken(linker, own=()):
    """What SGLang publishes: ``own`` events of its tree, and the arena's."""
    cache = SimpleNamespace(linker=SimpleNamespace(cache_linker=linker))
    take = hooked("sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.take_events", lambda cache: list(own))
    return take(cache)


def back_up(linker, pages):
    linker.offload(transfer(KEYS, pages.alloc(NUM_PAGES * PAGE)))

    def is_done():
        linker.num_completed_offloads()
        return linker.counters.backed_up_pages == NUM_PAGES

    until(is_done)


@pytest.fixture
def rank(monkeypatch):
    linker, _, pages = make_rank(monkeypatch, _native.RankTable.create(4), 0, CONFIG, has_events=True)
    back_up(linker, pages)
    yield linker
    linker.close()


def test_rank_when_its_pages_are_backed_up_and_flushed_then_the_router_follows(rank):
    first = taken(rank)
    assert in_arena(router(first)) == IDS and rank.state()["tells_arena"]
    rank.reset()
    feed = router(first, taken(rank, [AllBlocksCleared()]))
    assert len(feed.blocks) == 0 and feed.is_whole


def test_rank_when_its_weights_change_then_nothing_of_before_is_in_its_arena(rank):
    first = taken(rank)
    rank.weights_changed()
    assert in_arena(router(first, taken(rank))) == []


def test_rank_when_it_finds_what_an_arena_has_kept_then_the_router_is_told(monkeypatch):
    monkeypatch.setattr("banyan.sglang_plugin.rank.identity.weights_digest", lambda config, path, revision: "weights")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="banyan-test-") as folder:
        config, rank_tables = replace(CONFIG, keep_host_arena=folder), [_native.RankTable.create(4) for _ in range(2)]
        owner, _, pages = make_rank(monkeypatch, rank_tables[0], 0, config)
        back_up(owner, pages)
        settle_kept(owner, NUM_PAGES)
        # What a process leaves that is killed now; its lock would have gone with it.
        shutil.copytree(folder, f"{folder}/left")
        config = replace(config, keep_host_arena=f"{folder}/left")
        heir, *_ = make_rank(monkeypatch, rank_tables[1], 0, config, has_events=True)
        assert in_arena(router(taken(heir))) == IDS
        for linker in (owner, heir):
            linker.close()


def test_rank_when_sglang_publishes_nothing_then_nothing_is_remembered_for_it(monkeypatch):
    linker, *_ = make_rank(monkeypatch, _native.RankTable.create(4), 0, CONFIG)
    assert linker.arena_events is None and not linker.state()["tells_arena"]
    assert taken(linker, ["own"]) == ["own"] and taken(None, ["own"]) == ["own"]
    linker.close()
