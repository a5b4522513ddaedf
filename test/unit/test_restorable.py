# SPDX-License-Identifier: Apache-2.0
"""Window pages over the real native core: two ranks, each with two frame tables, in one process."""

import random
from itertools import dropwhile, takewhile
from types import SimpleNamespace

import pytest
from test.unit.cache_rig import LAYOUT, make_cache, request
from test.unit.directory.rig import Rank, frames, ids, keys

from banyan import restorable
from banyan._native import RankTable
from banyan.core import Run, SourceKind
from banyan.restorable import FIRST_ASKED, WindowPages, longest_restorable, reached_in_turn, window_of
from banyan.supply import Supply
from banyan.telemetry import Counters

NUM_PAGES = 2
WINDOWS = b"w" * 32
PLACES = ((1, 0), (0, 0), (1, 1), (0, 1), (1, 2), (0, 2))


class WindowRank:
    """A rank with full pages in one pool, and window pages in another one."""

    def __init__(self, rank_table, slot, num_pages=NUM_PAGES):
        behind = LAYOUT.first_window_slot
        self.full, self.window = Rank(rank_table, slot), Rank(rank_table, behind + slot, namespace=WINDOWS)
        self.counters = Counters()
        supply = Supply(self.window.peers, [behind + 1 - slot], None)
        self.pages = WindowPages(self.window.frame_table, supply, num_pages=num_pages, reached=reached_in_turn(PLACES))
        self.cache = make_cache(
            self.full.frame_table, self.full.peers, slot=slot, counters=self.counters, windows=self.pages
        )

    def publish(self, numbers, windowed=None):
        """Pages by number, each in the frame of its number; the window pages of ``windowed``."""
        self.cache.publish(frames(*numbers), keys(*numbers))
        windowed = numbers if windowed is None else windowed
        self.pages.frame_table.publish(frames(*windowed), keys(*windowed))


@pytest.fixture
def ranks():
    rank_table = RankTable.create(LAYOUT.num_slots_with_windows)
    return [WindowRank(rank_table, slot) for slot in range(2)]


def wanted(*numbers):
    """Window pages as they are asked for: from the end on, into the frames behind their numbers."""
    return keys(*numbers), frames(*(number + 8 for number in numbers))


def test_window_when_a_prefix_is_shorter_then_all_of_it_from_the_end():
    assert window_of("abcd", 3) == ["d", "c", "b"]
    assert window_of("ab", 3) == ["b", "a"]


@pytest.mark.parametrize(
    "missing, longest",
    [((), 6), ((5,), 5), ((4,), 4), ((3,), 6), ((4, 3), 3), ((1, 3, 5), 1), ((0, 2, 4), 0), (range(6), 0)],
)
def test_length_when_window_pages_are_missing_then_the_longest_that_needs_none_of_them(missing, longest):
    def holds(window):
        return next((place for place, page in enumerate(window) if page in missing), len(window))

    assert longest_restorable(range(6), 6, 2, holds) == longest


def test_length_when_every_window_page_is_missing_then_whole_windows_are_skipped():
    asked = []

    def holds(window):
        asked.append(window)
        return 0

    assert longest_restorable(range(800), 800, 8, holds) == 0
    assert len(asked) <= 2 * 100


def test_length_when_a_state_is_wanted_then_each_page_is_asked_for_once_from_the_end_on():
    asked = []

    def holds(window):
        asked.append(*window)
        return int(window == [3])

    assert longest_restorable(range(9), 8, 1, holds) == 4
    assert asked == [7, 6, 5, 4, 3]


def test_fetch_when_full_and_window_pages_are_held_then_both_arrive_layer_by_layer(ranks):
    owner, reader = ranks
    owner.publish([1, 2, 3])
    offer = reader.cache.prepare(request("r"), keys(1, 2, 3))
    assert offer.runs == (Run(SourceKind.PEER, 3),)
    assert reader.cache.admit("r", keys(1, 2, 3), frames(9, 10, 11), wanted(3, 2))
    index = reader.cache.start()
    copy = reader.cache.moving(index)
    for layer in range(len(PLACES)):
        copy.wait_layer(layer)
    assert reader.cache.finish(index) and copy.has_ended
    ages_s = copy.ages_s()
    assert len(ages_s) == 1 + len(PLACES) and ages_s == sorted(ages_s, reverse=True) and ages_s[-1] >= 0
    for number in (1, 2, 3):
        assert reader.full.pages(number + 8) == owner.full.pages(number)
    for number in (2, 3):
        assert reader.window.pages(number + 8) == owner.window.pages(number)
    assert copy.bytes_fetched == (3 + 2) * len(PLACES) * 128
    assert reader.cache.poll() is None and owner.full.frame_table.num_quarantined == 0


