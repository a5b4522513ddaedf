# SPDX-License-Identifier: Apache-2.0
"""The data path over the real native core: two ranks in one process."""

from collections import Counter
from types import SimpleNamespace

import pytest
from test.unit.cache_rig import PAGE_TOKENS, Notes, make_cache, request
from test.unit.directory.rig import NUM_FRAMES, Rank, frames, ids, keys

from banyan import _native
from banyan._native import FrameTable, Peers, RankTable
from banyan.cache import NOTHING_QUEUED
from banyan.core import Outcome, Refusal, Run, SourceKind
from banyan.layout import Layout
from banyan.planner import RequestFacts
from banyan.supply import Supply
from banyan.telemetry import Counters


class CountingPeers:
    """The native peers, with the calls counted."""

    def __init__(self, peers):
        self._peers = peers
        self.calls = Counter()

    def __getattr__(self, name):
        self.calls[name] += 1
        return getattr(self._peers, name)


class Node:
    """A holder and a reader, each with its cache."""

    def __init__(self):
        self.rank_table = RankTable.create(2)
        self.ranks = [Rank(self.rank_table, slot) for slot in range(2)]
        self.source = CountingPeers(self.ranks[1].peers)
        self.counters = [Counters(), Counters()]
        self.planner = Notes()
        self.is_agreed = True
        self.holder = make_cache(self.ranks[0].frame_table, self.ranks[0].peers, counters=self.counters[0])
        self.reader = make_cache(
            self.ranks[1].frame_table,
            self.source,
            slot=1,
            counters=self.counters[1],
            planner=self.planner,
            agreed=lambda granted: granted and self.is_agreed,
        )


@pytest.fixture
def node():
    return Node()


def test_fetch_when_a_peer_holds_the_prefix_then_its_bytes_arrive(node):
    node.holder.publish(frames(3, 4, 5), keys(1, 2, 3))
    offer = node.reader.prepare(request("r"), keys(1, 2, 3, 4))
    assert (offer.num_pages, offer.runs, offer.rank) == (3, (Run(SourceKind.PEER, 3),), 0)
    assert node.reader.admit("r", keys(1, 2, 3), frames(7, 8, 9))
    index = node.reader.start()
    for layer in range(3):
        node.reader.moving(index).wait_layer(layer)
    ages_s = node.reader.moving(index).ages_s()
    assert len(ages_s) == 4 and ages_s == sorted(ages_s, reverse=True)
    assert node.reader.finish(index)
    assert [node.ranks[1].pages(frame) for frame in (7, 8, 9)] == [node.ranks[0].pages(frame) for frame in (3, 4, 5)]
    seen = node.counters[1]
    assert (seen.fetches, seen.fetched_pages, seen.fetched_bytes) == (1, 3, 3 * 3 * 2 * 128)


def test_start_when_its_copies_have_ended_then_the_peers_have_their_pages_back_whatever_the_scheduler_waits_for(node):
    # A rank that waits for room does not come to finish(): two of them would wait for each other's pages.
    node.holder.publish(frames(3), keys(1))
    assert node.reader.admit("r", keys(1), frames(7))
    copy = node.reader.moving(node.reader.start())
    while not copy.has_ended:
        copy.wait_layer(2)
    assert ids(node.holder.retire(frames(3))) == [3]


def test_prepare_when_nothing_changed_then_the_directory_is_asked_once(node):
    node.holder.publish(frames(3), keys(1))
    for _ in range(5):
        assert node.reader.prepare(request("r"), keys(1)).num_pages == 1
    assert node.source.calls["lookup"] == 1


def test_counters_when_a_request_waits_and_more_is_found_then_it_counts_once(node):
    seen = node.counters[1]
    for number in range(4):
        node.reader.prepare(request("r"), keys(1, 2, 3, 4))
        assert (seen.lookups, seen.lookup_hits) == (1, number > 0)
        node.holder.publish(frames(3 + number), keys(1 + number))
    node.reader.prepare(request("s"), keys(9))
    assert (seen.lookups, seen.lookup_hits) == (2, 1)
    node.reader.forget("r")
    node.reader.prepare(request("r"), keys(9))
    assert (seen.lookups, seen.lookup_hits) == (3, 1), "another request of its name"


