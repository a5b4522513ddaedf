# SPDX-License-Identifier: Apache-2.0
"""What routers are told of the store: all that this rank has there, nothing that has gone, each page by one rank."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace

import pytest
from sglang.srt.disaggregation.kv_events import AllBlocksCleared
from sglang.srt.mem_cache.utils import hash_str_to_int64
from test.sglang_plugin.rank.reporting.test_arena_events import (
    CONFIG,
    IDS,
    KEYS,
    NUM_PAGES,
    PAGE,
    in_arena,
    router,
    taken,
)
from test.sglang_plugin.rank.test_linker import make_rank, polled_until, transfer

from banyan import _native
from banyan.router.blocks import BITS, STORE
from banyan.sglang_plugin.rank import identity
from banyan.sglang_plugin.rank.reporting.store_events import AGAIN_S, MOST_MOVED, PAUSE_S, SLICE_PLACES, StoreEvents


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class Shelf:
    """A store of ``num_pages`` pages that lie one behind the other."""

    identity = "a"

    def __init__(self, num_pages):
        self.names, self.moves, self.num_asked = list(range(num_pages)), ([], []), []

    def moved(self, most):
        self.num_asked.append(most)
        moves, self.moves = self.moves, ([], [])
        return moves

    def own_pages(self, first, num):
        return self.names[first : first + num] if first < len(self.names) else None


def named(events):
    return [(type(event).__name__, event.medium.value, event.block_hashes) for event in events]


def test_store_when_it_is_large_then_it_is_told_slice_by_slice_and_again_later():
    clock, shelf = Clock(), Shelf(SLICE_PLACES + 1)
    told = StoreEvents(shelf, clock)
    for _ in range(2):
        assert named(told.take()) == [("BlockStored", STORE, shelf.names[:SLICE_PLACES])]
        assert told.take() == [], "not at once"
        clock.now_s += PAUSE_S
        assert named(told.take()) == [("BlockStored", STORE, shelf.names[SLICE_PLACES:])]
        clock.now_s += PAUSE_S
        assert told.take() == []
        clock.now_s += AGAIN_S - PAUSE_S
        assert told.take() == []
        clock.now_s += PAUSE_S
    assert set(shelf.num_asked) == {MOST_MOVED}


def test_store_when_pages_have_moved_then_they_are_told_at_once_and_what_is_there_comes_last():
    clock, shelf = Clock(), Shelf(2)
    told = StoreEvents(shelf, clock)
    shelf.moves = ([7], [1])
    assert named(told.take()) == [("BlockRemoved", STORE, [1]), ("BlockStored", STORE, [7, 0, 1])]
    shelf.moves = ([8], [])
    assert named(told.take()) == [("BlockStored", STORE, [8])]
    assert told.take() == []


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Starts ranks with one store."""
    monkeypatch.setattr(identity, "weights_digest", lambda config, path, revision: "weights")
    with contextlib.ExitStack() as open_ranks:

        def make(rank=0, *, rank_table=None, has_events=True, folder="store"):
            config = replace(CONFIG, store=(str(tmp_path / folder),), store_gb=0.01, store_admit="first")
            rank_table = rank_table or _native.RankTable.create(4)
            linker, _, pages = make_rank(monkeypatch, rank_table, rank, config, has_events=has_events)
            open_ranks.callback(linker.close)
            return linker, pages

        yield make


def write(linker, pages):
    linker.kinds.full.tier.store.learn([KEYS])
    linker.offload(transfer(KEYS, pages.alloc(NUM_PAGES * PAGE)))
    polled_until(linker, lambda: linker.counters.archived_pages == NUM_PAGES)


def in_store(feed):
    return [block_id for block_id in IDS if feed.blocks.run([block_id], 0, BITS[STORE])]


def test_rank_when_its_pages_are_stored_and_flushed_then_the_router_follows(start):
    linker, pages = start()
    first = taken(linker)
    assert first == [] and linker.state()["tells_store"] == linker.kinds.full.store.identity
    write(linker, pages)
    second = taken(linker)
    feed = router(first, second)
    assert in_store(feed) == in_arena(feed) == IDS
    linker.reset()
    feed = router(first, second, taken(linker, [AllBlocksCleared()]))
    assert len(feed.blocks) == 0 and feed.is_whole


def test_rank_when_pages_leave_the_store_then_the_router_is_told(start):
    linker, pages = start()
    write(linker, pages)
    first = taken(linker)
    assert linker.kinds.full.store.evict(1) == 1
    assert in_store(router(first, taken(linker))) == IDS[:-1]


def test_rank_when_it_starts_on_a_store_of_before_then_the_router_is_told_of_its_pages(start, tmp_path):
    linker, pages = start()
    write(linker, pages)
    # What a process leaves that is killed now; its lock would have gone with it.
    shutil.copytree(tmp_path / "store", tmp_path / "left")
    heir, _ = start(folder="left")
    feed = router(taken(heir))
    assert in_store(feed) == IDS and in_arena(feed) == []
    assert heir.state()["tells_store"] == linker.state()["tells_store"] != ""


def test_rank_when_its_weights_change_then_nothing_of_before_is_in_its_store(start):
    linker, pages = start()
    write(linker, pages)
    first = taken(linker)
    linker.weights_changed()
    second = taken(linker)
    assert in_store(router(first, second)) == []


def test_ranks_when_they_have_one_store_then_each_page_is_told_by_who_wrote_it(start):
    rank_table = _native.RankTable.create(4)
    writer, pages = start(rank_table=rank_table)
    other, _ = start(1, rank_table=rank_table)
    write(writer, pages)
    polled_until(other, lambda: other.kinds.full.tier.store.num_stored(KEYS) == NUM_PAGES)
    assert in_store(router(taken(writer))) == IDS and in_store(router(taken(other))) == []
    assert writer.state()["tells_store"] == other.state()["tells_store"]


def test_rank_when_nobody_is_told_then_nothing_is_noted_of_its_store(start):
    silent, pages = start(has_events=False)
    assert silent.state()["tells_store"] == "" and taken(silent, ["own"]) == ["own"]
    write(silent, pages)
    assert silent.kinds.full.store.moved(1) == ([], [])


def test_name_when_the_store_gives_it_then_it_is_that_of_sglangs_events(start):
    linker, pages = start()
    write(linker, pages)
    assert sorted(linker.kinds.full.store.own_pages(0, 100)) == sorted(hash_str_to_int64(key) for key in KEYS)