class Asked:
    """A copy that notes which of its layers were waited for."""

    def __init__(self):
        self.layers = []

    def wait_layer(self, layer):
        self.layers.append(layer)
        return 0.25


@pytest.mark.parametrize(("layer", "full", "window"), [(0, [], [0]), (1, [0], [0]), (2, [0], [1]), (5, [2], [2])])
def test_wait_when_one_layer_is_asked_for_then_all_before_it_are_there_in_both_copies(ranks, layer, full, window):
    copies = Asked(), Asked()
    assert ranks[0].pages.joined(*copies).wait_layer(layer) == 0.25 * len(full + window)
    assert (copies[0].layers, copies[1].layers) == (full, window)


def test_ages_when_one_copy_is_behind_then_as_far_as_both_have_come(ranks):
    def at(*ages_s):
        return SimpleNamespace(ages_s=lambda: list(ages_s))

    def told(*parts):
        return ranks[0].pages.joined(*parts).ages_s()

    # The model's layers are window, full, window, full, ...
    assert told(at(9, 8, 7), at(9.5, 8.5, 6)) == [9.5, 8.5, 8, 6, 6]
    assert told(at(9), at(9.5, 8.5, 6)) == [9.5, 8.5]
    assert told(at(), at(9)) == []


def test_offer_when_the_last_window_is_missing_then_it_ends_where_one_is_held(ranks):
    owner, reader = ranks
    owner.publish([1, 2, 3, 4, 5], windowed=[1, 2, 3])
    assert reader.cache.prepare(request("r"), keys(1, 2, 3, 4, 5)).num_pages == 3
    assert reader.counters.windowless_pages == 2
    assert list(reader.cache.lengths(keys(1, 2, 3, 4, 5), 5)) == [3, 2, 1]
    owner.publish([6], windowed=[])
    assert reader.cache.prepare(request("r"), keys(1, 2, 3, 4, 5, 6)).num_pages == 3
    assert reader.counters.windowless_pages == 3, "the same two, and one more"


class Native:
    """Frame tables of which each question is noted."""

    def __init__(self, peers):
        self._peers, self.asked = peers, []

    def lookup(self, pages, slots):
        self.asked.append(pages)
        return self._peers.lookup(pages, slots)

    def holders(self, pages, slots):
        self.asked.append(pages)
        return self._peers.holders(pages, slots)


@pytest.fixture
def native(ranks, monkeypatch):
    """What the reader asks of the window pages' frame tables."""
    native = Native(ranks[1].window.peers)
    monkeypatch.setattr(ranks[1].pages.supply, "peers", native)
    return native


def test_lengths_when_shards_want_all_of_them_then_they_are_not_looked_for_one_by_one(ranks, native):
    """SGLang asks in every pass, and a prompt has thousands of pages."""
    owner, reader = ranks
    owner.publish(range(1, 12), windowed=[1, 2, 3, 5, 6, 8, 9, 10, 11])
    assert list(reader.cache.lengths(keys(*range(1, 12)), 11)) == [11, 10, 9, 6, 3, 2, 1]
    assert native.asked == [keys(*range(1, 12))]


NUM_LONG = 8000
"""Pages of a prompt of 128,000 tokens."""


@pytest.mark.parametrize("held, longest", [([], 0), ([3], 3), ([3, 7500], 7500)])
def test_longest_when_a_prompt_is_long_then_many_pages_are_asked_about_at_once(ranks, native, held, longest):
    """That is what SGLang's scheduler waits for."""
    owner, reader = ranks
    names, reached = keys(*range(NUM_LONG)), reached_in_turn(PLACES)
    states = WindowPages(reader.pages.frame_table, reader.pages.supply, num_pages=1, reached=reached)
    owner.pages.frame_table.publish(frames(*range(len(held))), [names[length - 1] for length in held])
    assert states.longest(names, NUM_LONG) == longest
    assert len(native.asked) <= 8


def test_longest_when_the_last_page_is_held_then_few_others_are_asked_about(ranks, native):
    owner, reader = ranks
    names = keys(*range(NUM_LONG))
    owner.pages.frame_table.publish(frames(1, 2), names[-2:])
    assert reader.pages.longest(names, NUM_LONG) == NUM_LONG
    assert [len(pages) for pages in native.asked] == [FIRST_ASKED]