def test_counters_when_a_fetch_is_cancelled_and_admitted_again_then_it_counts_once(node):
    node.holder.publish(frames(3), keys(1))
    for _ in range(2):
        node.reader.prepare(request("r"), keys(1))
        assert node.reader.admit("r", keys(1), frames(7))
        node.reader.cancel("r")
    node.reader.prepare(request("r"), keys(1))
    assert node.reader.admit("r", keys(1), frames(7)) and node.reader.finish(node.reader.start())
    assert (node.counters[1].fetches, node.counters[1].lookups) == (1, 1)


def test_prepare_when_a_peer_published_since_then_the_answer_is_new(node):
    assert node.reader.prepare(request("r"), keys(1)).num_pages == 0
    node.holder.publish(frames(3), keys(1))
    assert node.reader.prepare(request("r"), keys(1)).num_pages == 1


def test_prepare_when_own_tree_grew_then_the_shorter_tail_is_looked_up(node):
    node.holder.publish(frames(3, 4), keys(1, 2))
    assert node.reader.prepare(request("r"), keys(1, 2)).num_pages == 2
    assert node.reader.prepare(request("r"), keys(2)).num_pages == 1


def test_prepare_when_another_prompt_of_as_many_pages_has_the_name_then_it_is_looked_up_itself(node):
    node.holder.publish(frames(3, 4, 5), keys(1, 2, 3))
    assert node.reader.prepare(request("r"), keys(1, 2, 3)).num_pages == 3
    assert node.reader.prepare(request("r"), keys(1, 22, 33)).num_pages == 1


def test_admit_when_another_prompt_was_looked_up_under_the_name_then_refused_and_nothing_is_held(node):
    node.holder.publish(frames(3, 4, 5), keys(1, 2, 3))
    node.reader.prepare(request("r"), keys(1, 2, 3))
    assert not node.reader.admit("r", keys(1, 22, 33), frames(7, 8, 9))
    assert ids(node.holder.retire(frames(3, 4, 5))) == [3, 4, 5]


def test_admit_when_one_of_the_same_name_is_queued_then_refused_and_the_first_lands(node):
    node.holder.publish(frames(3, 4), keys(1, 2))
    assert node.reader.admit("r", keys(1), frames(7))
    assert not node.reader.admit("r", keys(1, 2), frames(8, 9))
    assert node.reader.finish(node.reader.start())
    assert node.ranks[1].pages(7) == node.ranks[0].pages(3)


def test_forget_when_a_request_has_ended_then_its_lookup_is_gone(node):
    node.holder.publish(frames(3), keys(1))
    for _ in range(2):
        node.reader.prepare(request("r"), keys(1))
        node.reader.forget("r")
    assert node.source.calls["lookup"] == 2


def test_admit_when_a_page_was_freed_since_the_lookup_then_refused_and_nothing_is_held(node):
    node.holder.publish(frames(3, 4), keys(1, 2))
    node.reader.prepare(request("r"), keys(1, 2))
    assert ids(node.holder.retire(frames(4))) == [4]
    assert not node.reader.admit("r", keys(1, 2), frames(7, 8))
    assert node.reader.start() == NOTHING_QUEUED
    assert ids(node.holder.retire(frames(3))) == [3]
    assert node.counters[1].fetches_refused == 1


def test_admit_when_the_group_agreed_on_less_then_only_that_is_leased(node):
    node.holder.publish(frames(3, 4), keys(1, 2))
    node.reader.prepare(request("r"), keys(1, 2))
    assert node.reader.admit("r", keys(1), frames(7))
    assert ids(node.holder.retire(frames(3, 4))) == [4]


def test_retire_when_a_fetch_is_queued_then_the_page_waits_until_it_is_cancelled(node):
    node.holder.publish(frames(3), keys(1))
    node.reader.prepare(request("r"), keys(1))
    assert node.reader.admit("r", keys(1), frames(7))
    assert ids(node.holder.retire(frames(3))) == []
    assert node.ranks[0].frame_table.num_quarantined == 1
    assert ids(node.holder.drain()) == []
    assert node.reader.cancel("r")
    assert not node.reader.cancel("r")
    assert ids(node.holder.drain()) == [3]
    assert node.counters[0].quarantined_pages == 1


def test_fetches_when_given_up_then_peers_have_their_pages_back_and_the_batch_fails_and_the_next_lands(node):
    node.holder.publish(frames(3, 4), keys(1, 2))
    assert node.reader.admit("r", keys(1), frames(7))
    assert ids(node.holder.retire(frames(3))) == []
    assert node.reader.give_up() == 1
    assert ids(node.holder.drain()) == [3]
    assert node.reader.admit("s", keys(2), frames(8)), "of the same batch: SGLang hears how a whole one ended"
    assert not node.reader.finish(node.reader.start())
    assert node.counters[1].fetches_failed == 1
    assert node.reader.give_up() == 0
    assert node.reader.admit("t", keys(2), frames(9))
    assert node.reader.finish(node.reader.start())
    assert ids(node.holder.retire(frames(4))) == [4]


@pytest.mark.parametrize("take_back", [lambda reader: reader.cancel("r"), lambda reader: reader.quiesce()])
def test_fetches_when_given_up_and_taken_back_then_the_next_batch_lands(node, take_back):
    node.holder.publish(frames(3), keys(1))
    assert node.reader.admit("r", keys(1), frames(7)) and node.reader.give_up() == 1
    take_back(node.reader)
    assert node.reader.admit("s", keys(1), frames(8))
    assert node.reader.finish(node.reader.start())


def test_offer_when_neighbours_come_from_places_of_one_kind_then_they_are_one_run():
    """A plan weighs each run by itself, in each of its searches."""
    rank_table = RankTable.create(3)
    ranks = [Rank(rank_table, slot) for slot in range(3)]
    layout = Layout(dp=3, attn_dp=1, attn_cp=1, attn_tp=1)
    reader = make_cache(ranks[2].frame_table, ranks[2].peers, slot=2, slots=[0, 1], layout=layout)
    ranks[0].frame_table.publish(frames(1, 2), keys(1, 2))
    ranks[1].frame_table.publish(frames(1, 2), keys(3, 4))
    assert reader.prepare(request("r"), keys(1, 2, 3, 4)).runs == (Run(SourceKind.PEER, 4),)


def test_start_when_two_requests_want_the_same_tail_then_it_is_fetched_once(node):
    node.holder.publish(frames(3, 4), keys(1, 2))
    for rid, targets in (("a", frames(7, 8)), ("b", frames(9, 10))):
        node.reader.prepare(request(rid), keys(1, 2))
        assert node.reader.admit(rid, keys(1, 2), targets)
    index = node.reader.start()
    assert node.reader.finish(index)
    page_bytes = 3 * 2 * 128
    assert (node.counters[1].fetched_bytes, node.counters[1].copied_bytes) == (2 * page_bytes, 4 * page_bytes)
    assert node.ranks[1].pages(10) == node.ranks[0].pages(4)


def test_admit_when_another_shard_was_refused_then_this_one_gives_its_lease_back(node):
    node.holder.publish(frames(3), keys(1))
    node.reader.prepare(request("r"), keys(1))
    node.is_agreed = False
    assert node.reader.admit("r", keys(1), frames(7)) is None
    assert ids(node.holder.retire(frames(3))) == [3] and not node.reader.cancel("r")
    assert (node.counters[1].fetches, node.counters[1].fetches_refused) == (0, 1)


def test_planner_when_fetches_move_then_it_is_told_of_every_step_once(node):
    node.holder.publish(frames(3, 4), keys(1, 2))
    for rid, target in (("a", 7), ("b", 8), ("c", 9)):
        node.reader.prepare(request(rid), keys(1))
        assert node.reader.admit(rid, keys(1), frames(target))
    node.reader.cancel("b")
    index = node.reader.start()
    node.reader.finish(index)
    assert node.reader.finish(index), "a batch that is not known any more"
    node.reader.poll()
    told = node.planner.told
    fetches = told[4][1]
    assert [fetch.request for fetch in fetches] == ["a", "c"]
    assert all(fetch.tokens == {SourceKind.PEER: PAGE_TOKENS} for fetch in fetches)
    assert told == [
        *((rid, Outcome.LEASED) for rid in "abc"),
        ("b", Outcome.CANCELLED),
        ("started", fetches),
        ("a", Outcome.LANDED),
        ("c", Outcome.LANDED),
        ("moved", fetches),
    ]