class DrawnSupply:
    """Pages that are held, and others, or the same, that are on their way."""

    def __init__(self, held, on_their_way):
        self._held, self.on_their_way = held, on_their_way

    def holders(self, pages):
        return [0 if page in self._held else None for page in pages]

    def arriving(self, pages):
        return [Run(SourceKind.STORE, len(list(takewhile(self.on_their_way.__contains__, pages))))]

    def has(self, window):
        behind = list(dropwhile(self._held.__contains__, window))
        return all(page in self.on_their_way for page in behind)


@pytest.mark.parametrize("num_pages", [1, 2, 3, 5])
def test_lengths_when_pages_are_held_and_on_their_way_at_random_then_those_whose_window_is_there(
    monkeypatch, num_pages
):
    """In pieces of every size: where one ends, nothing of a window is lost."""
    drawn, names = random.Random(num_pages), keys(*range(1, 25))
    for _ in range(300):
        monkeypatch.setattr(restorable, "FIRST_ASKED", drawn.randrange(1, 30))
        supply = DrawnSupply(*(drawn.sample(names, drawn.randrange(25)) for _ in range(2)))
        pages = WindowPages(None, supply, num_pages=num_pages, reached=reached_in_turn(PLACES))
        most = drawn.randrange(25)
        there = [length for length in range(most, 0, -1) if supply.has(window_of(names[:length], num_pages))]
        assert list(pages.lengths(names, most)) == there


def test_lengths_when_window_pages_are_on_their_way_then_where_what_is_held_comes_behind_them(ranks, monkeypatch):
    owner, reader = ranks
    owner.publish([1, 2, 3, 4, 5], windowed=[1, 3, 5])
    coming = set(keys(2))

    def arriving(pages):
        return [Run(SourceKind.STORE, len(list(takewhile(coming.__contains__, pages))))]

    prefetch = SimpleNamespace(on_their_way=coming, arriving=arriving)
    monkeypatch.setattr(reader.pages.supply, "prefetch", prefetch)
    assert list(reader.cache.lengths(keys(1, 2, 3, 4, 5), 5)) == [3, 1]


def test_offer_when_no_window_is_held_then_nothing_is_offered(ranks):
    owner, reader = ranks
    owner.publish([1, 2, 3], windowed=[1])
    assert reader.cache.prepare(request("r"), keys(2, 3)).num_pages == 0
    owner.pages.frame_table.publish(frames(2, 3), keys(2, 3))
    assert reader.cache.prepare(request("r"), keys(2, 3)).num_pages == 2


def test_lease_when_a_window_page_has_gone_then_neither_kind_is_held(ranks):
    owner, reader = ranks
    owner.publish([1, 2, 3])
    reader.cache.prepare(request("r"), keys(1, 2, 3))
    assert ids(owner.pages.retire(frames(2))) == [2]
    assert reader.cache.admit("r", keys(1, 2, 3), frames(9, 10, 11), wanted(3, 2)) is None
    assert ids(owner.cache.retire(frames(1, 2, 3))) == [1, 2, 3]
    assert ids(owner.pages.retire(frames(1, 3))) == [1, 3]
    assert reader.counters.fetches_refused == 1


def test_lease_when_a_full_page_has_gone_then_no_window_page_is_held(ranks):
    owner, reader = ranks
    owner.publish([1, 2, 3])
    reader.cache.prepare(request("r"), keys(1, 2, 3))
    owner.cache.retire(frames(1))
    assert reader.cache.admit("r", keys(1, 2, 3), frames(9, 10, 11), wanted(3, 2)) is None
    assert ids(owner.pages.retire(frames(1, 2, 3))) == [1, 2, 3]


def test_retire_when_window_pages_are_leased_then_they_wait_until_the_fetch_is_given_back(ranks):
    owner, reader = ranks
    owner.publish([1, 2, 3])
    reader.cache.prepare(request("r"), keys(1, 2, 3))
    assert reader.cache.admit("r", keys(1, 2, 3), frames(9, 10, 11), wanted(3, 2))
    assert ids(owner.pages.retire(frames(1, 2, 3))) == [1]
    assert reader.cache.cancel("r")
    assert sorted(ids(owner.pages.drain())) == [2, 3]


def test_reset_when_the_cache_is_flushed_then_no_window_page_is_found(ranks):
    owner, reader = ranks
    owner.publish([1, 2])
    owner.cache.reset()
    assert reader.pages.longest(keys(1, 2), 2) == 0
    assert reader.cache.prepare(request("r"), keys(1, 2)).num_pages == 0