def test_planner_when_a_fetch_is_refused_then_told_and_the_next_batch_has_nothing(node):
    node.reader.prepare(request("r"), keys(1))
    assert node.reader.admit("r", keys(1), frames(7)) is None
    assert node.reader.start() == NOTHING_QUEUED
    assert node.planner.told == [("r", Refusal.IN_FLIGHT_READ), ("started", ())]


def test_reset_when_copies_move_and_fetches_wait_then_all_are_given_back(node):
    node.holder.publish(frames(3, 4), keys(1, 2))
    for rid, target in (("a", 7), ("b", 8)):
        node.reader.prepare(request(rid), keys(1))
        assert node.reader.admit(rid, keys(1), frames(target))
        if rid == "a":
            index = node.reader.start()
    node.reader.reset()
    assert node.reader.moving(index) is None
    assert ids(node.holder.retire(frames(3, 4))) == [3, 4]


@pytest.mark.parametrize("lands", [True, False])
def test_quiesce_when_a_batch_moves_then_how_it_ended_is_told_when_it_is_asked_for(node, monkeypatch, lands):
    node.holder.publish(frames(3), keys(1))
    assert node.reader.admit("r", keys(1), frames(7))
    index = node.reader.start()
    monkeypatch.setattr(node.reader._full.supply, "are_good", lambda in_flight_reads: lands)
    node.reader.quiesce()
    assert node.reader.moving(index) is None
    assert node.reader.finish(index) is lands
    assert node.reader.finish(index), "nothing is known of it any more"


def test_start_when_no_copy_can_begin_then_its_fetches_have_failed_and_nothing_is_held(node, monkeypatch):
    node.holder.publish(frames(3), keys(1))
    assert node.reader.admit("r", keys(1), frames(7))
    monkeypatch.setattr(node.reader._full.supply, "start_copy", lambda held: 1 / 0)
    index = node.reader.start()
    node.reader.moving(index).wait_layer(0)
    assert not node.reader.finish(index)
    assert ids(node.holder.retire(frames(3))) == [3]


def test_finish_when_it_fails_then_the_batch_is_detached_from_its_reads_all_the_same(node, monkeypatch):
    """What stays attached would keep every flush and every change of the weights from being gone through with."""

    class Broken:
        has_ended, copy_s = True, 0.0

        def finish(self):
            raise OSError("the driver")

    node.holder.publish(frames(3), keys(1))
    assert node.reader.admit("r", keys(1), frames(7))
    monkeypatch.setattr(node.reader._full.supply, "start_copy", lambda held: Broken())
    index, detached = node.reader.start(), []
    monkeypatch.setattr(node.reader._full.supply, "detach", detached.append)
    with pytest.raises(OSError, match="driver"):
        node.reader.finish(index)
    node.reader.poll()
    node.reader.poll()
    assert len(detached) == 1


def test_admit_when_pages_cannot_be_held_then_the_other_shards_are_answered(node, monkeypatch):
    node.holder.publish(frames(3), keys(1))
    answered = []
    monkeypatch.setattr(node.reader, "_agreed", lambda granted: answered.append(granted) or granted)
    monkeypatch.setattr(node.reader._full.supply, "hold", lambda *wanted: 1 / 0)
    assert node.reader.admit("r", keys(1), frames(7)) is None
    assert answered == [False]


def test_lose_when_nobody_could_wait_for_a_layer_then_the_batch_has_failed(node):
    node.holder.publish(frames(3), keys(1))
    assert node.reader.admit("r", keys(1), frames(7))
    index = node.reader.start()
    node.reader.lose(index)
    assert not node.reader.finish(index)


def test_stop_when_something_is_granted_then_it_lands_and_nothing_more_is_promised_or_published(node):
    node.holder.publish(frames(3, 4), keys(1, 2))
    assert node.reader.admit("r", keys(1), frames(7))
    index = node.reader.start()
    (copy,) = node.reader.stop()
    assert copy is node.reader.moving(index)
    assert node.reader.finish(index) and node.ranks[1].pages(7) == node.ranks[0].pages(3)
    assert node.reader.prepare(request("s"), keys(1, 2)).num_pages == 0
    assert node.reader.admit("s", keys(1, 2), frames(8, 9)) is None
    node.reader.publish(frames(7), keys(1))
    assert node.counters[1].published_pages == 0


def test_prepare_when_the_holder_was_reset_then_nobody_has_it(node):
    node.holder.publish(frames(3), keys(1))
    assert node.reader.prepare(request("r"), keys(1)).num_pages == 1
    node.holder.reset()
    assert node.reader.prepare(request("r"), keys(1)).num_pages == 0


def test_remember_when_many_requests_are_aborted_then_old_lookups_are_forgotten(node):
    node.reader._seen.most = 4
    for number in range(20):
        node.reader.prepare(request(f"r{number}"), keys(1))
    assert len(node.reader._seen) == 4


def test_move_to_when_the_namespace_changes_then_the_old_reader_bit_is_free_and_sharing_goes_on(node):
    node.holder.publish(frames(3), keys(1))
    assert node.reader.prepare(request("r"), keys(1)).num_pages == 1
    for slot, cache in enumerate((node.holder, node.reader)):
        cache.quiesce()
        rank = node.ranks[slot]
        rank.frame_table.close()
        rank.frame_table = rank.peers = node.source = None

        def join(rank=rank, slot=slot):
            arguments = (b"m" * 32, rank.geometry, rank.pool)
            return (
                FrameTable(node.rank_table, slot, arguments[0], rank.pool, NUM_FRAMES, rank.geometry),
                Supply(Peers(node.rank_table, slot, slot, *arguments), [1 - slot], None),
            )

        cache.move_to([join])
    assert node.reader.prepare(request("r"), keys(1)).num_pages == 0
    node.holder.publish(frames(3), keys(1))
    assert node.reader.prepare(request("r"), keys(1)).num_pages == 1


def test_move_to_when_it_fails_then_pages_that_are_freed_are_handed_out_all_the_same(node):
    node.holder.publish(frames(3), keys(1))
    node.holder.quiesce()

    def join():
        raise OSError("too many open files")

    with pytest.raises(OSError, match="open files"):
        node.holder.move_to([join])
    node.holder.stop()
    assert ids(node.holder.retire(frames(3, 4))) == [3, 4] and ids(node.holder.drain()) == []
    assert node.holder.prepare(request("r"), keys(1)).num_pages == 0 and node.holder.copies_of(keys(1)) == [None]
    node.holder.log_access(_native.page_numbers(keys(1)))
    node.holder.reset()
    assert node.reader.prepare(request("r"), keys(1)).num_pages == 0


def test_fetch_when_the_dispatcher_named_a_holder_then_it_is_asked_first_and_supplies():
    rank_table = RankTable.create(3)
    ranks = [Rank(rank_table, slot) for slot in range(3)]
    for rank in ranks[1:]:
        rank.frame_table.publish(frames(1, 2), keys(1, 2))
    three = Layout(dp=3, attn_dp=1, attn_cp=1, attn_tp=1)
    cache = make_cache(ranks[0].frame_table, ranks[0].peers, slots=[1, 2], layout=three)
    for named, supplier in ((-1, 1), (0, 1), (2, 2)):
        facts = RequestFacts(f"named {named}", None, PAGE_TOKENS, None, max_rank=named)
        assert cache.prepare(facts, keys(1, 2)).rank == supplier
        assert cache.admit(facts.id, keys(1, 2), frames(4, 5)) is not None
        assert cache.finish(cache.start())
        assert ranks[0].pages(4) == ranks[supplier].pages(1)


def test_hold_when_the_lease_fails_then_the_read_behind_it_is_let_go():
    """What a read is attached to for ever keeps it from landing."""
    detached = []

    def fail(match, keys):
        raise OSError("the driver refuses")

    reads = SimpleNamespace(attach=lambda keys, frames: ["read"], detach=detached.append)
    supply = Supply(SimpleNamespace(lease=fail), [0], reads)
    with pytest.raises(OSError, match="the driver refuses"):
        supply.hold(SimpleNamespace(num_pages=1), keys(1, 2), frames(1, 2))
    assert detached == ["read"]
